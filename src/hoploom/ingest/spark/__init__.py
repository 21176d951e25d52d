"""Write a store on Spark: rows are shuffled into ranges of store ids, and executors write ranges as pieces of files.

The driver plans, and writes store.json last. No row passes through the driver.
"""

from hoploom.ingest.spark.frames import SharedRows
from hoploom.ingest.spark.shared_store import write_shared

__all__ = ["SharedRows", "write_shared"]
