"""Makers of batches: the pure function from seeds and a random key to a batch, which every placement calls."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hoploom.batch import Sampled, Seeds
from hoploom.load.arguments import NodeSeeds
from hoploom.load.assemble import Arriving, Assembler, Batch
from hoploom.load.order import Order
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.sample import (
    Links,
    LinkTask,
    SampleFrontier,
    Workspace,
    make_bidirectional,
    make_link_seeds,
    sample_hops,
)
from hoploom.sample.hops import Sampling
from hoploom.schema import NodeType, Owner, RelationName
from hoploom.store import GraphStore, Store, Wanted
from hoploom.store.base import scan_rows


@dataclass(frozen=True)
class Sampler:
    """Samples subgraphs or blocks of seeds, for one graph and one set of options."""

    graph: GraphStore
    sampling: Sampling
    sample_frontier: SampleFrontier | None = None
    idle: deque[Workspace] = field(default_factory=deque)  # as many as there were batches made at once

    def sample(self, seeds: Seeds, key: int) -> Sampled:
        try:
            workspace = self.idle.pop()
        except IndexError:
            workspace = Workspace(self.graph.schema)
        try:
            sampled = sample_hops(self.graph, workspace, seeds, self.sampling, key, self.sample_frontier)
        finally:
            self.idle.append(workspace)
        if self.sampling.subgraph == "bidirectional":
            return make_bidirectional(sampled, self.graph.schema)
        return sampled


class StageSeconds:
    """The seconds that stages of batches have taken, summed over all threads."""

    def __init__(self) -> None:
        self._lock, self._seconds = threading.Lock(), dict[str, float]()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure the time of one batch in a stage."""
        began = time.perf_counter()
        yield
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - began

    def so_far(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


class Maker(ABC):
    """The maker of a loader's batches, each by one call of `make`; a loop may overlap the stages of several."""

    @property
    def least_threads(self) -> int:
        """Threads that there must be, however few the user asks for."""
        return 0

    @abstractmethod
    def make(self, indices: Tensor, first: int, key: int) -> Batch | Arriving:
        """Return the batch of the seeds at these positions; `first` is the index of the first one in its step."""

    def stages(self, order: Order, pipeline: Pipeline) -> AbstractContextManager[Stages[Batch | Arriving]]:
        """Return the stages of a loop's steps, in a block that is left when the loop's threads have ended."""

        def finish(step: int, begun: None, fetched: None) -> Batch | Arriving:
            return self.make(*order.step(step))

        return nullcontext(Stages(finish, pipeline.num_ahead, pipeline.num_ahead))


@dataclass(frozen=True)
class LocalMaker(Maker):
    """Makes batches in this process: seeds are sampled, and then the rows of what was sampled are gathered."""

    sampler: Sampler
    assembler: Assembler
    transform: Callable[[Batch], Any] | None = field(default=None, kw_only=True)
    seconds: StageSeconds = field(default_factory=StageSeconds, kw_only=True, repr=False, compare=False)

    @property
    @abstractmethod
    def seed_nodes(self) -> tuple[str, Tensor]:
        """The type and ids of the seeds; of links, of their destinations."""

    @abstractmethod
    def start(self, indices: Tensor, first: int, key: int) -> Seeds:
        """Return the seeds at these positions, with the fields that they give to the batch."""

    def sample(self, indices: Tensor, first: int, key: int) -> Sampled:
        with self.seconds("sample"):
            seeds = self.start(indices, first, key)
            sampled = self.sampler.sample(seeds, key)
            if sampled.trees is not None and seeds.link_of is not None:
                sampled.trees = [seeds.link_of[trees] for trees in sampled.trees]
            sampled.fields = seeds.fields
            return sampled

    def finish(self, sampled: Sampled, assembler: Assembler) -> Batch:
        """Return the batch, with the rows of the assembler's store."""
        with self.seconds("gather"):
            batch = assembler.assemble(sampled)
        if self.transform is None:
            return batch
        with self.seconds("transform"):
            return self.transform(batch)

    def make(self, indices: Tensor, first: int, key: int) -> Batch:
        return self.finish(self.sample(indices, first, key), self.assembler)


@dataclass(frozen=True)
class NodeMaker(LocalMaker):
    """Makes batches of nodes."""

    seeds: NodeSeeds

    @property
    def seed_nodes(self) -> tuple[str, Tensor]:
        return self.seeds.node_type, self.seeds.nodes

    def start(self, indices: Tensor, first: int, key: int) -> Seeds:
        nodes = self.seeds.nodes[indices]
        times = self._times(indices, nodes)
        seeds = one_type_seeds(self.sampler, self.seeds.node_type, nodes, times, first)
        fields: dict[str, Any] = {
            "input_id": indices if self.seeds.input_id is None else self.seeds.input_id[indices],
            "seed_time": times if self.seeds.times is not None else None,
            "batch_size": indices.numel(),
        }
        return replace(seeds, fields={self.seeds.node_type: fields})

    def _times(self, indices: Tensor, nodes: Tensor) -> Tensor | None:
        if self.seeds.times is not None:
            return self.seeds.times[indices]
        schema = self.assembler.store.schema
        if self.sampler.sampling.temporal is None or schema.time is None:
            return None
        own = self.assembler.store.features.gather([Wanted(self.seeds.node_type, schema.time, nodes)])[0]
        return own.long()


def one_type_seeds(sampler: Sampler, node_type: str, nodes: Tensor, times: Tensor | None, first: int) -> Seeds:
    """Return seeds of a single type; each has its own tree if sampling is disjoint."""
    schema = sampler.graph.schema
    index, count = schema.type_index[node_type], len(schema.node_types)
    by_type: list[Tensor | None] = [None] * count
    trees: list[Tensor | None] = [None] * count
    by_type[index] = nodes
    if sampler.sampling.disjoint:
        trees[index] = torch.arange(first, first + nodes.numel())
    return Seeds(tuple(by_type), tuple(trees), times, first)


class NodeTimes:
    """The times of nodes, for temporal negatives. Those of a type are read when first needed, then kept."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._times: dict[int, Tensor] = {}

    def __call__(self, relation: RelationName) -> dict[int, Tensor]:
        """Return the times of both ends of a relation, by type index: a negative must exist at its link's time."""
        schema = self._store.schema
        if schema.time is None or schema.edge_time:
            return {}
        ends = {schema.type_index[relation[0]], schema.type_index[relation[2]]}
        dated = [index for index in ends if schema.time in schema.node_types[index].fields]
        with self._lock:
            for index in dated:
                if index not in self._times:
                    self._times[index] = self._read(schema.node_types[index], schema.time)
            return {index: self._times[index] for index in dated}

    def _read(self, node_type: NodeType, field: str) -> Tensor:
        times, begin = torch.empty(node_type.num_nodes, dtype=torch.int64), 0
        for rows in scan_rows(self._store.features, node_type.name, field, node_type.num_nodes):
            times[begin : begin + len(rows)] = rows
            begin += len(rows)
        return times


@dataclass(frozen=True)
class LinkInput:
    """The seeds of a loader of links."""

    task: LinkTask
    ends: Tensor  # [2, n] int64
    labels: Tensor | None = None
    times: Tensor | None = None
    input_id: Tensor | None = None


@dataclass(frozen=True)
class LinkMaker(LocalMaker):
    """Makes batches of links."""

    links: LinkInput

    @property
    def seed_nodes(self) -> tuple[str, Tensor]:
        return self.links.task.key[2], self.links.ends[1]

    def start(self, indices: Tensor, first: int, key: int) -> Seeds:
        given = self.links
        labels = None if given.labels is None else given.labels[indices]
        times = None if given.times is None else given.times[indices]
        links = Links(given.ends[0][indices], given.ends[1][indices], labels, times, first)
        made = make_link_seeds(self.sampler.graph, links, given.task, key, disjoint=self.sampler.sampling.disjoint)
        input_id = indices if given.input_id is None else given.input_id[indices]
        return replace(made.seeds, link_of=made.link_of, fields=self._placed(made.fields, input_id))

    def _placed(self, fields: Mapping[str, Tensor | None], input_id: Tensor) -> dict[Owner, dict[str, Any]]:
        """Return the fields of links by the node type or relation to which PyG adds them."""
        key = self.links.task.key
        if "src_index" not in fields:
            return {key: {"input_id": input_id, **fields}}
        placed: dict[Owner, dict[str, Any]] = {
            key: {"input_id": input_id, "edge_label_index": None, "edge_label_time": None},
            key[0]: {"src_index": fields["src_index"], "seed_time": fields["seed_time"]},
        }
        destinations = placed.setdefault(key[2], {})
        destinations.update({name: fields[name] for name in ("dst_pos_index", "dst_neg_index", "seed_time")})
        return placed
