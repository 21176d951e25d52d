"""Find the destinations with the highest scores for each source, such as ten items for every user.

A score is the dot product of two rows, or that of a decoder, in float32. Scores are computed block by block, and each
block is merged into the best so far, so that one block of them is in memory at a time. No destination is skipped. The
last bits of a score may depend on the other sources of the call, as in any matrix product.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_int
from hoploom.errors import ConfigError, DataError
from hoploom.load.arguments import canonical, read_input_nodes
from hoploom.nn.decoders import Decoder, Dot, is_product
from hoploom.schema import RelationName
from hoploom.store import Store
from hoploom.store.base import sampled_edges
from hoploom.system import needs

SOURCES, DESTINATIONS = 1024, 16384  # rows of a block of scores, and columns: 64 MB
NODES = 1 << 16  # destinations whose edges are read at once
ROWS_PER_CELL = 64  # of an approximate search: how many rows each cell is computed from
FOUND = 1 << 21  # rows that an approximate search returns at a time, for all of its sources
JUDGED = 256  # sources of which an approximate search measures its recall

Rows = Mapping[str, Tensor]


class Best(NamedTuple):
    """The best destinations of each source, the best first. Of destinations with equal scores, the lowest id is first.

    A source with fewer than k destinations has -1 and -infinity in the last entries. In an approximate search, equal
    scores are in no order.
    """

    ids: Tensor  # [num_sources, k] int64 node ids
    scores: Tensor  # [num_sources, k] float32
    recall: float = 1.0  # of an approximate search: the share of the true best that it has found, for some sources


class Known(NamedTuple):
    """The destinations that are left out: those of source s are ids[indptr[s]] to ids[indptr[s + 1] - 1]."""

    indptr: Tensor  # [num_sources + 1] int64
    ids: Tensor  # int64, ascending for each source

    def of(self, begin: int, end: int) -> "Known":
        """Return the lists of the sources [begin, end)."""
        first, last = int(self.indptr[begin]), int(self.indptr[end])
        return Known(self.indptr[begin : end + 1] - first, self.ids[first:last])


@torch.no_grad()
def best_of_rows(
    rows: Rows | Tensor | Callable[[list[str]], Rows],
    store: Store,
    sources: Any = None,
    *,
    of: str | None = None,
    k: int = 10,
    exclude: Literal["known"] | Sequence[RelationName] | None = "known",
    decoder: Decoder | None = None,
    approximate: bool = False,
) -> Best:
    """Return the `k` destinations of node type `of` with the highest scores, for each source.

    A score is the dot product of two rows, or that of a `decoder`; of several relations, choose one: `decoder.only(3)`.

    `rows` has a row for every node, by node type; for a graph with one node type, it may be a tensor. It may also be a
    function that makes the rows of some types, which is called when all else is known to be right. `sources` are nodes
    of one type, given like `input_nodes` of a loader: ("user", ids), ("user", "test"), or "user" for all users.
    `exclude` names the relations whose destinations are left out for a source; "known" means all relations from the
    sources' type to `of`, and the source itself if both are of one type. Edges are read once at every call, so give
    many sources at once. `k` should be small.

    `approximate` searches only destinations with similar rows, by faiss. Its index takes time to build, so it is for
    many sources. The exact result is computed for 256 of them, and tells the `recall`.

    >>> best_of_rows({"user": users, "item": items}, store, ("user", ids), of="item", k=10).ids
    """
    source_type, wanted, _ = read_input_nodes(store, sources, "sources")
    of = _only_type(store, "of") if of is None else of
    num_destinations = store.schema.node_type(of).num_nodes
    if as_int("k", k, 1, "give how many destinations to find for each source") > num_destinations:
        raise ConfigError(f"k is {k}, and there are {num_destinations} nodes of {of!r}; give at most that many")
    excluded = _excluded(store, source_type, of, exclude)
    scorer = scorer_of(decoder, torch.float32)
    if approximate:
        if not is_product(scorer):
            raise ConfigError(f"approximate is for dot products, and {type(scorer).__name__} is none; leave it out")
        with needs("faiss"):
            import faiss  # noqa: F401
    found = rows(sorted({source_type, of})) if callable(rows) else rows
    by_type = found if isinstance(found, Mapping) else {_only_type(store, "rows"): found}
    of_sources, of_destinations = read_rows(by_type, source_type, of)
    for name in (source_type, of):
        num_nodes, num_rows = store.schema.node_type(name).num_nodes, len(by_type[name])
        if num_rows != num_nodes:
            raise ConfigError(f"there are {num_rows} rows of {name!r}; give one row for each of its {num_nodes} nodes")
    unique, places = torch.unique(wanted, return_inverse=True)
    known = _known(store, unique, excluded, num_destinations, source_type == of)
    index = _cells_of(of_destinations, of) if approximate else None
    ids = torch.full((unique.numel(), k), -1)
    scores = torch.full((unique.numel(), k), -torch.inf)
    for begin in range(0, unique.numel(), SOURCES):
        end = min(begin + SOURCES, unique.numel())
        left = finite_rows(of_sources[unique[begin:end]], source_type, torch.float32)
        lists = None if known is None else known.of(begin, end)
        if index is not None and is_product(scorer):
            scores[begin:end], ids[begin:end] = _search(index, scorer.query(left, None), lists, k)
            continue
        for first, block in blocks(scorer, left, of_destinations, of):
            ops.keep_best(block, first, lists, scores[begin:end], ids[begin:end])
    if index is None or not unique.numel():
        return Best(ids[places], scores[places])
    some = torch.arange(0, unique.numel(), -(-unique.numel() // JUDGED))
    judged = unique[some] if store.schema.homogeneous else (source_type, unique[some])
    true = best_of_rows(by_type, store, judged, of=of, k=k, exclude=exclude, decoder=decoder).ids
    is_found = (true[:, :, None] == ids[some][:, None]).any(2)[true >= 0]
    return Best(ids[places], scores[places], float(is_found.double().mean()))


def _cells_of(rows: Tensor, of: str) -> Any:
    """Return a faiss index of the rows, in cells of similar rows. A search looks at a few of the cells."""
    import faiss

    num_cells = max(1, min(2 * math.isqrt(len(rows)), len(rows) // ROWS_PER_CELL))
    index: Any = faiss.index_factory(rows.shape[1], f"IVF{num_cells},Flat", faiss.METRIC_INNER_PRODUCT)
    index.nprobe = num_cells // 32 + 8
    every = max(1, len(rows) // (num_cells * ROWS_PER_CELL))
    index.train(finite_rows(rows[::every], of, torch.float32).numpy())
    for some in torch.split(rows, DESTINATIONS):
        index.add(finite_rows(some, of, torch.float32).numpy())
    return index


def _search(index: Any, query: Tensor, known: Known | None, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores and ids of the best rows that the index finds, [n, k] each, without known ones.

    A source is searched for as many more rows as it may know. Those that know most are searched first, a few at a time.
    """
    counts = torch.zeros(len(query), dtype=torch.int64) if known is None else known.indptr.diff()
    left_out = counts[:0] if known is None else torch.repeat_interleave(counts) * index.ntotal + known.ids
    scores, ids, order = torch.empty(len(query), k), torch.empty(len(query), k, dtype=torch.int64), counts.argsort()
    while order.numel():
        width = min(k + int(counts[order[-1]]), index.ntotal)
        order, some = order.tensor_split([-max(1, FOUND // width)])
        near, places = map(torch.from_numpy, index.search(query[some].numpy(), width))
        is_out = (places < 0) | torch.isin(some[:, None] * index.ntotal + places, left_out)
        found = near.masked_fill(is_out, -torch.inf).topk(k)
        scores[some] = found.values
        ids[some] = places.gather(1, found.indices).masked_fill(found.values == -torch.inf, -1)
    return scores, ids


def scorer_of(decoder: Decoder | None, dtype: torch.dtype, relations: Tensor | None = None) -> Decoder:
    """Return a copy of the decoder that computes on the CPU, with this dtype; None stands for dot products."""
    decoder = decoder or Dot()
    decoder.check(relations)
    if decoder.edge_channels:
        what = f"the decoder has edge_channels={decoder.edge_channels}, and rows of nodes have no features of links"
        raise ConfigError(f"{what}; give one without edge_channels")
    own = copy.deepcopy(decoder).to("cpu", dtype).eval()
    if not all(parameter.isfinite().all() for parameter in own.parameters()):
        raise DataError("the decoder has values that are not finite; look at the training that made them")
    return own


def blocks(
    scorer: Decoder, left: Tensor, rows: Tensor, of: str, relations: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the scores of the sources `left`, some destinations at a time: the first destination, then the scores."""
    memory = torch.empty(left.shape[0] * DESTINATIONS, dtype=left.dtype)
    query = scorer.query(left, relations) if is_product(scorer) else None
    for first in range(0, rows.shape[0], DESTINATIONS):
        right = finite_rows(rows[first : first + DESTINATIONS], of, left.dtype)
        if query is None:
            yield first, without_nan(scorer.against(left, right, relations))
        else:
            out = memory[: left.shape[0] * right.shape[0]].view(left.shape[0], right.shape[0])
            yield first, without_nan(torch.mm(query, right.t(), out=out))


def without_nan(scores: Tensor) -> Tensor:
    """Return the scores; raise DataError if one is NaN, because it has no rank."""
    if scores.numel() and scores.amax().isnan():  # needs no memory, as isnan() would
        raise DataError("the score of a link is nan; look at the model that made it")
    return scores


def finite_rows(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return the rows on the CPU; raise DataError if a value is not finite, because no score would mean anything."""
    rows = rows.detach().to("cpu", dtype)
    if not rows.isfinite().all():
        raise DataError(f"rows of {name!r} have values that are not finite; look at the model that made them")
    return rows


def _only_type(store: Store, argument: str) -> str:
    names = [node_type.name for node_type in store.schema.node_types]
    if len(names) > 1:
        raise ConfigError(f"{argument} must name a node type, because the graph has several: {', '.join(names)}")
    return names[0]


def read_rows(rows: Rows, source: str, destination: str) -> tuple[Tensor, Tensor]:
    """Return the rows of two node types; raise ConfigError unless they are floats, with as many columns."""
    found = []
    for name in (source, destination):
        if name not in rows:
            raise ConfigError(f"there are no rows of {name!r}; give rows for it: {{{name!r}: tensor}}")
        own = torch.as_tensor(rows[name])
        if own.dim() != 2 or not own.is_floating_point():
            raise ConfigError(
                f"rows of {name!r} are {own.dtype} of shape {list(own.shape)}; give floats [nodes, width]"
            )
        found.append(own)
    left, right = found
    if left.shape[1] != right.shape[1]:
        raise ConfigError(
            f"rows of {source!r} have {left.shape[1]} columns and rows of {destination!r} have {right.shape[1]}; a "
            "score needs as many"
        )
    return left, right


def _excluded(
    store: Store, source_type: str, of: str, exclude: Literal["known"] | Sequence[RelationName] | None
) -> list[int]:
    """Return the numbers of the relations whose destinations are left out."""
    between = [r.key for r in store.schema.relations if (r.source, r.destination) == (source_type, of)]
    if exclude == "known" and not between:
        raise ConfigError(f"there is no relation from {source_type!r} to {of!r}, so none is known; give exclude=None")
    if exclude == "known":
        chosen: Sequence[RelationName] = between
    elif exclude is None or not isinstance(exclude, str):
        chosen = [canonical(store.schema, key) for key in exclude or ()]
    else:
        raise ConfigError(f"exclude is {exclude!r}; give 'known', a list of relations, or None")
    for key in chosen:
        if key not in between:
            raise ConfigError(f"exclude names {key}, which is no relation from {source_type!r} to {of!r}: {between}")
    return [store.schema.relation_index[key] for key in chosen]


def _known(
    store: Store, sources: Tensor, relations: Sequence[int], num_destinations: int, with_itself: bool
) -> Known | None:
    """Read the destinations of `sources` in these relations, by one pass over all edges; None without relations.

    `sources` are ascending. If `with_itself`, a source is one of its own.
    """
    if not relations:
        return None
    found = [torch.arange(sources.numel()) * num_destinations + sources] if with_itself else []
    first, last = (int(sources[0]), int(sources[-1])) if sources.numel() else (0, -1)
    place_of = torch.full((last - first + 1,), -1)  # of the source that is the n-th after the first
    place_of[sources - first] = torch.arange(sources.numel())
    for relation in relations:
        for ends, destinations in sampled_edges(store.graph, relation, NODES):
            is_near = (ends >= first) & (ends < first + place_of.numel())
            places, destinations = place_of[ends[is_near] - first], destinations[is_near]
            is_wanted = places >= 0
            found.append(places[is_wanted] * num_destinations + destinations[is_wanted])
    pairs = torch.cat(found)
    found.clear()
    return known_of(pairs, sources.numel(), num_destinations)


def known_of(pairs: Tensor, num_sources: int, num_destinations: int) -> Known:
    """Return the destinations of each source from numbers source * num_destinations + destination, in any order."""
    pairs = torch.unique(pairs)
    counts = torch.bincount(pairs // num_destinations, minlength=num_sources)
    return Known(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), pairs % num_destinations)
