"""Makers of batches: a batch is a pure function of its seeds and a random key, wherever it is made."""

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hoploom.batch import Sampled, Seeds
from hoploom.load.assemble import Arriving, Assembler, Batch, spread_shared
from hoploom.load.order import DividedOrder, DrawnOrder, Order, StepShare
from hoploom.load.pipeline import Pipeline, Stages
from hoploom.sample import Links, LinkTask, SampleFrontier, Workspace, make_bidirectional, make_link_seeds, sample_hops
from hoploom.sample.exclusions import Exclusion, WithoutEdges
from hoploom.sample.hops import Sampling
from hoploom.schema import RelationName, TypeKey
from hoploom.store import GraphStore, Store, Wanted
from hoploom.store.base import NO_IDS, scan_rows


@dataclass(frozen=True)
class Sampler:
    """Samples the subgraph or the blocks of a batch of seeds, in one graph, with one set of options."""

    graph: GraphStore
    sampling: Sampling
    sample_frontier: SampleFrontier | None = None
    idle: deque[Workspace] = field(default_factory=deque)  # as many as batches were made at the same time

    def sample(self, seeds: Seeds, key: int) -> Sampled:
        try:
            workspace = self.idle.pop()
        except IndexError:
            workspace = Workspace(self.graph.schema)
        graph = WithoutEdges(self.graph, seeds.excluded) if seeds.excluded else self.graph
        try:
            sampled = sample_hops(graph, workspace, seeds, self.sampling, key, self.sample_frontier)
        finally:
            self.idle.append(workspace)
        if self.sampling.subgraph == "bidirectional":
            return make_bidirectional(sampled, self.graph.schema)
        return sampled


class StageSeconds:
    """The seconds spent on each stage of making batches, summed over all threads."""

    def __init__(self) -> None:
        self._lock, self.so_far = threading.Lock(), dict[str, float]()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of a `with` block to the seconds of `stage`."""
        began = time.perf_counter()
        yield
        with self._lock:
            self.so_far[stage] = self.so_far.get(stage, 0.0) + time.perf_counter() - began


class Maker(ABC):
    """Base of makers of batches. `make` makes one batch; `stages` splits the work, so that several batches overlap."""

    @property
    def least_threads(self) -> int:
        """The least number of worker threads, even if the user gives fewer."""
        return 0

    @abstractmethod
    def make(self, share: StepShare) -> Batch | Arriving:
        """Return the batch of these seeds."""

    def stages(self, order: Order, pipeline: Pipeline) -> AbstractContextManager[Stages[Batch | Arriving]]:
        """Return a context manager that yields the Stages of a loop. Its block outlives the loop's threads."""

        def finish(step: int, begun: None, fetched: None) -> Batch | Arriving:
            return self.make(order.step(step))

        return nullcontext(Stages(finish, pipeline.num_ahead, pipeline.num_ahead))


@dataclass(frozen=True)
class LocalMaker(Maker):
    """Makes batches in this process: samples neighbourhoods of the seeds, then gathers the rows of sampled ids."""

    sampler: Sampler
    assembler: Assembler
    transform: Callable[[Batch], Any] | None = field(default=None, kw_only=True)
    seconds: StageSeconds = field(default_factory=StageSeconds, kw_only=True, repr=False, compare=False)

    @property
    @abstractmethod
    def seed_nodes(self) -> tuple[str, Tensor]:
        """The node type and the ids of the seeds. Of links, these are the destination nodes."""

    @abstractmethod
    def seeds(self, share: StepShare) -> Seeds:
        """Return the nodes to start from, with the batch fields that describe them."""

    def start(self, share: StepShare) -> Seeds:
        """Return the nodes to start from; their times are the latest at which an edge may be sampled."""
        seeds = self.seeds(share)
        if self.sampler.sampling.strictly_before and seeds.times is not None:
            return replace(seeds, times=seeds.times - 1)
        return seeds

    def excludes(self, share: StepShare) -> tuple[Tensor | None, ...]:
        """Return the edges that a step excludes, over all ranks: per relation, ascending positions [n] or None."""
        return ()

    def sample(self, share: StepShare) -> Sampled:
        with self.seconds("sample"):
            seeds = self.start(share)
            sampled = self.sampler.sample(seeds, share.key)
            if sampled.trees is not None and seeds.link_of is not None:
                sampled.trees = [seeds.link_of[trees] for trees in sampled.trees]
            sampled.fields = seeds.fields
            return sampled

    def finish(self, sampled: Sampled, assembler: Assembler) -> Batch:
        """Assemble a sampled batch, and apply the transform."""
        with self.seconds("gather"):
            batch = assembler.assemble(sampled)
        if self.transform is None:
            return batch
        spread_shared(batch)
        with self.seconds("transform"):
            return self.transform(batch)

    def make(self, share: StepShare) -> Batch:
        return self.finish(self.sample(share), self.assembler)


