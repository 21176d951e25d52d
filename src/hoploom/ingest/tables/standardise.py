"""Columns less their mean, over their standard deviation: the step that needs all rows before it does the first.

Sums run over rows in the order of their ids, in chunks that are always cut alike: the same to the last bit however the
rows came. Costs one more pass over the fields of the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hoploom.ingest.stream import Finish
from hoploom.ingest.tables.transforms import Values
from hoploom.schema import DTYPES, Field

Chunk = Mapping[str, Tensor]


def standardise(columns: Mapping[str, Sequence[int]], stored: Mapping[str, Field]) -> Finish:
    """Less the mean, over the standard deviation: some columns of fields that stand in order.

    Sums run over the chunks in order, in float64. What is "not a number" is left out of them; a column of one value
    becomes zeros.
    """

    def prepare(chunks: Iterator[Chunk]) -> Callable[[Chunk], Chunk]:
        moments = {name: Moments(len(some)) for name, some in columns.items()}
        for chunk in chunks:
            for name, some in columns.items():
                moments[name].add(_columns(chunk[name], some).numpy())

        def finish(chunk: Chunk) -> Chunk:
            done = dict(chunk)
            for name, some in columns.items():
                rows = chunk[name].clone()
                values = (_columns(rows, some).numpy() - moments[name].centre) / moments[name].deviation
                rows.view(rows.shape[0], -1)[:, list(some)] = torch.from_numpy(values)
                done[name] = rows.to(DTYPES[stored[name].dtype])
            return done

        return finish

    return Finish(stored, prepare)


def _columns(rows: Tensor, some: Sequence[int]) -> Tensor:
    return rows.view(rows.shape[0], -1)[:, list(some)]


class Moments:
    """Mean and deviation of columns, chunk by chunk (Chan's update)."""

    def __init__(self, width: int) -> None:
        self._count, self._mean, self._squares = np.zeros(width), np.zeros(width), np.zeros(width)
        self._least, self._most = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, values: Values) -> None:
        """Values [n, width] float64."""
        given = ~np.isnan(values)
        count = given.sum(axis=0)
        mean = np.where(given, values, 0).sum(axis=0) / np.maximum(count, 1)
        squares = np.where(given, np.square(values - mean), 0).sum(axis=0)
        delta, total = mean - self._mean, np.maximum(self._count + count, 1)
        self._squares += squares + np.square(delta) * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = self._count + count
        self._least = np.fmin(self._least, np.fmin.reduce(values, axis=0, initial=np.inf))
        self._most = np.fmax(self._most, np.fmax.reduce(values, axis=0, initial=-np.inf))

    @property
    def alike(self) -> Values:
        """Which columns hold one value only."""
        same: Values = self._least >= self._most
        return same

    @property
    def centre(self) -> Values:
        """The mean; of a column of one value that value, to the last bit."""
        return np.where(self.alike, self._least, self._mean)

    @property
    def deviation(self) -> Values:
        """1 for a column of one value, or of values whose squares are 0."""
        found = np.sqrt(self._squares / np.maximum(self._count, 1))
        return np.where(self.alike | (found == 0), 1.0, found)
