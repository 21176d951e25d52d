"""Write a store by Spark's executors: rows are shuffled into ranges of store ids, and a range becomes pieces of files.

The driver plans, and writes store.json last. No row passes through it.
"""

from hoploom.ingest.spark.frames import SharedRows
from hoploom.ingest.spark.shared_store import write_shared

__all__ = ["SharedRows", "write_shared"]
