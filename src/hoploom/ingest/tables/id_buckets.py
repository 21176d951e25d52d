"""Ids numbered in one process: counted by bucket, then numbered inside each; never a sort of all ids at once."""

from collections.abc import Iterator
from typing import Any

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.id_counts import IdCounts

BUCKETS = 256  # of integers; texts have 16 ** 3


def by_buckets(engine: Engine, ids: ir.Table, name: str) -> tuple[ir.Table, IdCounts]:
    """The map [id, node, again] of ids [id, part], and [bucket] of texts; and the counts of the ids.

    `again` is true where the same id has come before. Where ids are null, it is only counted how many.
    """
    if "bucket" not in ids.columns:
        ids = ids.mutate(bucket=_equal_spans(engine, ids))
    sizes = engine.keep(ids.group_by("part", "bucket").aggregate(rows=ids.count()), f"{name}.buckets")
    nulls, counts = sizes["rows"].sum(where=sizes["bucket"].isnull()).fill_null(0), IdCounts()
    for row in rows_of(engine, sizes.group_by("part").aggregate(rows=sizes["rows"].sum(), nulls=nulls)):
        counts.add(IdCounts({row["part"]: int(row["rows"])}, int(row["nulls"])))
    pairs = engine.keep(_in_buckets(ids, sizes), f"{name}.ids")
    (repeated,) = rows_of(engine, pairs.aggregate(rows=pairs["again"].cast("int64").sum()))
    counts.repeated = repeated["rows"] or 0
    if pairs["id"].type().is_string():
        for measured in engine.fold(pairs.select("id"), _measured, 64):
            counts.add(IdCounts(**measured))
    return pairs, counts


def _equal_spans(engine: Engine, ids: ir.Table) -> Any:
    """Buckets of integers. They may be rounded: they ascend with the ids, which is all that counts."""
    (found,) = rows_of(engine, ids.aggregate(low=ids["id"].min(), high=ids["id"].max()))
    low, high = found["low"] or 0, found["high"] or 0  # None: all are null
    width = ibis.literal((high - low) // BUCKETS + 1, "float64")
    return ((ids["id"].cast("float64") - ibis.literal(float(low), "float64")) / width).floor().cast("int64")


def _in_buckets(ids: ir.Table, sizes: ir.Table) -> ir.Table:
    before = ibis.window(order_by=[sizes["part"], sizes["bucket"]], preceding=(None, 1))
    begins = sizes.select(
        in_part=sizes["part"],
        in_bucket=sizes["bucket"],
        begin=sizes["rows"].sum().over(before).fill_null(0).cast("int64"),
    )
    placed = ids.inner_join(begins, [ids["part"] == begins["in_part"], ids["bucket"] == begins["in_bucket"]])
    placed = placed.select("id", "part", "bucket", "begin")
    window = ibis.window(group_by=[placed["part"], placed["bucket"]], order_by=placed["id"])
    return placed.select(
        id=placed["id"],
        node=ibis.row_number().over(window) + placed["begin"],
        again=(placed["id"].lag().over(window) == placed["id"]).fill_null(False),
    )


def _measured(batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    counts = IdCounts()
    for batch in batches:
        counts.add_texts(batch.column(0))
    return {"width": counts.width, "zero": counts.zero}
