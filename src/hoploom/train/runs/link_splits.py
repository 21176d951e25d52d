"""Split the links of a relation into train, val and test, and remove the held-out links from the graph.

A random split is a hash of an edge's two ends, so both directions and all copies of a link have the same split on
every rank. The key `task.links` names files with your splits. The remaining graph is in every process's own memory.
If a relation is too large for that, build a store of its training edges, and give the other links as files.
"""

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import keys, ops
from hoploom.config.values import nearest
from hoploom.errors import ConfigError, HoploomError
from hoploom.ops import EdgeLists
from hoploom.ops.sample import Words, mix_words
from hoploom.sample import exclusions
from hoploom.sample.negatives import KnownLinks, are_edges, known_links
from hoploom.schema import DTYPES, EDGE_ID, ID_DTYPES, RelationName, Schema, read_ids
from hoploom.store import Store, Wanted
from hoploom.store.base import Part, Table, in_edges, scan_edges
from hoploom.store.format import write_whole
from hoploom.store.on_disk import OnDisk
from hoploom.store.sharded import Sharded
from hoploom.store.store import assemble
from hoploom.system import needs, require_memory
from hoploom.train.link_prediction import LABELLED, LinkPrediction
from hoploom.train.runs.run_file import RunFile
from hoploom.train.tasks import Task

HELD_OUT = 0x6C696E6B73  # mixed into the seed's key, which samplers use too
EDGE_BYTES = 32  # memory per edge while links are held out: ends, split and new position
LEAST_LINKS = 16  # of a batch of evaluation in which each link has candidates, which are seeds, too
AT_ONCE = 1 << 18  # edges that are read at a time: each takes a few 64-bit integers
TRAIN, VAL, TEST = range(3)
SPLITS = ("train", "val", "test")
ENDS = ("source", "destination")  # columns of links in files
MOST_RELATIONS = 1_000_000


class HeldOut(NamedTuple):
    """A graph without the edges that were held out, and the links of each split."""

    store: Store
    links: Mapping[str, Tensor]  # "train", "val", "test" -> [2, n] int64; with a `field`, [3, n]: its values come last


@dataclass(frozen=True)
class LinkShares:
    """The shares of the edges that are held out at random for validation and test."""

    seed: int
    val: float
    test: float

    def splits(self, sources: Tensor, destinations: Tensor, *, undirected: bool) -> Tensor:
        """Return the split of every edge: TRAIN, VAL or TEST ([n] uint8); if `undirected`, the same both ways."""
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


def reverses_of(schema: Schema, key: RelationName) -> tuple[RelationName, ...]:
    """Return the other relations from the destination type of `key` to its source type. They may be its reverses."""
    leading_back = exclusions.leading_back(schema, schema.relation_index[key])
    return tuple(other for index in leading_back if (other := schema.relations[index].key) != key)


def hold_out(
    store: Store,
    relation: RelationName,
    reverses: Collection[RelationName],
    shares: LinkShares | KnownLinks,
    field: str | None = None,
) -> HeldOut:
    """Split a relation's edges, and remove the links of val and test from the graph, also from its `reverses`.

    KnownLinks as `shares` are held out as test links; all other edges are for training.

    >>> held_out = hold_out(store, ("node", "to", "node"), [], LinkShares(seed=0, val=0.05, test=0.1))
    """
    schema, num_bytes = store.schema, 0
    for part in store.parts:
        for key in {relation, *reverses}:
            lists = part.lists[schema.relation_index[key]]
            columns = sum(column.nbytes for column in lists.columns) - lists.indptr.nbytes
            num_bytes += lists.num_edges * EDGE_BYTES + columns + 2 * lists.indptr.nbytes
    way_out = "build a store of the training edges, and give the others as files: task.links"
    require_memory(num_bytes, "to hold out links and the graph without them takes", way_out)
    splits = {relation: [_splits(part, relation, shares) for part in store.parts]}
    of_split = torch.cat(splits[relation])
    links = {name: _links(store, relation, of_split == split, field) for split, name in enumerate(SPLITS)}
    if isinstance(shares, LinkShares):
        num_destinations = schema.node_type(relation[2]).num_nodes
        shares = known_links(torch.cat([links["val"], links["test"]], dim=1)[:2], num_destinations)
    for reverse in set(reverses) - {relation}:
        splits[reverse] = [_splits(part, reverse, shares, turned=True) for part in store.parts]
    kept = {key: [of == TRAIN for of in per_part] for key, per_part in splits.items()}
    num_edges = {key: sum(int(keep.sum()) for keep in masks) for key, masks in kept.items()}
    relations = tuple(replace(r, num_edges=num_edges.get(r.key, r.num_edges)) for r in schema.relations)
    left = replace(schema, relations=relations)
    held_out = HeldOut(_within(store, assemble(left, _without(store.parts, left, kept)), set(kept)), links)
    store.require_whole()  # or the copied edges may be zeros
    ops.give_back_freed_memory()  # the work took twice the memory of the result
    return held_out