@dataclass(frozen=True)
class NodeMaker(LocalMaker):
    """Makes batches whose seeds are nodes."""

    node_type: str
    nodes: Tensor  # [n] int64
    input_id: Tensor | None = None  # [n]; None: the positions among the seeds
    times: Tensor | None = None  # [n] int64

    @property
    def seed_nodes(self) -> tuple[str, Tensor]:
        return self.node_type, self.nodes

    def seeds(self, share: StepShare) -> Seeds:
        indices = share.indices
        nodes, times, schema = self.nodes[indices], None, self.assembler.store.schema
        if self.times is not None:
            times = self.times[indices]
        elif self.sampler.sampling.temporal is not None and schema.time is not None:
            own = Wanted(self.node_type, schema.time, nodes)
            times = self.assembler.store.features.gather([own])[0].long()
        seeds = one_type_seeds(self.sampler, self.node_type, nodes, times, share.first)
        fields: dict[str, Any] = {
            "input_id": indices if self.input_id is None else self.input_id[indices],
            "seed_time": times if self.times is not None else None,
            "batch_size": indices.numel(),
        }
        return replace(seeds, fields={self.node_type: fields})


def one_type_seeds(sampler: Sampler, node_type: str, nodes: Tensor, times: Tensor | None, first: int) -> Seeds:
    """Return seeds of one node type; in disjoint sampling, each has a tree number, counted from `first`."""
    schema = sampler.graph.schema
    index, count = schema.type_index[node_type], len(schema.node_types)
    by_type: list[Tensor | None] = [None] * count
    trees: list[Tensor | None] = [None] * count
    by_type[index] = nodes
    if sampler.sampling.disjoint:
        trees[index] = torch.arange(first, first + nodes.numel())
    return Seeds(tuple(by_type), tuple(trees), times, first)


class NodeTimes:
    """The times of nodes, for temporal negatives. The times of a node type are read when first needed, then kept."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._times: dict[int, Tensor] = {}

    def __call__(self, relation: RelationName) -> dict[int, Tensor]:
        """Return the times of all nodes of a relation's two types, by type index; {} if nodes have no times."""
        schema = self._store.schema
        if schema.time is None or schema.edge_time:
            return {}
        ends = {schema.type_index[relation[0]], schema.type_index[relation[2]]}
        dated = [index for index in ends if schema.time in schema.node_types[index].fields]
        with self._lock:
            for index in dated:
                if index not in self._times:
                    of = schema.node_types[index]
                    pieces = scan_rows(self._store.features, of.name, schema.time, of.num_nodes)
                    self._times[index] = torch.cat([NO_IDS, *pieces])  # integers of any dtype become int64
            return {index: self._times[index] for index in dated}


