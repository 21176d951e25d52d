"""The nodes and edges of a synthetic graph, each drawn by its id, so that any chunk can be drawn alone.

Only counter-based words, integers, and float operations that IEEE 754 rounds exactly (+ - * / sqrt): the same bits
on every machine. The price of drawing each edge by itself: a pair may be linked twice, and a node to itself.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hoploom import keys, ops
from hoploom.schema import RelationName
from hoploom.store.format import id_dtype

Integers = NDArray[np.int64]
Words = NDArray[np.uint32]

SPLITS = {"train": (0.0, 0.6), "val": (0.6, 0.8), "test": (0.8, 1.0)}  # name -> its part of [0, 1)
LABEL_NOISE = 0.05  # share of the labels that are drawn afresh
SIGNAL = 1.0  # how far a community's features lie from the origin, in standard deviations of the noise
MAX_DEGREE = 1 << 17  # so that the edges of one node are no more than a chunk
MAX_NODES = 1 << 31  # of one type, so that SCATTER times a rank takes 64 bits
MAX_TIME = 1_000_000
SCATTER = 2654435761  # a prime above MAX_NODES: multiplying by it permutes a community of any size
NODE, DEGREE, EDGE, FEATURE, CENTRE = range(5)  # what a draw is for


@dataclass(frozen=True)
class NodeDraws:
    """How the nodes of one type are drawn. Node v belongs to community v % num_classes."""

    name: str
    key: int
    type_index: int
    num_nodes: int
    num_classes: int
    num_features: int

    def labels(self, ids: range) -> Integers:
        """[n]: the community, but for a few."""
        words = self._words(ids)
        drawn = (words[:, 1].astype(np.int64) * self.num_classes) >> 32
        return np.where(_below(words[:, 0], LABEL_NOISE), drawn, self._communities(ids))

    def members(self, split: str, ids: range) -> Integers:
        """Those of the ids that are in the split."""
        begin, end = SPLITS[split]
        word = self._words(ids)[:, 2]
        return np.flatnonzero(_below(word, end) & ~_below(word, begin)) + ids.start

    def features(self, ids: range, centres: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, num_features]: the community's centre, plus noise of variance 1 in every feature."""
        blocks = -(-self.num_features // 4)
        words = _words(self.key, FEATURE, self.type_index, range(ids.start * blocks, ids.stop * blocks))
        words = words.reshape(len(ids), 4 * blocks)[:, : self.num_features]
        noise = ((words >> 16) + (words & 0xFFFF)).astype(np.float32)  # two uniform draws make a hill
        noise -= np.float32(65535)
        noise *= np.float32(math.sqrt(6) / 65536)
        noise += centres[self._communities(ids)]
        return noise

    def centres(self) -> NDArray[np.float32]:
        """[num_classes, num_features]: the corner of a cube for each community."""
        ids = range(self.num_classes * self.num_features)
        word = _words(self.key, CENTRE, self.type_index, ids)[:, 0]
        side = np.float32(SIGNAL / math.sqrt(self.num_features))
        return np.where(word & 1, side, -side).reshape(self.num_classes, self.num_features)

    def _communities(self, ids: range) -> Integers:
        return np.arange(ids.start, ids.stop) % self.num_classes

    def _words(self, ids: range) -> Words:
        """[n, 4]: whether the label is noise, and which; the split; unused."""
        return _words(self.key, NODE, self.type_index, ids)


@dataclass(frozen=True)
class EdgeRun:
    """The edges into consecutive nodes."""

    nodes: range
    degrees: Integers  # [n]
    edges: range  # their ids in the relation

    def spread(self, values: Integers) -> Integers:
        """One value per node -> one per edge."""
        return np.repeat(values, self.degrees)


@dataclass(frozen=True)
class RelationDraws:
    """How the edges of one relation are drawn, list by list."""

    name: RelationName
    key: int
    relation_index: int
    num_sources: int
    num_destinations: int
    num_classes: int
    avg_degree: float
    homophily: float

    def degrees(self, nodes: range) -> Integers:
        """[n]: the share of nodes with more than d edges falls as 1 / d^2."""
        word = _words(self.key, DEGREE, self.relation_index, nodes)[:, 0]
        cap = min(MAX_DEGREE, max(math.ceil(2 * self.avg_degree), self.num_sources // 4))
        drawn = np.floor(_scale(self.avg_degree, cap) / np.sqrt((word + 1.0) / 2**32) + 0.5)
        return np.clip(drawn, 1, cap).astype(np.int64)

    def runs(self, nodes: range, first_edge: int, chunk: int) -> Iterator[EdgeRun]:
        """The lists of these nodes, about `chunk` edges at a time."""
        for piece in pieces(nodes, chunk / self.avg_degree):
            degrees = self.degrees(piece)
            run = EdgeRun(piece, degrees, range(first_edge, first_edge + int(degrees.sum())))
            yield run
            first_edge = run.edges.stop

    def sources(self, run: EdgeRun) -> NDArray[np.signedinteger[Any]]:
        """[num_edges] ids: mostly from the destination's community, else from any; in each a few are popular."""
        words = self._words(run)
        own = run.spread(np.arange(run.nodes.start, run.nodes.stop) % self.num_classes)
        outside = int(self.homophily * 2**32)  # where words that leave the community begin
        draw = words[:, 1].astype(np.int64) - outside
        community = np.where(draw < 0, own, draw * self.num_classes // max(1, 2**32 - outside))
        sizes, offsets = self._communities()
        word, size = words[:, 0].astype(np.uint64), sizes[community]
        rank = (((word * word) >> 32) * size) >> 32  # the square favours low ranks
        member = (rank * SCATTER + offsets[community]) % size
        return (member.astype(np.int64) * self.num_classes + community).astype(id_dtype(self.num_sources))

    def _communities(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Of the source type: the size of each community, and which member has rank 0."""
        sizes = [(self.num_sources - 1 - c) // self.num_classes + 1 for c in range(self.num_classes)]
        offsets = [keys.mix(self.key, c) % size for c, size in enumerate(sizes)]
        return np.array(sizes, dtype=np.uint64), np.array(offsets, dtype=np.uint64)

    def weights(self, run: EdgeRun) -> NDArray[np.float32]:
        """[num_edges] in (0, 1]."""
        return ((self._words(run)[:, 2] + 1.0) / 2**32).astype(np.float32)

    def times(self, run: EdgeRun) -> Integers:
        """[num_edges] in [0, MAX_TIME), ascending in every list: one in each of its equal intervals."""
        first = np.cumsum(run.degrees) - run.degrees
        place = np.arange(len(run.edges)) - run.spread(first)
        share = (place + self._words(run)[:, 3] / 2**32) / run.spread(run.degrees)
        return (share * MAX_TIME).astype(np.int64)

    def _words(self, run: EdgeRun) -> Words:
        """[num_edges, 4]: the source's rank, whether it is of the community, the weight, the time."""
        return _words(self.key, EDGE, self.relation_index, run.edges)


def _words(key: int, purpose: int, index: int, ids: range) -> Words:
    """[n, 4] random words for these ids of a node type or relation."""
    counters = torch.from_numpy(np.arange(ids.start, ids.stop))  # torch's arange would wake a pool of threads
    return ops.draw_words(key, counters, purpose << 16 | index).numpy()


def _below(word: Words, chance: float) -> NDArray[np.bool_]:
    return word < np.uint64(chance * 2**32)


def _scale(avg_degree: float, cap: int) -> float:
    """The least degree before rounding that gives this mean; low means suffer from rounding, high ones from the cap."""
    if avg_degree < 3:
        return math.sqrt((avg_degree - 1) / (math.pi * math.pi / 2 - 4))
    return avg_degree / (1 + math.sqrt(1 - avg_degree / cap))


def pieces(ids: range, size: float) -> Iterator[range]:
    """Consecutive ranges of about `size` ids."""
    step = max(1, int(size))
    return (ids[begin : begin + step] for begin in range(0, len(ids), step))