def _within(store: Store, left: Store, changed: set[RelationName]) -> Store:
    """Return `left` with the memory budget of `store`. Relations in `changed` are in memory; others where they were."""
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


def _splits(part: Part, key: RelationName, shares: LinkShares | KnownLinks, *, turned: bool = False) -> Tensor:
    """Return the split of every edge of a part's relation: [n] uint8. If `turned`, swap each edge's two ends first."""
    found = [torch.empty(0, dtype=torch.uint8)]
    for sources, nodes in scan_edges(part.lists[part.schema.relation_index[key]], key, AT_ONCE):
        first, second = (nodes, sources) if turned else (sources, nodes)
        if isinstance(shares, LinkShares):
            found.append(shares.splits(first, second, undirected=key[0] == key[2]))
            continue
        are_held_out = shares.holds(first, second)
        if key[0] == key[2]:
            are_held_out |= shares.holds(second, first)
        found.append(are_held_out.to(torch.uint8) * TEST)
    return torch.cat(found)


def _links(store: Store, key: RelationName, chosen: Tensor, field: str | None) -> Tensor:
    """Return the edges of a relation where the mask `chosen` is True, [2, n] int64, and the values of a field below."""
    links, begin, found = torch.empty(2 if field is None else 3, int(chosen.sum()), dtype=torch.int64), 0, 0
    if field is not None:
        for row, some in zip(*(torch.split(of, AT_ONCE) for of in (links[2], chosen.nonzero()[:, 0])), strict=True):
            row[:] = store.features.gather([Wanted(key, field, some)])[0]
    for part in store.parts:
        for ends in scan_edges(part.lists[part.schema.relation_index[key]], key, AT_ONCE):
            some = chosen[begin : begin + ends[0].numel()]
            begin, first, found = begin + some.numel(), found, found + int(some.sum())
            for row, of_end in zip(links[:2], ends, strict=True):
                row[first:found] = of_end[some]
    return links


def _without(parts: Sequence[Part], schema: Schema, kept: Mapping[RelationName, Sequence[Tensor]]) -> list[Part]:
    """Return the parts with only the edges that `kept` selects; `kept` has one mask per relation and part."""
    out = []
    first_edges = dict.fromkeys(kept, 0)
    for number, part in enumerate(parts):
        lists, tables = list(part.lists), dict(part.tables)
        for key, masks in kept.items():
            index, keep = schema.relation_index[key], masks[number]
            old, running = part.lists[index], torch.zeros(keep.numel() + 1, dtype=torch.int64)
            np.cumsum(keep.numpy(), out=running[1:].numpy())  # torch's would copy all of `keep` to 64 bits first
            lists[index] = EdgeLists(
                running[old.indptr],
                old.indices[keep],
                old.first_node,
                first_edges[key],
                None if old.weight is None else old.weight[keep],
                None if old.edge_time is None else old.edge_time[keep],
                old.source_time,
            )
            # Fields in CSC order lose rows; other fields are read by edge id, and the edge ids lose rows.
            has_ids = (key, EDGE_ID) in part.tables
            for (owner, name), table in part.tables.items():
                if owner == key and not (table.by_edge_id and has_ids and name != EDGE_ID):
                    tables[owner, name] = Table(table.rows[keep], first_edges[key], table.by_edge_id)
            first_edges[key] += int(keep.sum())
        out.append(replace(part, schema=schema, lists=tuple(lists), tables=tables))
    return out


