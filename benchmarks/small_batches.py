"""How long does a small batch take, Data included? No workers: what is measured is overhead."""

import peer
import report
from epochs import Epoch, compare_epochs
from report import Report, Row, Target

SEEDS, FANOUTS = 16, [2, 2]


def measure(tiny: bool) -> Report:
    """The epochs of both loaders take turns."""
    timings = compare_epochs(Epoch(FANOUTS, SEEDS, 0, num_batches=1000, num_peer_batches=200), tiny)
    ours, theirs = timings.scaled(1e6)
    question = f"small batch: {SEEDS} seeds, {FANOUTS}"
    row = Row(question, "us/batch", ours, peer.NAME, theirs, timings.ratio, Target("ours", "<", 200))
    return Report([row], timings.notes, timings.absent)


if __name__ == "__main__":
    report.main(measure)
