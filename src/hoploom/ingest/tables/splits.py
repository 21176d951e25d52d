"""The members of splits: by a column that names them, or by shares drawn by the ids, never by the order of rows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hoploom import keys
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.ids import Numbering
from hoploom.ingest.tables.texts import padded

if TYPE_CHECKING:
    import ibis.expr.types as ir
    import pyarrow as pa

Splits = Mapping[str, Callable[[], Iterator[Tensor]]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
CHUNK = 1 << 17
MOST_SPLITS = 100  # each is read by itself


def by_column(engine: Engine, nodes: "ir.Table") -> Splits | None:
    """Splits named by a column: rows of node and split. No name: in no split. None: more than MOST_SPLITS."""
    named = nodes.filter(nodes["split"].notnull() & (nodes["split"] != ""))
    words = sorted(row["split"] for row in rows_of(engine, named.select("split").distinct().limit(MOST_SPLITS + 1)))
    if len(words) > MOST_SPLITS:
        return None

    def members(word: str) -> Iterator[Tensor]:
        for batch in engine.stream(named.filter(named["split"] == word).select("node")):
            yield int64_of(batch.column("node"))

    return {word: partial(members, word) for word in words}


@dataclass(frozen=True)
class Shares:
    """Splits drawn by shares: a node's is decided by its id and the seed alone."""

    shares: Mapping[str, float]
    seed: int

    def of(self, engine: Engine, numbering: Numbering) -> Splits:
        """The members of each split of a node type."""
        ends = [0.0, *accumulate(self.shares.values())]
        ends[-1] = 1.0 if abs(ends[-1] - 1) < 1e-9 else ends[-1]

        def members(begin: float, end: float) -> Iterator[Tensor]:
            for nodes, hashes in self._hashed(engine, numbering):
                drawn = (hashes >> np.uint64(11)).astype(np.float64) / 2**53
                yield nodes[torch.from_numpy((drawn >= begin) & (drawn < end))]

        return {name: partial(members, ends[i], ends[i + 1]) for i, name in enumerate(self.shares)}

    def _hashed(self, engine: Engine, numbering: Numbering) -> Iterator[tuple[Tensor, Words]]:
        """Store ids, and the hash of their original ids."""
        key = np.uint64(keys.mix(0, self.seed))
        if numbering.pairs is None:
            for begin in range(0, numbering.num_nodes, CHUNK):
                nodes = torch.arange(begin, min(begin + CHUNK, numbering.num_nodes))
                yield nodes, _mixed(key, (nodes + numbering.first).numpy().view(np.uint64))
            return
        for batch in engine.stream(numbering.pairs.select("node", "id"), 16 + numbering.width):
            ids = batch.column("id")
            words = [int64_of(ids).numpy().view(np.uint64)] if not numbering.width else _words(ids, numbering.width)
            hashes = np.full(len(ids), key)
            for word in words:
                hashes = np.where(word == 0, hashes, _mixed(hashes, word)) if numbering.width else _mixed(hashes, word)
            yield int64_of(batch.column("node")), hashes


def _words(ids: "pa.Array", width: int) -> Iterator[Words]:
    """Texts, eight bytes at a time; zeros behind their end."""
    rows = padded(ids, -(-width // 8) * 8)
    yield from rows.view("<u8").astype(np.uint64, copy=False).T


def _mixed(state: Any, value: Words) -> Words:
    """keys.mix of many values."""
    with np.errstate(over="ignore"):
        z = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def int64_of(column: "pa.Array") -> Tensor:
    """A column of integers without nulls [n] int64, to be kept."""
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).astype(np.int64))
