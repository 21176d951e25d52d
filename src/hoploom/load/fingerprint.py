"""What a loader tells the other ranks of itself: enough to see whether they deal out the same seeds, or share some.

Not every byte: seeds and edges are hashed at places spread over them, seeds with their sum, so that it takes no time.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from hoploom.load.maker import LinkMaker, LocalMaker, NodeMaker
from hoploom.load.order import DividedOrder, DrawnOrder, Order
from hoploom.store import Store

PLACES = 4096  # at which a long list is looked at


@dataclass(frozen=True)
class Fingerprint:
    """What decides the batches of a loader from an epoch on, besides its rank."""

    loader: str
    order: Order  # of what is left of the epoch
    maker: LocalMaker

    @property
    def trains(self) -> bool:
        return self.order.shuffle or isinstance(getattr(self.order, "own", self.order), DrawnOrder)

    @property
    def is_divided(self) -> bool:
        return isinstance(self.order, DividedOrder) and not isinstance(self.order.own, DrawnOrder)

    def told(self) -> Mapping[str, str]:
        """By the names of the arguments."""
        order, sampling = self.order, self.maker.sampler.sampling
        layout = "sampler" if isinstance(order, DrawnOrder) else "layout"
        names = ("batch_size", "shuffle", "drop_last", "least_tail", "seed")
        told = {"loader": self.loader, "store": self._store, "seeds": self._seeds}
        told |= {name: str(getattr(order, name)) for name in names} | {layout: str(order.layout)}
        told |= {entry.name: str(getattr(sampling, entry.name)) for entry in fields(sampling)}
        if isinstance(self.maker, LinkMaker) and (negatives := self.maker.links.task.negatives) is not None:
            told["neg_sampling"] = f"{negatives.mode} {negatives.amount}"
        assembler, hook = self.maker.assembler, self.maker.sampler.sample_frontier
        told |= {"aggregate": str(assembler.reduce), "degrees": str(assembler.degrees)}
        told["fields"] = "all" if assembler.fields is None else str(assembler.fields)
        told["sample_frontier"] = "none" if hook is None else "given"
        return told | {"position": f"epoch {order.epoch}, step {order.first_step}"}

    def marks(self, limit: int) -> list[int]:
        """Return the least hashes of the seeds, of this graph and type; as often as a seed comes; one for a sampler."""
        if isinstance(self.order, DrawnOrder):
            drawn = f"{self._store} {self._seeds} {self.order.layout}"
            return [int(hashlib.sha256(drawn.encode()).hexdigest()[:12], 16)]
        ids = self._ids.reshape(-1, self._ids.shape[-1])
        place = int(hashlib.sha256(f"{self._store} {self._kind}".encode()).hexdigest()[:12], 16)
        hashes = torch.full_like(ids[0], place)
        for row in ids:
            hashes = _mixed(hashes + row)
        least = hashes.topk(min(limit, hashes.numel()), largest=False).values
        return [int(number) for number in least]

    @cached_property
    def _ids(self) -> Tensor:
        """Nodes [n], or both ends of links [2, n]."""
        if isinstance(self.maker, NodeMaker):
            return self.maker.seeds.nodes
        assert isinstance(self.maker, LinkMaker)
        return self.maker.links.ends

    @property
    def _kind(self) -> str:
        if isinstance(self.maker, NodeMaker):
            return self.maker.seeds.node_type
        assert isinstance(self.maker, LinkMaker)
        return " ".join(self.maker.links.task.key)

    @property
    def _seeds(self) -> str:
        if isinstance(self.order, DividedOrder):
            return f"{self.order.num_seeds} of {self._kind!r}, divided into {self.order.counts}"
        return f"{self._ids.shape[-1]} of {self._kind!r} [{_digest(self._ids)}]"

    @property
    def _store(self) -> str:
        return described(self.maker.assembler.store)


def described(store: Store) -> str:
    """A graph in a few words, and a hash that others have in common with it only if they are the same."""
    schema = store.schema
    nodes, edges = sum(t.num_nodes for t in schema.node_types), sum(r.num_edges for r in schema.relations)
    identity = store.identity or _digest(*(_spread(lists.indices) for part in store.topology for lists in part.lists))
    return f"{nodes} nodes, {edges} edges [{identity[:8]}]"


def _digest(*lists: Tensor) -> str:
    """Of integers, by their sum and at places spread over them."""
    digest = hashlib.sha256()
    for ids in lists:
        digest.update(repr((tuple(ids.shape), int(ids.sum()), _spread(ids).tolist())).encode())
    return digest.hexdigest()[:8]


def _spread(ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    return flat[:: max(1, flat.numel() // PLACES)]


def _mixed(values: Tensor) -> Tensor:
    """Each number without a pattern, as splitmix64 does it."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> 31)
