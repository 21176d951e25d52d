"""Which links of a relation train, validate and test, and the graph without those that must not be seen.

An edge's split is a hash of its two ends, so both directions of a link, and all copies of it, fall into the same one,
on every rank alike. The graph that is left is in every process's own memory: for a relation that is too large for
that, build a store of the training edges and give the others as files (`task.links`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.ops import EdgeLists
from hoploom.ops.mixing import Words, mix_words
from hoploom.schema import EDGE_ID, Owner, Relation, RelationName, Schema
from hoploom.store import Store
from hoploom.store.base import Part, Table
from hoploom.store.edges import edges_of
from hoploom.store.on_disk import OnDisk
from hoploom.store.sharded import Sharded
from hoploom.store.store import assemble
from hoploom.store.system_memory import require_memory
from hoploom.train.runs.run_file import RunFile

HELD_OUT = 0x6C696E6B73  # folded into the seed's key, to stay apart from what samplers draw
EDGE_BYTES = 32  # of an edge while it is held out: its ends, its split, and its new place
AT_ONCE = 1 << 18  # edges that are looked at together: each takes some numbers of 64 bits
TRAIN, VAL, TEST = range(3)
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class HeldOut:
    """A graph without the edges that were held out, and the links of each split."""

    store: Store
    links: Mapping[str, Tensor]  # "train", "val", "test" -> [2, n] int64


@dataclass(frozen=True)
class LinkShares:
    """How edges fall into splits."""

    seed: int
    val: float
    test: float

    def splits(self, sources: Tensor, destinations: Tensor, *, undirected: bool) -> Tensor:
        """The split of every edge: [n] uint8."""
        first, second = _words(sources), _words(destinations)
        if undirected:
            first, second = np.minimum(first, second), np.maximum(first, second)
        key = np.full(1, keys.mix(keys.mix(0, HELD_OUT), self.seed), dtype=np.uint64)
        drawn = (mix_words(mix_words(key, first), second) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        out = np.full(len(drawn), TRAIN, dtype=np.uint8)
        out[drawn < self.val + self.test] = TEST
        out[drawn < self.val] = VAL
        return torch.from_numpy(out)


def _words(ids: Tensor) -> Words:
    return ids.to(torch.int64).numpy().view(np.uint64)


def hold_out(store: Store, relation: RelationName, reverse: RelationName | None, shares: LinkShares) -> HeldOut:
    """Split a relation's edges; those to validate and to test leave the graph, and their reverses with them.

    >>> held_out = hold_out(store, ("node", "to", "node"), None, LinkShares(seed=0, val=0.05, test=0.1))
    """
    schema = store.schema
    _require_memory(store, {relation, relation if reverse is None else reverse})
    splits = {relation: [_splits(part, relation, shares) for part in store.parts]}
    if reverse is not None and reverse != relation:
        splits[reverse] = [_splits(part, reverse, shares, turned=True) for part in store.parts]
    of_split = torch.cat(splits[relation])
    links = {name: _links(store.parts, relation, of_split == split) for split, name in enumerate(SPLITS)}
    kept = {key: [of == TRAIN for of in per_part] for key, per_part in splits.items()}
    num_edges = {key: sum(int(keep.sum()) for keep in masks) for key, masks in kept.items()}
    relations = tuple(replace(r, num_edges=num_edges.get(r.key, r.num_edges)) for r in schema.relations)
    left = Schema(schema.node_types, relations, schema.homogeneous, schema.weight, schema.time)
    held_out = HeldOut(_within(store, assemble(left, _without(store.parts, left, kept)), set(kept)), links)
    store.require_whole()  # what was copied
    ops.give_back_freed_memory()  # it took twice as much as is left
    return held_out


def _require_memory(store: Store, keys: set[RelationName]) -> None:
    """The links, the lists that are left, and what it takes to find both."""
    num_bytes = 0
    for part in store.parts:
        for key in keys:
            lists = part.lists[store.schema.relation_index[key]]
            columns = sum(column.nbytes for column in lists.columns) - lists.indptr.nbytes
            num_bytes += lists.num_edges * EDGE_BYTES + columns + 2 * lists.indptr.nbytes
    way_out = "build a store of the training edges, and give the others as files: task.links"
    require_memory(num_bytes, "to hold out links and the graph without them takes", way_out)


def _within(store: Store, left: Store, changed: set[RelationName]) -> Store:
    """What a budget leaves on the disk stays there; edges that were taken from a relation's are in memory."""
    if store.reads is None:
        return left
    shards = []
    for shard, part in zip(store.shards, left.parts, strict=True):
        assert isinstance(shard, OnDisk)
        tables = {named: far for named, far in shard.tables.items() if named[0] not in changed}
        lists = {index: far for index, far in shard.lists.items() if left.schema.relations[index].key not in changed}
        shards.append(replace(shard, part=part, tables=tables, lists=lists))
    sharded = Sharded(left.schema, shards, left.ranges)
    limited = replace(left, budget=store.budget, reads=store.reads, scratch=store.scratch)
    return replace(limited, graph=sharded, features=sharded, shards=tuple(shards))


