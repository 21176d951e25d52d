"""Write a store on Spark: executors write ranges of store ids as pieces of files, the driver writes store.json last."""

from hoploom.ingest.spark.frames import SharedRows
from hoploom.ingest.spark.shared_store import write_shared

__all__ = ["SharedRows", "write_shared"]
