"""Ids numbered by Spark: one shuffle into ranges of their order; a task sorts a range, numbers and counts its ids.

Spark finds the ranges by a small sample, so ids may lie in any way. A task's last row tells its counts. The driver adds
these up, and so knows the first number of every range: numbers follow from the order, not from where ranges begin.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from hoploom.ingest.spark.frames import JOIN_BYTES, JOINED_BYTES, freeze_imports, ranges_for, set_batch_rows
from hoploom.ingest.tables.id_counts import IdCounts

INTEGER_BYTES, TEXT_BYTES = 16, 64  # of a row, about


def numbered(ids: DataFrame, num_rows: int) -> DataFrame:
    """Rows [id, range, place, again, told] of ids [id, part], which have a `bucket` too if they are texts.

    `place` counts the ids of a range; `again` is true where the same id has come before. The last row of a range has
    no id: it is told what was counted there.
    """
    session, text = ids.sparkSession, "bucket" in ids.columns
    order = ["part", "bucket", "id"] if text else ["part", "id"]
    tasks = session.sparkContext.defaultParallelism
    ranges = ranges_for(num_rows, num_rows, JOINED_BYTES, 8 * JOIN_BYTES, tasks)
    moved = ids.repartitionByRange(ranges.count, *order[:2]).sortWithinPartitions(*order).select("id", "part")
    set_batch_rows(session, TEXT_BYTES if text else INTEGER_BYTES)
    kind = "string" if text else "long"
    return moved.mapInArrow(partial(_numbered, text), f"id {kind}, range int, place long, again boolean, told string")


def counted(kept: DataFrame) -> tuple[DataFrame, IdCounts]:
    """The map [id, node, again] of what `numbered` has made, and the counts of all ids."""
    told = {row[0]: _read(row[1]) for row in kept.filter("told is not null").select("range", "told").collect()}
    sizes = [told[number].num_ids if number in told else 0 for number in range(max(told, default=0))]
    begins = ",".join(f"{begin}L" for begin in accumulate(sizes, initial=0))
    node = sql.expr(f"element_at(array({begins}), range + 1) + place").alias("node")
    counts = IdCounts()
    for one in told.values():
        counts.add(one)
    return kept.filter("told is null").select("id", node, "again"), counts


def _read(told: str) -> IdCounts:
    given = json.loads(told)
    return IdCounts({int(part): rows for part, rows in given.pop("sizes").items()}, **given)


def _numbered(text: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    freeze_imports()
    counts, last = IdCounts(), None
    for batch in batches:
        known = batch.filter(batch.column("id").is_valid())
        ids, again = known.column("id"), np.zeros(known.num_rows, bool)
        if len(ids):
            again[0] = ids[0] == last
            again[1:] = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
            last = ids[-1]
        places = np.arange(counts.num_ids, counts.num_ids + len(ids))
        counts.add(IdCounts(_sizes(known.column("part")), len(batch) - len(ids), int(again.sum())))
        if text:
            counts.add_texts(ids)
        yield _rows(ids, places, again, [None] * len(ids))
    nothing = pa.nulls(1, pa.string() if text else pa.int64())
    yield _rows(nothing, np.zeros(1, np.int64), np.zeros(1, bool), [json.dumps(asdict(counts))])


def _sizes(parts: pa.Array) -> dict[int, int]:
    return {row["values"]: row["counts"] for row in parts.value_counts().to_pylist()}


def _rows(ids: pa.Array, places: Any, again: Any, told: list[str | None]) -> pa.RecordBatch:
    context = TaskContext.get()
    assert context is not None
    ranges = np.full(len(ids), context.partitionId(), np.int32)
    columns = [ids, pa.array(ranges), pa.array(places), pa.array(again), pa.array(told, pa.string())]
    return pa.RecordBatch.from_arrays(columns, ["id", "range", "place", "again", "told"])
