"""How fast is sampling with relabelling on one thread, against random reads of the same memory and against a peer?

Ours is the library's own Python path: seeds in, int64 edge_index, n_id and e_id out.
"""

import graph
import peer
import report
import torch
from measure import Spread, take_turns
from random_reads import make_reader
from report import Report, Row, Target

BATCHES = 6  # per repetition
READS = 30_000_000  # per repetition
UNIT = "M picks/s"


def measure(tiny: bool) -> Report:
    """Random reads, the peer and ours take turns."""
    torch.set_num_threads(1)
    store = graph.open_warm(graph.MAIN, tiny)
    sample = graph.make_sampler(store)
    reader = make_reader(store.parts[0].lists[0].indices, READS // 100 if tiny else READS)

    def ours(number: int) -> float:
        seconds, num_picks = graph.timed(sample, range(number * BATCHES, (number + 1) * BATCHES))
        return num_picks / seconds / 1e6

    sides = {"ours": ours, "reads": reader}
    with peer.pyg() as found:
        if found is not None:
            found.read(graph.path_of(graph.MAIN, tiny), store)

            def theirs(number: int) -> float:
                seeds = graph.seeds_at(store, number * graph.NUM_SEEDS, graph.NUM_SEEDS)
                answer = found.ask("sample", seeds=seeds.tolist(), fanouts=graph.FANOUTS)
                return float(answer["picks"]) / float(answer["seconds"]) / 1e6

            sides["peer"] = theirs
        spreads = take_turns(sides)
        batch = sample(0)
        num_picks, num_nodes = batch.edge_index[0].shape[1], batch.nodes[0].numel()
        notes = [f"one batch of {graph.NUM_SEEDS} seeds: {num_picks:,} picks, {num_nodes:,} nodes"]
        return Report(_rows(spreads), notes + ([found.versions] if found else []), peer.absent(found))


def _rows(spreads: dict[str, Spread]) -> list[Row]:
    ours, reads, theirs = spreads["ours"], spreads["reads"], spreads.get("peer")
    return [
        Row(
            "sampling, 1 thread",
            UNIT,
            ours,
            "random 4-byte reads (M/s)",
            reads,
            ours.median / reads.median,
            Target("ratio", ">=", 0.25),
        ),
        Row(
            "sampling, 1 thread",
            UNIT,
            ours,
            peer.NAME,
            theirs,
            None if theirs is None else ours.median / theirs.median,
            Target("ratio", ">=", 40),
        ),
    ]


if __name__ == "__main__":
    report.main(measure)
