"""Comparing batches to the last bit, and the reference sampler behind the store's own seam."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from hoploom.batch import Block
from hoploom.ops import Frontier, Picks
from hoploom.store import Draw, Part, Store
from support import reference


def contents(batch: Any) -> dict[Any, Any]:
    return {(storage._key, name): value for storage in batch.stores for name, value in storage.items()}


def on_host(batch: Any) -> Any:
    """The batch moved to the CPU; PyG passes over blocks."""
    moved = batch.to("cpu")
    if "blocks" in moved:
        moved.blocks = [block.to("cpu") for block in moved.blocks]
    return moved


def seeds_of(batches: Iterable[Any]) -> list[int]:
    return [node for batch in batches for node in batch.n_id[: batch.batch_size].tolist()]


def assert_same(left: Any, right: Any) -> None:
    """Two batches are equal in every field, dtype, order and value."""
    ours, theirs = contents(left), contents(right)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert same_value(value, theirs[name]), f"{name} differs"


def same_value(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Block):
        return same_value(vars(left), vars(right))
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def assert_same_batches(left: Iterable[Any], right: Iterable[Any]) -> None:
    left, right = list(left), list(right)
    assert len(left) == len(right) > 0
    for ours, theirs in zip(left, right, strict=True):
        assert_same(ours, theirs)


class ReferenceGraph:
    """A GraphStore that samples with the slow, readable reference."""

    def __init__(self, part: Part) -> None:
        self.schema, self._part = part.schema, part

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        found: list[Picks | None] = []
        for index, lists in enumerate(self._part.lists):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is None or draw.fanouts[index] == 0:
                found.append(None)
                continue
            if draw.counts_only:
                counts = lists.indptr.diff()[frontier.nodes - lists.first_node]
                found.append(Picks(counts, frontier.nodes[:0], frontier.nodes[:0]))
                continue
            weight = lists.weight if draw.weighted else None
            rule = draw.rule(index)
            rule = rule._replace(weighted=weight is not None, excluded=_listed(rule.excluded))
            picks = reference.sample(
                lists.indptr.tolist(),
                lists.indices.tolist(),
                reference.Frontier(*map(_listed, frontier)),
                reference.Rule(*rule),
                reference.Columns(_listed(weight), _listed(lists.edge_time), _listed(lists.source_time)),
                (lists.first_node, lists.first_edge),
            )
            found.append(Picks(*(torch.tensor(column, dtype=torch.int64) for column in picks)))
        return found


def _listed(column: Tensor | None) -> Any:
    return None if column is None else column.tolist()


def with_reference(store: Store) -> Store:
    return replace(store, graph=ReferenceGraph(store.parts[0]))


class Replayed(BaseSampler):
    """PyG's sampler interface over given batches, so that PyG's own loader joins the features of the same picks."""

    edge_permutation = None

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = iter(given)

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput | HeteroSamplerOutput:
        batch = next(self._given)
        return _sampler_output(batch, (index.input_id, index.time))

    def sample_from_edges(self, index: EdgeSamplerInput, **_: Any) -> SamplerOutput | HeteroSamplerOutput:
        batch = next(self._given)
        triplets = any("src_index" in storage for storage in batch.stores)
        names = ("src_index", "dst_pos_index", "dst_neg_index", "seed_time")
        names = names if triplets else ("edge_label_index", "edge_label", "edge_label_time")
        return _sampler_output(batch, (index.input_id, *(next(_held(batch, name), None) for name in names)))


def _held(batch: Any, name: str) -> Iterator[Any]:
    return (storage[name] for storage in batch.stores if name in storage)


def _sampler_output(batch: Any, metadata: tuple[Any, ...]) -> SamplerOutput | HeteroSamplerOutput:
    names = ("n_id", "edge_index", "e_id", "batch", "num_sampled_nodes", "num_sampled_edges")
    if isinstance(batch, Data):
        node, (row, col), *more = (batch.get(name, None) for name in names)
        return SamplerOutput(node, row, col, *more, metadata=metadata)
    node, edge_index, edge, *rest = ({s._key: s[name] for s in batch.stores if name in s} for name in names)
    row, col = ({key: ends[i] for key, ends in edge_index.items()} for i in (0, 1))
    edges = dict.fromkeys(batch.edge_types) | edge
    return HeteroSamplerOutput(node, row, col, edges, *(found or None for found in rest), metadata=metadata)