def _splits(part: Part, key: RelationName, shares: LinkShares, *, turned: bool = False) -> Tensor:
    """The split of every edge: [n] uint8. turned: destinations stand first, as in the relation's mirror image."""
    found = [torch.empty(0, dtype=torch.uint8)]
    for sources, nodes in edges_of(part.lists[part.schema.relation_index[key]], key, AT_ONCE):
        first, second = (nodes, sources) if turned else (sources, nodes)
        found.append(shares.splits(first, second, undirected=key[0] == key[2]))
    return torch.cat(found)


def _links(parts: Sequence[Part], key: RelationName, chosen: Tensor) -> Tensor:
    """The chosen ones of a relation's edges: [2, n] int64."""
    links, begin, found = torch.empty(2, int(chosen.sum()), dtype=torch.int64), 0, 0
    for part in parts:
        for ends in edges_of(part.lists[part.schema.relation_index[key]], key, AT_ONCE):
            some = chosen[begin : begin + ends[0].numel()]
            begin, first, found = begin + some.numel(), found, found + int(some.sum())
            for row, of_end in zip(links, ends, strict=True):
                row[first:found] = of_end[some]
    return links


def _without(parts: Sequence[Part], schema: Schema, kept: Mapping[RelationName, Sequence[Tensor]]) -> list[Part]:
    """The parts with the kept edges of these relations."""
    out = []
    first_edges = dict.fromkeys(kept, 0)
    for number, part in enumerate(parts):
        lists, tables = list(part.lists), dict(part.tables)
        for key, masks in kept.items():
            index, keep = schema.relation_index[key], masks[number]
            lists[index] = _kept_lists(part.lists[index], keep, first_edges[key])
            tables |= _kept_tables(part, schema.relations[index], keep, first_edges[key])
            first_edges[key] += int(keep.sum())
        out.append(replace(part, schema=schema, lists=tuple(lists), tables=tables))
    return out


def _kept_lists(lists: EdgeLists, keep: Tensor, first_edge: int) -> EdgeLists:
    running = torch.zeros(keep.numel() + 1, dtype=torch.int64)
    np.cumsum(keep.numpy(), out=running[1:].numpy())  # torch's would copy all of `keep` to 64 bits first
    return EdgeLists(
        running[lists.indptr],
        lists.indices[keep],
        lists.first_node,
        first_edge,
        None if lists.weight is None else lists.weight[keep],
        None if lists.edge_time is None else lists.edge_time[keep],
        lists.source_time,
    )


def _kept_tables(part: Part, relation: Relation, keep: Tensor, first_edge: int) -> dict[tuple[Owner, str], Table]:
    """Edge fields in CSC order lose rows; those in the user's own order are found through edge ids, which lose them."""
    out: dict[tuple[Owner, str], Table] = {}
    has_ids = (relation.key, EDGE_ID) in part.tables
    for (owner, name), table in part.tables.items():
        if owner == relation.key and not (table.by_edge_id and has_ids and name != EDGE_ID):
            out[owner, name] = Table(table.rows[keep], first_edge, table.by_edge_id)
    return out


# --- links in files ------------------------------------------------------------------------------


def read_links(run_file: RunFile, folder: Path) -> dict[str, Tensor]:
    """train.npy, and val.npy and test.npy where they are."""
    found = {split: folder / f"{split}.npy" for split in SPLITS if (folder / f"{split}.npy").exists()}
    if "train" not in found:
        raise run_file.problem("task.links", f"{folder} has no train.npy; write the links there, [2, n] int64")
    return {split: _read_ends(run_file, path) for split, path in found.items()}


def _read_ends(run_file: RunFile, path: Path) -> Tensor:
    try:
        ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise run_file.problem("task.links", f"{path} is no .npy file: {error}; write it with numpy.save") from error
    if not isinstance(ends, np.ndarray) or ends.ndim != 2 or ends.shape[0] != 2 or ends.dtype.kind not in "iu":
        shown = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, np.ndarray) else "an archive"
        raise run_file.problem("task.links", f"{path} holds {shown}; give [2, n] int64, sources above destinations")
    if not ends.shape[1]:
        raise run_file.problem("task.links", f"{path} holds no link; give at least one, or remove the file")
    return torch.from_numpy(ends.astype(np.int64))
