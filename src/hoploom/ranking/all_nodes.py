"""Rank true links among all nodes, such as the triples of a knowledge graph.

Scores are computed in float64, block by block, so that one block of them is in memory at a time. The last bits of a sum
depend on the shape of its block. Scores that differ in these bits only are equal here, so that a rank does not depend
on the other links, nor on the number of processes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.nn.decoders import Decoder
from hoploom.ranking.highest import SOURCES, Rows, blocks, finite_rows, known_of, read_rows, scorer_of, without_nan
from hoploom.ranks.context import Context
from hoploom.schema import RelationName, read_ids

NOISE = 1e-12  # of the largest score of a source: what rounding may change
DEFAULT = ("mrr", "hits@10")


class LinkRanks(NamedTuple):
    """The rank of each link among all destinations. Equal scores share the mean of their ranks."""

    doubled: Tensor  # [n] int64: twice the rank
    relations: Tensor  # [n] int64: 0 if they were not given

    def metrics(self, names: Sequence[str] = DEFAULT) -> dict[str, float]:
        """Return metrics by name: mrr, mean_rank, and hits with a number, such as hits@10."""
        from hoploom.ranking.rank_metrics import RankMetrics  # torchmetrics is slow to import

        metrics = RankMetrics(names)
        metrics.count(self.doubled)
        return {name: float(value) for name, value in RankMetrics.compute(metrics).items()}  # without other processes

    def by_relation(self, names: Sequence[str] = DEFAULT) -> dict[int, dict[str, float]]:
        """Return the number of `links` and the metrics of each relation, sorted by the first metric from low to high.

        >>> worst = list(ranks.by_relation().items())[:10]
        """
        found = {}
        for number in torch.unique(self.relations).tolist():
            own = LinkRanks(self.doubled[self.relations == number], self.relations)
            found[number] = {"links": own.doubled.numel(), **own.metrics(names)}
        return dict(sorted(found.items(), key=lambda entry: entry[1][names[0]]))


@torch.no_grad()
def rank_links(
    rows: Rows | Tensor,
    links: Tensor | tuple[RelationName, Tensor],
    *,
    decoder: Decoder | None = None,
    relations: Tensor | None = None,
    known: Tensor | tuple[Tensor, Tensor] | None = None,
    context: Context | None = None,
) -> LinkRanks:
    """Return the rank of each true link among all nodes that could be its destination.

    `rows` has a row for every node; by node type, `links` names theirs: (("user", "rates", "item"), links [2, n]).
    A score is the dot product of two rows, or that of a `decoder`. `relations` are the numbers of the links' relations.
    `known` are further true links [2, m], or (links, relations): these, and `links` themselves, are not counted before
    a link ("filtered" ranks). Without `known`, ranks are "raw". If you give a `context`, all ranks call with the same
    links, and each of them ranks its share.

    >>> ranks = rank_links(rows, test, decoder=model.decoder, relations=test_type, known=(edge_index, edge_type))
    >>> ranks.metrics(["mrr", "hits@10"])
    """
    key, ends = links if isinstance(links, tuple) else (("node", "to", "node"), links)
    tables = read_rows(rows if isinstance(rows, Mapping) else {key[0]: rows, key[2]: rows}, key[0], key[2])
    given, further = _read("links", ends, relations, tables), None
    if known is not None:
        known, numbers = known if isinstance(known, tuple) else (known, None)
        if (numbers is None) is not (relations is None):
            raise ConfigError("known and links need relations both: known=(links, relations), relations=; or neither")
        further = torch.cat([given, _read("known", known, numbers, tables)], dim=1)
    count, doubled = ends.shape[1], torch.zeros_like(given[0])
    rank, size = (0, 1) if context is None else (context.rank, context.world_size)
    own = slice(count * rank // size, count * (rank + 1) // size)
    doubled[own] = _doubled(scorer_of(decoder, torch.float64, relations), tables, key, given[:, own], further)
    return LinkRanks(doubled if context is None else context.sum(doubled), given[2])


def _read(name: str, ends: Tensor, relations: Tensor | None, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return links [3, n] int64: sources, destinations and relations; raise ConfigError unless they are valid."""
    if ends.dim() != 2 or ends.shape[0] != 2:
        raise ConfigError(f"{name} have shape {list(ends.shape)}; give [2, n], sources and destinations")
    numbers = torch.zeros(ends.shape[1], dtype=torch.int64) if relations is None else relations.cpu()
    if numbers.shape != ends.shape[1:]:
        raise ConfigError(f"there are {numbers.numel()} relations of {ends.shape[1]} {name}; give one each")
    limits = {"sources": len(tables[0]), "destinations": len(tables[1]), "relations": 1 << 31}
    columns = zip(limits.items(), (*ends.cpu(), numbers), strict=True)
    return torch.stack([read_ids(f"{of} of {name}", own, limit, ConfigError) for (of, limit), own in columns])


def _doubled(
    scorer: Decoder, tables: tuple[Tensor, Tensor], key: RelationName, links: Tensor, known: Tensor | None
) -> Tensor:
    """Return twice the rank of each link: [n] int64. Links of one source and relation share their scores."""
    doubled = torch.full_like(links[0], 1 if known is None else 2)  # unless it is left out, a link equals itself
    if not doubled.numel():
        return doubled
    queries, places = torch.unique(links[0] << 31 | links[2], return_inverse=True)
    lists, num_destinations = None, len(tables[1])
    if known is not None:
        codes = known[0] << 31 | known[2]
        query = torch.searchsorted(queries, codes).clamp(max=queries.numel() - 1)
        pairs = (query * num_destinations + known[1])[queries[query] == codes]
        lists = known_of(pairs, queries.numel(), num_destinations)
    order, ranks = places.argsort(stable=True), doubled.numpy()
    limits = torch.searchsorted(places[order], torch.arange(0, queries.numel() + SOURCES, SOURCES)).tolist()
    for begin, first_link, end_link in zip(range(0, queries.numel(), SOURCES), limits, limits[1:], strict=False):
        some = queries[begin : begin + SOURCES]
        relations = some & ((1 << 31) - 1)
        left = finite_rows(tables[0][some >> 31], key[0], torch.float64)
        own = order[first_link:end_link]
        rows = places[own] - begin
        ends = finite_rows(tables[1][links[1, own]], key[2], torch.float64)
        true = without_nan(scorer(left[rows], ends, relations[rows]))
        left_out = None if lists is None else lists.of(begin, begin + some.numel())
        for first, scores in blocks(scorer, left, tables[1], key[2], relations):
            largest = torch.maximum(scores.amax(1), -scores.amin(1))[rows]  # not of other sources
            noise = NOISE * torch.maximum(largest, true.abs()).nan_to_num(posinf=0.0)
            if left_out is not None:
                column = left_out.ids - first
                is_here = (column >= 0) & (column < scores.shape[1])
                query = torch.repeat_interleave(left_out.indptr.diff())
                scores[query[is_here], column[is_here]] = torch.nan  # no level
            table = scores.numpy()
            for link, row, least, most in zip(
                *(each.tolist() for each in (own, rows, true - noise, true + noise)), strict=True
            ):
                ranks[link] += np.count_nonzero(table[row] >= least) + np.count_nonzero(table[row] > most)
    return doubled
