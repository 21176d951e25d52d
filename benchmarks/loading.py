"""How long does the whole loader take for a batch (sample, gather, Data) with 2 workers, against PyG's?

Ours are threads, PyG's are processes that it forks once and keeps.
"""

import graph
import peer
import report
from epochs import Epoch, compare_epochs
from report import Report, Row, Target

WORKERS = 2


def measure(tiny: bool) -> Report:
    """The epochs of both loaders take turns."""
    size = graph.NUM_SEEDS // 100 if tiny else graph.NUM_SEEDS
    timings = compare_epochs(Epoch(graph.FANOUTS, size, WORKERS, num_batches=32, num_peer_batches=8), tiny)
    ours, theirs = timings.scaled(1e3)
    question = f"whole loader, {WORKERS} workers"
    row = Row(question, "ms/batch", ours, peer.NAME, theirs, timings.ratio, Target("ratio", ">=", 15))
    return Report([row], timings.notes, timings.absent)


if __name__ == "__main__":
    report.main(measure)