# --- the links of a run --------------------------------------------------------------------------


def link_task(run_file: RunFile, relations: Iterable[Tensor]) -> LinkPrediction:
    """Return the task of a run on links. `relations` has the numbers of its links' relations, if they have any."""
    section, count = run_file.task, max((1 + int(numbers.max()) for numbers in relations), default=None)
    ranked = ("mrr", "hits@10")  # by default, where links have candidates
    options: dict[str, Any] = {} if section.loss in (None, "binary") else {"loss": section.loss, "metrics": ranked}
    options |= {} if section.metrics is None else {"metrics": section.metrics}
    try:
        task = LinkPrediction(**options, num_relations=count)
        return task if set(task.metrics) <= set(LABELLED) else replace(task, metrics=[*task.metrics, "ranks"])
    except ConfigError as error:
        raise run_file.problem("task.metrics", str(error)) from error


def link_options(
    run_file: RunFile, store: Store, task: LinkPrediction, split: str, seeds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a split's loader of links: negatives, and the edges that a step of training leaves out."""
    section, schema, options = run_file.task, store.schema, dict[str, Any]()
    key, kind = link_relation(run_file, schema), section.candidates
    index, num_nodes = schema.relation_index[key], schema.node_type(key[2]).num_nodes
    mode, amount, weight = "binary", section.negatives, None
    if task.needs_candidates:
        mode, amount = "triplet", amount if split == "train" else section.eval_negatives
        if amount != int(amount):
            message = f"task.negatives is {amount:g}, and {task.needs_candidates!r} ranks each link among them"
            raise run_file.problem("task.negatives", f"{message}; give a whole number")
        most = max((int(name[5:]) for name in task.metrics if name.startswith("hits@")), default=0)
        if most > (among := num_nodes - 1 if kind == "all" else section.eval_negatives):
            message = f"task.metrics has hits@{most}, and a link has {among} candidates"
            raise run_file.problem("task.metrics", f"{message}; give more task.eval_negatives, or a smaller number")
    elif kind not in ("uniform", "degree"):
        message = f"task.candidates is {kind!r}, which is for links that are ranked"
        raise run_file.problem("task.candidates", f'{message}; set task.loss, such as "softmax"')
    if kind == "all" or (split == "train" and kind != "degree"):
        options["candidates"] = kind
    elif split == "train":
        weight = in_edges(store.graph, index, torch.arange(num_nodes), counts_only=True).counts.double() ** 0.75
    options["neg_sampling"] = NegativeSampling(mode, 1 if kind == "all" else amount, dst_weight=weight)
    if section.strict_negatives:  # edges of the graph are no negatives; held-out and listed links are not, either
        known = [given for name, given in seeds.items() if name != "train" or section.links is not None]
        ends = [given if schema.homogeneous else given[1] for given in known]
        if key[0] == key[2]:  # both directions were held out
            ends += [given.flip(0) for given in ends]
        options["known_links"] = torch.cat(ends, dim=1) if ends else None
    options["strict_negatives"] = section.strict_negatives
    if split == "train":
        if section.exclude is not None:
            options["exclude"] = section.exclude
        else:
            options["exclude"] = "both" if exclusions.opposite_relations(schema, index) else "self"
    return options


def eval_batch_size(run_file: RunFile, task: Task, schema: Schema) -> int:
    """Return the default batch size of evaluation: that of training, less if each link has many candidates."""
    size = run_file.loader.batch_size
    if not (isinstance(task, LinkPrediction) and task.needs_candidates):
        return size
    num_candidates = run_file.task.eval_negatives
    if run_file.task.candidates == "all":
        num_candidates = schema.node_type(link_relation(run_file, schema)[2]).num_nodes
    return min(size, max(LEAST_LINKS, size // (1 + num_candidates)))


def link_relation(run_file: RunFile, schema: Schema) -> RelationName:
    """Return the relation whose links a run learns; raise ConfigError if run.toml does not name one of several."""
    if run_file.task.relation is not None:
        return relation_of(run_file, "task.relation", schema, run_file.task.relation)
    if len(schema.relations) > 1:
        known = [" ".join(r.key) for r in schema.relations]
        raise run_file.problem("task.relation", f"task.relation is missing; name one of {known}")
    return schema.relations[0].key


def link_seeds(run_file: RunFile, store: Store) -> tuple[RelationName, Store, dict[str, Tensor], tuple[str, ...]]:
    """Return the relation to learn, the graph without held-out links, the links of each split, and notes to print.

    Links are [2, n] int64. In a knowledge graph, they are [3, n], with the numbers of their relations.
    """
    schema, graph, links, notes = store.schema, store, dict[str, Tensor](), list[str]()
    key, field = link_relation(run_file, schema), run_file.task.relation_field
    fields = schema.relation(key).fields
    known = [name for name, own in fields.items() if own.shape == () and DTYPES[own.dtype] in ID_DTYPES]
    if field not in (None, *known):
        message = f"task.relation_field is {field!r}, no field of {' '.join(key)!r} with an integer for each edge"
        raise unknown_name(run_file, "task.relation_field", message, str(field), sorted({*known} - {EDGE_ID}))
    reverses = reverses_of(schema, key)
    if run_file.task.links is not None:
        links = read_links(run_file, store, key, run_file.task.links)
    shared = shared_links(links)
    ends = [links[split][:2] for split in SPLITS[1:] if split in links]
    evaluated = torch.cat([torch.empty(2, 0).long(), *ends], dim=1)
    if "train" not in links or in_graph(store, key, reverses, evaluated):
        if len(store.parts) < len(store.ranges):
            why = "validation and test links are edges of the graph" if "train" in links else "task.links is missing"
            message = f"{why}, and edges can be held out only where a process holds them all"
            raise run_file.problem("task.links", f"{message}; give the links in files, from a store without the others")
        drawn = LinkShares(run_file.seed, run_file.task.val_share, run_file.task.test_share)
        shares = known_links(evaluated, schema.node_type(key[2]).num_nodes) if links else drawn
        held_out = hold_out(store, key, reverses, shares, field)
        found = {split: ends for split, ends in held_out.links.items() if ends.numel()}
        for split, share in (("val", run_file.task.val_share), ("test", run_file.task.test_share)):
            if share and not links and split not in found:
                message = f"task.{split}_share is {share:g}, and no edge of {' '.join(key)!r} is held out by it"
                raise run_file.problem(f"task.{split}_share", f"{message}; give a larger share, or 0")
        links = {split: ends for split, ends in found.items() if split == "train" or not links} | links
        graph, gone = held_out.store, dict[RelationName, str]()
        for name in (key, *reverses):
            gone[name] = f"{schema.relation(name).num_edges - graph.schema.relation(name).num_edges:,}"
        text = f"{gone[key]} edges of {' '.join(key)!r} are held out of the graph"
        turned = ", ".join(f"{gone[name]} of {' '.join(name)!r}" for name in reverses)
        end = ", in both directions" if key[0] == key[2] else "; no other relation leads back"
        notes = [f"{text}; in the opposite direction, {turned}" if reverses else f"{text}{end}"]
    if "train" not in links:
        message = f"no edge of {' '.join(key)!r} is left to train on; take another relation"
        raise run_file.problem("task.relation", message)
    bounds = [int(bound) for rows in links.values() if len(rows) > 2 for bound in rows[2].aminmax()]
    if bad := [number for number in bounds if not 0 <= number < MOST_RELATIONS]:
        message = f"{field!r} has the number {bad[0]}; number the relations 0, 1, 2, ..."
        raise run_file.problem("task.relation_field", message)
    return key, graph, links, (*notes, *shared)


def shared_links(links: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence for every two splits that have links in common. Links are [2, n], or [3, n] with relations."""
    if not links:
        return []
    found, every = [], torch.cat(list(links.values()), dim=1)
    limit = 1 + int(every.max())
    code = every[0] * limit + every[1]
    for row in every[2:]:  # numbers of the distinct pairs: three ids would exceed int64
        code = torch.unique(code, return_inverse=True)[1] * limit + row
    each = torch.split(code, [ends.shape[1] for ends in links.values()])
    codes = {split: torch.unique(own) for split, own in zip(links, each, strict=True)}
    for first, second in combinations(codes, 2):
        if count := int(torch.isin(codes[second], codes[first]).sum()):
            found.append(f"{count:,} links are in two files of task.links, {first} and {second}; keep each in one")
    return found


def unknown_name(
    run_file: RunFile, key: str, what: str, name: str, known: Sequence[str], short: Sequence[str] = ()
) -> ConfigError:
    alike = nearest(name, [*known, *short])
    hint = f"; did you mean {alike!r}?" if alike else ""
    return run_file.problem(key, f"{what}; there are {list(known)}{hint}")


def relation_of(run_file: RunFile, key: str, schema: Schema, name: str) -> RelationName:
    """Return a relation named by its three words, or by the middle one if that is enough."""
    words = {" ".join(r.key): r.key for r in schema.relations}
    found = [words[name]] if name in words else [r.key for r in schema.relations if r.name == name]
    if len(found) == 1:
        return found[0]
    what = f"{key} names {name!r}, {'several relations' if found else 'no relation'}"
    short = [] if found else [r.name for r in schema.relations]
    raise unknown_name(run_file, key, what, name, list(words), short)


# --- links in files ------------------------------------------------------------------------------


def in_graph(store: Store, key: RelationName, reverses: Collection[RelationName], ends: Tensor) -> bool:
    """Return whether the graph has any of the links `ends`, in either direction. Looks them up in neighbour lists."""
    looked_up = [(key, False), *((name, True) for name in reverses)]
    if key[0] == key[2]:
        looked_up += [(name, not is_turned) for name, is_turned in looked_up]
    return any(
        bool(are_edges(store.graph, store.schema.relation_index[name], *(some.flip(0) if is_turned else some)).any())
        for some in torch.split(ends, AT_ONCE, dim=1)
        for name, is_turned in looked_up
    )


def read_links(run_file: RunFile, store: Store, key: RelationName, folder: Path) -> dict[str, Tensor]:
    """Return the links by split, as in `link_seeds`, from the files in `folder`. A split without a file is left out."""
    found, field = dict[str, Tensor](), run_file.task.relation_field
    columns = ENDS if field is None else (*ENDS, field)
    for path in sorted(folder.glob("*.csv")):
        if path.stem not in SPLITS:
            what = f"{folder} has {path.name}, and the files are train.csv, val.csv and test.csv"
            raise run_file.problem("task.links", f"{what}; rename it, or move it elsewhere")
    for split in SPLITS:
        paths = [path for suffix in READERS if (path := folder / f"{split}{suffix}").exists()]
        if len(paths) > 1:
            raise run_file.problem("task.links", f"{folder} has {' and '.join(p.name for p in paths)}; keep one")
        if paths:
            path = paths[0]
            try:
                ends = READERS[path.suffix](path, columns)
                if isinstance(ends, np.ndarray):  # of store ids
                    sizes = [store.schema.node_type(name).num_nodes for name in (key[0], key[2])]
                    rows = [read_ids("a row", torch.from_numpy(row), n) for row, n in zip(ends[:2], sizes, strict=True)]
                else:
                    rows = [store.ids(name).stored(ids) for name, ids in zip((key[0], key[2]), ends[:2], strict=True)]
                for column in ends[2:]:
                    if not np.char.isdecimal(numbers := np.asarray(column).astype(str)).all():
                        raise ConfigError(f"{field!r} is not 0, 1, 2, ... in all rows; give each link its relation's")
                    rows.append(torch.from_numpy(numbers.astype(np.int64)))
            except (OSError, ValueError, EOFError, HoploomError) as error:
                raise run_file.problem("task.links", f"{path}: {error}") from error
            if not rows[0].numel():
                raise run_file.problem("task.links", f"{path} holds no link; give at least one, or remove the file")
            found[split] = torch.stack(rows)
    if not found:
        kinds = " or ".join(READERS)
        raise run_file.problem("task.links", f"{folder} has no train, val or test as {kinds}; write the links there")
    return found


def _read_npy(path: Path, columns: Sequence[str]) -> Any:
    try:
        ends = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"it is no .npy file: {error}; write it with numpy.save") from error
    if not isinstance(ends, np.ndarray) or ends.ndim != 2 or len(ends) != len(columns) or ends.dtype.kind not in "iu":
        shown = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, np.ndarray) else "an archive"
        raise ConfigError(f"it holds {shown}; give [{len(columns)}, n] int64, with the rows {', '.join(columns)}")
    return ends.astype(np.int64)


def _read_csv(path: Path, columns: Sequence[str]) -> Any:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        places = list(map(_checked_columns(next(rows, []), columns).index, columns))
        try:
            found = [[row[at] for at in places] for row in rows if row]
        except (IndexError, csv.Error) as error:
            why = "it has too few values" if isinstance(error, IndexError) else str(error)
            raise ConfigError(f"line {rows.line_num}: {why}; give each link its {' and '.join(columns)}") from error
    return list(zip(*found, strict=True)) or [[]] * len(columns)


def _read_parquet(path: Path, columns: Sequence[str]) -> Any:
    with needs("tables"):
        from pyarrow import parquet
    _checked_columns(parquet.read_schema(path).names, columns)
    return [column.to_numpy() for column in parquet.read_table(path, columns=list(columns)).columns]


def _checked_columns(names: list[str], columns: Sequence[str]) -> list[str]:
    if not set(columns) <= set(names):
        more = "".join(f", and that with the relations {name}" for name in columns[2:])
        raise ConfigError(f"it has the columns {names}; name those with the ids source and destination{more}")
    return names


def write_links(
    folder: Path, store: Store, seeds: Mapping[str, Any], columns: Mapping[str, Mapping[str, Tensor]], *, keep: bool
) -> None:
    """Write the held-out links, with the user's ids, to val.csv and test.csv, for a later `task.links`.

    `columns` are further ones: name -> split -> numbers. `keep` leaves files that exist unchanged.
    """
    for split in ("val", "test"):
        if split in seeds and not (keep and (folder / f"{split}.csv").exists()):
            key, links = (store.schema.relations[0].key, seeds[split]) if store.schema.homogeneous else seeds[split]
            more = {name: numbers[split] for name, numbers in columns.items() if split in numbers}
            write_whole(folder / f"{split}.csv", _csv_of(store, key, links, more))


def _csv_of(store: Store, key: RelationName, links: Tensor, more: Mapping[str, Tensor]) -> Iterator[bytes]:
    yield f"{','.join([*ENDS, *more])}\n".encode()
    for some in torch.split(torch.stack([*links, *more.values()]), AT_ONCE, dim=1):
        ids = [store.ids(name).original(row).tolist() for name, row in zip((key[0], key[2]), some[:2], strict=True)]
        ids += some[2:].tolist()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*ids, strict=True))
        yield text.getvalue().encode()


READERS = {".parquet": _read_parquet, ".csv": _read_csv, ".npy": _read_npy}
