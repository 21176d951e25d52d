"""Write stores in bounded memory from streams: rows of nodes and edges that arrive in any order."""

from hoploom.ingest.stream.streams import LEAST_MEMORY as LEAST_MEMORY
from hoploom.ingest.stream.streams import EdgeRows as EdgeRows
from hoploom.ingest.stream.streams import EdgeRule as EdgeRule
from hoploom.ingest.stream.streams import EdgeStream as EdgeStream
from hoploom.ingest.stream.streams import NodeFields as NodeFields
from hoploom.ingest.stream.streams import NodeStream as NodeStream
from hoploom.ingest.stream.streams import Progress as Progress
from hoploom.ingest.stream.streams import Rows as Rows
from hoploom.ingest.stream.streams import StoreOptions as StoreOptions
from hoploom.ingest.stream.to_store import write_store as write_store
