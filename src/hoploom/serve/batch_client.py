"""Whole batches, on the side of the trainer. Any server makes each one; it arrives in recycled or pinned memory.

Weights of negatives, a number for each node, are sent only if a server says that it needs them.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, PeerError
from hoploom.load.assemble import Batch
from hoploom.load.maker import LinkMaker, LocalMaker, Maker, NodeMaker
from hoploom.sample import LinkTask
from hoploom.schema import Owner
from hoploom.serve import wire
from hoploom.serve.batch_codec import unpacked
from hoploom.serve.batch_request import BatchRequest, Description, Negatives, weight_hash
from hoploom.serve.peers import Peers
from hoploom.serve.wire import Message


@dataclass(frozen=True)
class ServedBatches(Maker):
    """A loader's batches, made by any of the servers. `input_id` and the transform are added here."""

    peers: Peers
    sending: threading.Lock  # held while weights are sent, so that nobody else sends the same
    description: Description
    columns: Mapping[str, Tensor]  # one entry per seed of the loader
    weights: Mapping[str, Tensor]  # of negatives, by hash
    input_id: Tensor | None
    transform: Callable[[Batch], Any] | None
    pinned: bool
    max_request: int = wire.MAX_REQUEST

    @property
    def least_threads(self) -> int:
        """Two requests for each server: one is made, one is on its way."""
        return 2 * self.peers.num_servers

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        """The batch of these seeds; `first` is the place of the first one in its step."""
        seeds = {name: column[indices] for name, column in self.columns.items()}
        answer = self._answer(BatchRequest(self.description, seeds, first, key, self.weights))
        if "error" in answer.header:
            raise PeerError(f"no batch came: {answer.header['error']!r:.80}; use the same Hoploom on both sides")
        batch = unpacked(answer, pinned=self.pinned)
        storage = batch._store if isinstance(batch, Data) else batch[self.description.owner]
        storage._mapping["input_id"] = indices if self.input_id is None else self.input_id[indices]
        return batch if self.transform is None else self.transform(batch)

    def _answer(self, request: BatchRequest) -> Message:
        """A server's answer. If the server needs the weights, they are sent."""
        answer = self._ask(request, [])
        if answer.header.get("error") != "need":
            return answer
        with self.sending:
            answer = self._ask(request, [])  # another thread or loader may have sent them by now
            return self._ask(request, list(self.weights)) if answer.header.get("error") == "need" else answer

    def _ask(self, request: BatchRequest, attached: list[str]) -> Message:
        tensors = request.tensors(attached)
        size = sum(tensor.nbytes for tensor in tensors)
        if attached and size > self.max_request:
            raise ConfigError(
                f"with the weights of negatives a request has {as_bytes(size)}, at most {as_bytes(self.max_request)} "
                "go to a server; give them in a smaller dtype such as float16, or use connect(..., made='here')"
            )
        header = {"ask": "batch", "identity": self.peers.identity, **request.header(attached)}
        return self.peers.ask(Message(header, tensors), pinned=self.pinned)


def served(maker: LocalMaker, peers: Peers, sending: threading.Lock) -> ServedBatches:
    """The same batches as those of the maker, made by servers."""
    if maker.sampler.sample_frontier is not None:
        raise ConfigError(
            "sample_frontier is a function, which cannot go to the servers; use connect(..., made='here'), "
            "which makes batches in this process"
        )
    weights: dict[str, Tensor] = {}
    owner: Owner
    columns: dict[str, Tensor | None]
    if isinstance(maker, NodeMaker):
        owner, input_id, negatives = maker.seeds.node_type, maker.seeds.input_id, None
        columns = {"nodes": maker.seeds.nodes, "times": maker.seeds.times}
    else:
        assert isinstance(maker, LinkMaker)
        links = maker.links
        owner, input_id, negatives = links.task.key, links.input_id, _negatives(links.task, weights)
        sources, destinations = links.ends
        columns = {"sources": sources, "destinations": destinations, "labels": links.labels, "times": links.times}
    added = maker.assembler
    fields = None if added.fields is None else tuple((of, tuple(names)) for of, names in added.fields.items())
    description = Description(owner, maker.sampler.sampling, added.reduce, added.degrees, negatives, fields)
    given = {name: column for name, column in columns.items() if column is not None}
    return ServedBatches(peers, sending, description, given, weights, input_id, maker.transform, added.pinned)


def _negatives(task: LinkTask, weights: dict[str, Tensor]) -> Negatives | None:
    """A task's negatives, with the hashes of their weights; the weights go into `weights`."""
    if task.negatives is None:
        return None
    hashes: list[str | None] = []
    for weight in (task.negatives.src_weight, task.negatives.dst_weight):
        hashes.append(None if weight is None else weight_hash(weight))
        if weight is not None:
            weights[str(hashes[-1])] = weight
    return Negatives(task.negatives.mode.value, task.negatives.amount, task.strict, *hashes)
