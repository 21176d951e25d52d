"""Repetitions that take turns, so that what else the machine does meets both sides alike."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

REPETITIONS = 7
WARMUPS = 2

Side = Callable[[int], float]  # (number of the repetition) -> its figure: seconds, or a rate


@dataclass(frozen=True)
class Spread:
    """What repeated measuring found."""

    median: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> "Spread":
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)


def spread_of(values: Iterable[float]) -> Spread:
    """Median, least and greatest.

    >>> spread_of([3.0, 1.0, 2.0])
    """
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found), len(found))


def take_turns(
    sides: Mapping[str, Side], *, repetitions: int = REPETITIONS, warmups: int = WARMUPS
) -> dict[str, Spread]:
    """Measure A B A B ...; the warm-up rounds do not count."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmups + repetitions):
        for name, side in sides.items():
            value = side(number)
            if number >= warmups:
                values[name].append(value)
    return {name: spread_of(found) for name, found in values.items()}
