"""A store written by Spark's executors: rows are shuffled to ranges of store ids, a range becomes pieces of files.

The driver plans, and writes store.json last. No row passes through it.
"""

from hoploom.ingest.spark.frames import SharedRows
from hoploom.ingest.spark.write import write_shared

__all__ = ["SharedRows", "write_shared"]