@dataclass(frozen=True)
class LinkMaker(LocalMaker):
    """Makes batches whose seeds are the ends of links and of negative links."""

    task: LinkTask
    ends: Tensor  # [2, n] int64
    labels: Tensor | None = None
    times: Tensor | None = None
    input_id: Tensor | None = None
    exclusion: Exclusion | None = None
    candidates: Tensor | None = None  # [n, m] int64: listed candidates

    @property
    def seed_nodes(self) -> tuple[str, Tensor]:
        return self.task.key[2], self.ends[1]

    def seeds(self, share: StepShare) -> Seeds:
        indices, first, key = share.indices, share.first, share.key
        labels = None if self.labels is None else self.labels[indices]
        times = None if self.times is None else self.times[indices]
        listed = None if self.candidates is None else self.candidates[indices]
        links = Links(self.ends[0][indices], self.ends[1][indices], labels, times, first, listed)
        made = make_link_seeds(self.sampler.graph, links, self.task, key, disjoint=self.sampler.sampling.disjoint)
        input_id = indices if self.input_id is None else self.input_id[indices]
        relation, found = self.task.key, made.fields
        placed: dict[TypeKey, dict[str, Any]] = {relation: {"input_id": input_id}}  # as PyG places them
        if "src_index" in found:
            placed[relation] |= {"edge_label_index": None, "edge_label_time": None}
            if labels is not None:
                placed[relation]["edge_label"] = labels
            placed[relation[0]] = {name: found[name] for name in ("src_index", "seed_time")}
            names = ("dst_pos_index", "dst_neg_index", "dst_neg_shared", "seed_time")
            of_destinations = {name: found[name] for name in names}
            placed[relation[2]] = placed.get(relation[2], {}) | of_destinations
        else:
            placed[relation] |= found
        return replace(made.seeds, link_of=made.link_of, fields=placed, excluded=self.excludes(share))

    def excludes(self, share: StepShare) -> tuple[Tensor | None, ...]:
        return () if self.exclusion is None else self.exclusion.of(share.whole_step())


# --- the description that ranks compare -------------------------------------------------------

NUM_HASHED = 4096  # entries of a long tensor: not all seeds and edges are hashed
SPLITMIX = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)  # shifts and factors of splitmix64


@dataclass(frozen=True)
class Fingerprint:
    """The settings and seeds that determine the batches of a loader. Ranks compare them, so the rank is left out."""

    loader: str
    order: Order  # of the steps that are left in the epoch
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
        links = self.maker if isinstance(self.maker, LinkMaker) else None
        task, exclusion = (None, None) if links is None else (links.task, links.exclusion)
        negatives, candidates = None if task is None else task.negatives, None if links is None else links.candidates
        names = ("batch_size", "shuffle", "drop_last", "least_tail", "seed")
        return {
            "loader": self.loader,
            "store": self._store,
            "seeds": self._seeds,
            **{name: str(getattr(order, name)) for name in names},
            "sampler" if isinstance(order, DrawnOrder) else "layout": str(order.layout),
            **{entry.name: str(getattr(sampling, entry.name)) for entry in fields(sampling)},
            **({} if negatives is None else {"neg_sampling": f"{negatives.mode} {negatives.amount}"}),
            "candidates": "none" if task is None else task.candidates if candidates is None else _digest(candidates),
            "known_links": "none" if task is None or task.known is None else _digest(task.known.pairs),
            "exclude": "none" if exclusion is None else exclusion.shown,
            "aggregate": str(assembler.reduce),
            "degrees": str(assembler.degrees),
            "fields": "all" if assembler.fields is None else str(assembler.fields),
            "sample_frontier": "none" if hook is None else "given",
            "position": f"epoch {order.epoch}, step {order.first_step}",
        }

    def seed_hashes(self, limit: int) -> list[int]:
        """Return the `limit` lowest hashes of the seeds in their graph and node type; one for seeds of a sampler."""
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
        """The seeds: the type and the ids [n] of nodes, or the relation and the end nodes [2, n] of links."""
        if isinstance(self.maker, NodeMaker):
            return self.maker.node_type, self.maker.nodes
        assert isinstance(self.maker, LinkMaker)
        return " ".join(self.maker.task.key), self.maker.ends

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
    """Return a hash of integer tensors, from the shape, the sum and some entries of each."""
    digest = hashlib.sha256()
    for ids in lists:
        digest.update(repr((tuple(ids.shape), int(ids.sum()), _spread(ids).tolist())).encode())
    return digest.hexdigest()[:8]


def _spread(ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_HASHED)]
