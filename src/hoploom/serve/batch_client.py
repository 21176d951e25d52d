"""A trainer's side of whole batches: each is asked of any server, and arrives in recycled or pinned memory.

Weights of negatives, a number for each node, go with a batch once a server says that it needs them.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, PeerError
from hoploom.load.assemble import Batch
from hoploom.load.maker import LinkMaker, Maker, NodeMaker
from hoploom.load.pipeline import Producer
from hoploom.schema import Owner
from hoploom.serve import wire
from hoploom.serve.batch_codec import unpacked
from hoploom.serve.batch_request import BatchRequest, Description, Negatives, weight_hash
from hoploom.serve.wire import Message


class Asks(Protocol):
    """What is needed of the servers: any of them answers."""

    @property
    def num_servers(self) -> int: ...

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message: ...


class RemoteBatches:
    """Batches of any of the servers of a store."""

    def __init__(self, peers: Asks, identity: str, max_request: int = wire.MAX_REQUEST) -> None:
        self._peers, self._identity, self._max_request = peers, identity, max_request
        self._sending = threading.Lock()  # so that not every thread of a loader sends the same weights

    @property
    def num_servers(self) -> int:
        return self._peers.num_servers

    def make(self, request: BatchRequest, *, pinned: bool) -> Batch:
        """The batch that was asked for, wherever it is made."""
        answer = self._ask(request, [], pinned=pinned)
        if answer.header.get("error") == "need":
            with self._sending:
                answer = self._ask(request, [], pinned=pinned)  # another thread may have sent them by now
                if answer.header.get("error") == "need":
                    _check_size(request, self._max_request)
                    answer = self._ask(request, list(request.weights), pinned=pinned)
        if "error" in answer.header:
            raise PeerError(f"no batch came: {answer.header['error']!r:.80}; use the same Hoploom on both sides")
        return unpacked(answer, pinned=pinned)

    def _ask(self, request: BatchRequest, attached: list[str], *, pinned: bool) -> Message:
        header = {"ask": "batch", "identity": self._identity, **request.header(attached)}
        return self._peers.ask(Message(header, request.tensors(attached)), pinned=pinned)


def _check_size(request: BatchRequest, limit: int) -> None:
    """Refuse weights that no request can carry."""
    size = sum(tensor.nbytes for tensor in request.tensors(list(request.weights)))
    if size > limit:
        raise ConfigError(
            f"with the weights of negatives a request has {as_bytes(size)}, at most {as_bytes(limit)} go to "
            "a server; give them in a smaller dtype such as float16, or use connect(..., made='here')"
        )


@dataclass(frozen=True)
class ServedBatches(Producer):
    """A loader's batches, made by servers; with what stays here put in place."""

    servers: RemoteBatches
    description: Description
    columns: Mapping[str, Tensor]  # one entry per seed of the loader
    input_id: Tensor | None
    transform: Callable[[Batch], Any] | None
    weights: Mapping[str, Tensor]
    pinned: bool

    @property
    def least_threads(self) -> int:
        """Two requests for each server: one is made, one is on its way."""
        return 2 * self.servers.num_servers

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        """The batch of these seeds; `first` is the place of the first one in its step."""
        seeds = {name: column[indices] for name, column in self.columns.items()}
        request = BatchRequest(self.description, seeds, first, key, self.weights)
        batch = self.servers.make(request, pinned=self.pinned)
        storage = batch._store if isinstance(batch, Data) else batch[self.description.owner]
        storage._mapping["input_id"] = indices if self.input_id is None else self.input_id[indices]
        return batch if self.transform is None else self.transform(batch)


def served(maker: Maker, servers: RemoteBatches) -> ServedBatches:
    """The same batches as the maker's, of servers."""
    if maker.sampler.sample_frontier is not None:
        raise ConfigError(
            "sample_frontier is a function, which cannot go to the servers; use connect(..., made='here'), "
            "which makes batches in this process"
        )
    weights: dict[str, Tensor] = {}
    negatives = None
    owner: Owner
    if isinstance(maker, NodeMaker):
        owner, input_id = maker.seeds.node_type, maker.seeds.input_id
        columns = {"nodes": maker.seeds.nodes, "times": maker.seeds.times}
    else:
        assert isinstance(maker, LinkMaker)
        links = maker.links
        owner, input_id = links.key, links.input_id
        sources, destinations = links.ends
        columns = {"sources": sources, "destinations": destinations, "labels": links.labels, "times": links.times}
        negatives = _named(links.task.negatives, links.task.strict, weights)
    added = maker.assembler
    description = Description(owner, maker.sampler.sampling, added.reduce, added.degrees, negatives)
    given = {name: column for name, column in columns.items() if column is not None}
    return ServedBatches(servers, description, given, input_id, maker.transform, weights, added.pinned)


def _named(negatives: NegativeSampling | None, strict: bool, weights: dict[str, Tensor]) -> Negatives | None:
    """Negatives with their weights by name; the weights go into `weights`."""
    if negatives is None:
        return None
    names: list[str | None] = []
    for weight in (negatives.src_weight, negatives.dst_weight):
        names.append(None if weight is None else weight_hash(weight))
        if weight is not None:
            weights[names[-1] or ""] = weight
    return Negatives(negatives.mode.value, negatives.amount, strict, *names)
