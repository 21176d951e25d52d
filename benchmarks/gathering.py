"""How fast are rows gathered by a batch's own node ids, against copying as many bytes that lie together?

Both write into the pool's recycled buffers and read the same mapped file; each copy reads another stretch of it.
The baseline is ctypes.memmove or numpy.copyto, whichever is faster here.
"""

import ctypes
import time
from collections.abc import Callable

import graph
import numpy as np
import report
import torch
from measure import take_turns
from report import Report, Row, Target
from torch import Tensor

from hoploom import ops

BATCHES = 4  # per repetition
COPIES = ("ctypes.memmove", "numpy.copyto")
Fill = Callable[[Tensor, int], None]  # (what to fill: [rows, row bytes] uint8, number of the batch)


def measure(tiny: bool) -> Report:
    """The gather and both copies take turns."""
    torch.set_num_threads(1)
    store = graph.open_warm(graph.MAIN, tiny)
    sample = graph.make_sampler(store)
    n_ids = [sample(step).nodes[0].clone() for step in range(BATCHES)]
    table = store.parts[0].tables[store.schema.node_types[0].name, "x"].raw

    def side(fill: Fill) -> Callable[[int], float]:
        def run(_: int) -> float:
            begin = time.perf_counter()
            for number, n_id in enumerate(n_ids):
                fill(ops.empty((n_id.numel(), table.shape[1]), torch.uint8), number)
            seconds = time.perf_counter() - begin
            return sum(n_id.numel() for n_id in n_ids) * table.shape[1] / seconds / 1e9

        return run

    def gather(out: Tensor, number: int) -> None:
        ops.gather(table, n_ids[number], out)

    def stretch(out: Tensor, number: int) -> Tensor:
        begin = (table.shape[0] - out.shape[0]) * number // BATCHES
        return table[begin : begin + out.shape[0]]

    def memmove(out: Tensor, number: int) -> None:
        ctypes.memmove(out.data_ptr(), stretch(out, number).data_ptr(), out.numel())

    def copyto(out: Tensor, number: int) -> None:
        np.copyto(out.numpy(), stretch(out, number).numpy())

    fills = ("ours", gather), (COPIES[0], memmove), (COPIES[1], copyto)
    spreads = take_turns({name: side(fill) for name, fill in fills})
    fastest = max(COPIES, key=lambda name: spreads[name].median)
    ratio = spreads["ours"].median / spreads[fastest].median
    target = Target("ratio", ">=", 0.75)
    row = Row("gathering 400-byte rows", "GB/s", spreads["ours"], fastest, spreads[fastest], ratio, target)
    others = [f"{name}: {report.shown(spreads[name])} GB/s" for name in COPIES if name != fastest]
    return Report([row], [f"gathered at a time: {n_ids[0].numel():,} rows of {table.shape[1]} bytes", *others])


if __name__ == "__main__":
    report.main(measure)
