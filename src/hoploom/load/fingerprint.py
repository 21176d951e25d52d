"""Describe what a loader reads, so that ranks see whether they divide the same seeds, or have some in common.

Seeds and edges are not compared byte for byte: some of them, spread over the list, are hashed with their sum.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from hoploom.load.maker import LinkMaker, LocalMaker, NodeMaker
from hoploom.load.order import DividedOrder, DrawnOrder, Order

NUM_HASHED = 4096  # entries of a long list
SPLITMIX = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)  # shifts and factors of splitmix64


@dataclass(frozen=True)
class Fingerprint:
    """The settings and seeds that decide the batches of a loader from an epoch on, besides its rank."""

    loader: str
    order: Order  # of what is left of the epoch
    maker: LocalMaker

    @property
    def trains(self) -> bool:
        return self.order.shuffle or isinstance(getattr(self.order, "own", self.order), DrawnOrder)

    @property
    def is_divided(self) -> bool:
        return isinstance(self.order, DividedOrder) and not isinstance(self.order.own, DrawnOrder)

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """All settings that ranks must share, by the names of the arguments."""
        order, sampling = self.order, self.maker.sampler.sampling
        assembler, hook = self.maker.assembler, self.maker.sampler.sample_frontier
        negatives = self.maker.links.task.negatives if isinstance(self.maker, LinkMaker) else None
        names = ("batch_size", "shuffle", "drop_last", "least_tail", "seed")
        return {
            "loader": self.loader,
            "store": self._store,
            "seeds": self._seeds,
            **{name: str(getattr(order, name)) for name in names},
            "sampler" if isinstance(order, DrawnOrder) else "layout": str(order.layout),
            **{entry.name: str(getattr(sampling, entry.name)) for entry in fields(sampling)},
            **({} if negatives is None else {"neg_sampling": f"{negatives.mode} {negatives.amount}"}),
            "aggregate": str(assembler.reduce),
            "degrees": str(assembler.degrees),
            "fields": "all" if assembler.fields is None else str(assembler.fields),
            "sample_frontier": "none" if hook is None else "given",
            "position": f"epoch {order.epoch}, step {order.first_step}",
        }

    def seed_hashes(self, limit: int) -> list[int]:
        """Return the least hashes of the seeds, as often as a seed comes; a single one for a sampler.

        Hashes of other graphs or node types differ.
        """
        if isinstance(self.order, DrawnOrder):
            drawn = f"{self._store} {self._seeds} {self.order.layout}"
            return [int(hashlib.sha256(drawn.encode()).hexdigest()[:12], 16)]
        kind, ids = self._ids
        start = int(hashlib.sha256(f"{self._store} {kind}".encode()).hexdigest()[:12], 16)
        hashes = torch.full_like(ids.reshape(-1, ids.shape[-1])[0], start)
        for row in ids.reshape(-1, ids.shape[-1]):
            hashes = hashes + row
            for shift, factor in SPLITMIX:
                hashes = (hashes ^ (hashes >> shift)) * factor
            hashes ^= hashes >> 31
        least = hashes.topk(min(limit, hashes.numel()), largest=False).values
        return [int(number) for number in least]

    @cached_property
    def _ids(self) -> tuple[str, Tensor]:
        """The type and ids of nodes [n], or the relation and both ends of links [2, n]."""
        if isinstance(self.maker, NodeMaker):
            return self.maker.seeds.node_type, self.maker.seeds.nodes
        assert isinstance(self.maker, LinkMaker)
        return " ".join(self.maker.links.task.key), self.maker.links.ends

    @property
    def _seeds(self) -> str:
        kind, ids = self._ids
        if isinstance(self.order, DividedOrder):
            return f"{self.order.num_seeds} of {kind!r}, divided into {self.order.counts}"
        return f"{ids.shape[-1]} of {kind!r} [{_digest(ids)}]"

    @cached_property
    def _store(self) -> str:
        store = self.maker.assembler.store
        nodes = sum(of.num_nodes for of in store.schema.node_types)
        edges = sum(of.num_edges for of in store.schema.relations)
        identity = store.identity or _digest(*(_spread(of.indices) for part in store.topology for of in part.lists))
        return f"{nodes} nodes, {edges} edges [{identity[:8]}]"


def _digest(*lists: Tensor) -> str:
    """Return a hash of integers, from their sum and from some of them."""
    digest = hashlib.sha256()
    for ids in lists:
        digest.update(repr((tuple(ids.shape), int(ids.sum()), _spread(ids).tolist())).encode())
    return digest.hexdigest()[:8]


def _spread(ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_HASHED)]
