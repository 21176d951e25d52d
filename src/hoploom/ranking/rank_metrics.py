"""Metrics of ranked links: the rank of a true link among candidates, and the k best destinations of a source.

All sums are of integers, so results have the same bits for any number of ranks and any order. A rank costs one
comparison per candidate, and nothing is sorted. Lists are judged as torch_geometric.metrics judges them.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from hoploom.errors import ConfigError
from hoploom.ranking.highest import without_nan

SMALL = 1 << 17  # doubled ranks that are counted one by one; greater ones are summed
UNIT = 40  # sums of fractions are in units of 2^-40
OF_RELATION = 26  # likewise, of a relation's reciprocal ranks: sums of 2^27 links are exact in float64, too
AT_ONCE = 1 << 22  # scores that are compared at a time
RANK_METRICS = ("mrr", "hits", "mean_rank", "ranks")
LIST_METRICS = ("precision", "recall", "f1", "map", "ndcg", "mrr", "hit_ratio", "coverage", "diversity", "popularity")


def read_metric(name: str, known: Sequence[str]) -> tuple[str, int | None]:
    """Return the kind and the k of a metric's name, such as "hits@10"; raise ConfigError for an unknown one."""
    found = re.fullmatch(r"([a-z0-9_]+?)(?:@([1-9][0-9]*))?", name) if isinstance(name, str) else None
    if found is None or found[1] not in known:
        raise ConfigError(
            f"metric {name!r:.80} is unknown; choose from {list(known)}, with a number, such as 'hits@10'"
        )
    return found[1], None if found[2] is None else int(found[2])


def doubled_ranks(scores: Tensor) -> Tensor:
    """Return twice the rank of the first score of each row, [n] int64. Equal scores share the mean of their ranks.

    >>> doubled_ranks(torch.tensor([[0.5, 0.9, 0.5, 0.1]]))  # behind one, level with another: rank 2.5
    tensor([5])
    """
    found = [torch.zeros(0, dtype=torch.int64, device=scores.device)]
    for some in torch.split(scores, max(1, AT_ONCE // max(1, scores.shape[1]))):
        first, others = without_nan(some)[:, :1], some[:, 1:]
        found.append(2 + 2 * (others > first).sum(1) + (others == first).sum(1))
    return torch.cat(found)


def _require_ids(what: str, ids: Tensor, least: int, limit: int) -> None:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"{what} have dtype {ids.dtype}; give integers")
    if ids.numel() and not (least <= int(ids.min()) and int(ids.max()) < limit):
        raise ConfigError(f"{what} hold {int(ids.min())} to {int(ids.max())}, out of range [{least}, {limit})")


class _OfRows:
    """Base of metrics of scores with labels 0 and 1, also in rows of links and candidates. -infinity does not count."""

    def update(self, scores: Tensor, targets: Tensor) -> None:
        if scores.dim() == 2:
            counts = scores > -torch.inf
            scores, targets = scores[counts].sigmoid(), targets[counts].clamp(max=1)
        super().update(scores, targets)  # type: ignore[misc]


class LinkAUROC(_OfRows, BinaryAUROC):
    """AUROC of the scores of links and of candidates, all together."""


class LinkAveragePrecision(_OfRows, BinaryAveragePrecision):
    """Average precision of the scores of links and of candidates, all together."""


class RankMetrics(Metric):
    """MRR, hits@k and mean rank of true links, each among its own candidates.

    The metric "ranks" is the number of links by rank: ranks/1, ranks/2, ranks/3 for ranks 3 and 4, ranks/5 for 5 to 8.
    With `num_relations`, there are also the metrics of each relation, such as relations/7/mrr, and relations/7/links.

    >>> metrics = RankMetrics(["mrr", "hits@10"])
    >>> metrics.update(torch.tensor([[0.5, 0.9, 0.5, 0.1]]))
    >>> metrics.compute()["mrr"]
    tensor(0.4000, dtype=torch.float64)
    """

    full_state_update = False
    counts: Tensor  # [SMALL] int64: links by doubled rank
    beyond: Tensor  # [3] int64: of greater ranks, their number, the sum of doubled ranks, and that of reciprocal ranks
    of_relations: Tensor  # [num_relations, 1 + metrics] int64: the links of each relation, and the sums of its metrics

    def __init__(self, names: Sequence[str], num_relations: int = 0) -> None:
        super().__init__()
        self.names = {name: read_metric(name, RANK_METRICS) for name in names}
        for name, (kind, k) in self.names.items():
            if (kind == "hits") is not (k is not None) or 2 * (k or 0) >= SMALL:
                raise ConfigError(f"metric {name!r} cannot be; give 'mrr', 'mean_rank', or hits, such as 'hits@10'")
        self.add_state("counts", torch.zeros(SMALL, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("beyond", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")
        self.num_relations = num_relations
        self.by_relation = {name: read_metric(name, RANK_METRICS) for name in ("mrr", *names) if name != "ranks"}
        if num_relations:
            sums = torch.zeros(num_relations, 1 + len(self.by_relation), dtype=torch.int64)
            self.add_state("of_relations", sums, dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor | None = None) -> None:
        """Count the ranks of true links. `scores` are [n, 1 + candidates], the true link's score first in each row.

        With `num_relations`, the first of a row's `targets` is 1 + the number of the link's relation.
        """
        if scores.dim() != 2:
            raise ConfigError(
                f"{', '.join(self.names)} need candidates for every true link, but there is one score for each link; "
                "use a loader with neg_sampling='triplet'"
            )
        doubled = doubled_ranks(scores)
        self.count(doubled)
        if self.num_relations:
            assert targets is not None
            of_kinds, columns = {"mrr": (2 << OF_RELATION) // doubled, "mean_rank": doubled}, [torch.ones_like(doubled)]
            for kind, k in self.by_relation.values():
                columns.append(of_kinds[kind] if k is None else (doubled <= 2 * k).long())
            self.of_relations.index_add_(0, targets[:, 0] - 1, torch.stack(columns, dim=1).to(self.of_relations.dtype))

    def count(self, doubled: Tensor) -> None:
        """Count doubled ranks [n], on this process only."""
        great = doubled[doubled >= SMALL]
        self.counts += torch.bincount(doubled[doubled < SMALL], minlength=SMALL)
        reciprocals = (2 << UNIT) // great
        self.beyond += torch.stack([torch.full_like(great, 1).sum(), great.sum(), reciprocals.sum()])

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name, float64; nan if there were no links."""
        doubled = torch.arange(SMALL, dtype=torch.float64, device=self.counts.device)
        number, sum_doubled, sum_reciprocal = self.beyond.double()
        total = self.counts.sum() + number
        found: dict[str, Tensor] = {}
        for name, (kind, k) in self.names.items():
            if kind == "mrr":
                summed = (self.counts[2:] * (2 / doubled[2:])).sum() + sum_reciprocal / (1 << UNIT)
            elif kind == "ranks":
                found |= {f"{name}/{least}": total.new_tensor(links) for least, links in self.histogram() if links}
                continue
            elif kind == "hits":
                assert k is not None
                summed = self.counts[: 2 * k + 1].sum().double()
            else:
                summed = ((self.counts * doubled).sum() + sum_doubled) / 2
            found[name] = summed / total
        units = [{"mrr": 1 << OF_RELATION, "mean_rank": 2}.get(kind, 1) for kind, _ in self.by_relation.values()]
        for number, (links, *sums) in enumerate(self.of_relations.tolist() if self.num_relations else ()):
            if links:
                values = [float(links), *(one / unit / links for one, unit in zip(sums, units, strict=True))]
                for name, value in zip(("links", *self.by_relation), values, strict=True):
                    found[f"relations/{number}/{name}"] = torch.tensor(value, dtype=torch.float64)
        return found

    def histogram(self) -> list[tuple[int, int]]:
        """Return (least rank, number of links) for the ranks 1, 2, 3 to 4, 5 to 8 and so on; the last is open."""
        edges = [2, *(2 * (1 << power) + 1 for power in range(SMALL.bit_length() - 2)), SMALL]
        cumulative = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])[edges]
        numbers = [*cumulative.diff().tolist(), int(self.beyond[0])]
        return [(1 + (edge - 1) // 2, number) for edge, number in zip(edges, numbers, strict=True)]


class ListMetrics(Metric):
    """Metrics of the k best destinations of each source, equal to those of torch_geometric.metrics.

    Names are precision, recall, f1, map, ndcg, mrr, hit_ratio, coverage, diversity and popularity, each with a k, such
    as "map@10". `category` and `popularity` have an entry for each destination.

    >>> metrics = ListMetrics(["recall@2"], num_destinations=9)
    >>> metrics.update(torch.tensor([[3, 7]]), torch.tensor([[0, 0], [7, 8]]))  # of 7 and 8, one is among the two best
    >>> metrics.compute()["recall@2"]
    tensor(0.5000, dtype=torch.float64)
    """

    full_state_update = False
    sums: Tensor  # [names] int64, in units of 2^-40
    num_sources: Tensor  # [2] int64: those with a true link, and all
    shown: Tensor  # [names with coverage, num_destinations] bool

    def __init__(
        self,
        names: Sequence[str],
        num_destinations: int,
        *,
        category: Tensor | None = None,
        popularity: Tensor | None = None,
    ) -> None:
        super().__init__()
        if isinstance(names, str) or not names:
            raise ConfigError(f"names are {names!r:.80}; give a list, such as ['recall@10']")
        self.names = {name: read_metric(name, LIST_METRICS) for name in names}
        given = {"diversity": category, "popularity": popularity}
        for name, (kind, k) in self.names.items():
            if k is None or k > num_destinations or (kind == "diversity" and k < 2):
                raise ConfigError(f"metric {name!r} needs a k of at most {num_destinations}, such as '{kind}@10'")
            if kind in given:
                column = given[kind]
                argument = "category" if kind == "diversity" else kind
                if column is None or column.shape != (num_destinations,) or column.is_floating_point():
                    raise ConfigError(
                        f"metric {name!r} needs {argument}=, an integer for each of {num_destinations} nodes"
                    )
        self.category, self.popularity = category, popularity
        covering = sum(kind == "coverage" for kind, _ in self.names.values())
        self.add_state("sums", torch.zeros(len(self.names), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("num_sources", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("shown", torch.zeros(covering, num_destinations, dtype=torch.bool), dist_reduce_fx="max")

    def update(self, best: Tensor, links: Tensor) -> None:
        """Judge the best destinations of some sources: [sources, k], the best first; -1 if there are fewer.

        `links` are the true links of these sources, [2, n]: the row of the source in `best`, and the destination.
        """
        longest = max(k or 0 for _, k in self.names.values())
        if best.dim() != 2 or best.shape[1] < longest:
            raise ConfigError(
                f"the best are of shape {list(best.shape)}; give [sources, k], with a k of {longest} at least"
            )
        limit, stride = self.shown.shape[1], self.shown.shape[1] + 1
        _require_ids("best", best, -1, limit)
        _require_ids("rows of links", links[0], 0, best.shape[0])
        _require_ids("destinations of links", links[1], 0, limit)
        pairs = torch.unique(links[0] * stride + links[1])
        places = torch.arange(best.shape[0], device=best.device)[:, None] * stride + best
        is_true = torch.isin(places, pairs) & (best >= 0)
        num_true = torch.bincount(pairs // stride, minlength=best.shape[0])
        covering = 0
        for number, (kind, k) in enumerate(self.names.values()):
            assert k is not None
            listed = best[:, :k]
            if kind == "coverage":
                self.shown[covering, listed[listed >= 0]] = True
                covering += 1
            elif kind == "popularity":
                assert self.popularity is not None
                self.sums[number] += self.popularity.to(best.device)[listed[listed >= 0]].sum()
            else:
                values = self._values(kind, k, listed, is_true[:, :k].double(), num_true)
                self.sums[number] += (values * (1 << UNIT)).round().long().sum()
        self.num_sources += torch.stack([(num_true > 0).sum(), torch.full_like(num_true, 1).sum()])

    def _values(self, kind: str, k: int, best: Tensor, is_true: Tensor, num_true: Tensor) -> Tensor:
        """Return a metric's value for each source: [sources] float64."""
        hits = is_true.sum(1)
        places = torch.arange(1, k + 1, dtype=torch.float64, device=best.device)
        if kind == "precision":
            return hits / k
        if kind == "recall":
            return hits / num_true.clamp(min=1)
        if kind == "f1":
            return 2 * hits / (k + num_true)
        if kind == "map":
            return (is_true.cumsum(1) / places * is_true).sum(1) / num_true.clamp(min=1, max=k)
        if kind == "ndcg":
            gains = 1 / (places + 1).log2()
            ideal = torch.cat([gains[:1], gains.cumsum(0)])  # of no true link: hits are 0
            return (is_true * gains).sum(1) / ideal[num_true.clamp(max=k)]
        if kind == "mrr":
            return (is_true / places).amax(1)
        if kind == "hit_ratio":
            return is_true.amax(1)
        assert self.category is not None
        missing = torch.arange(k, device=best.device) + self.category.max() + 1  # each a category of its own
        categories = torch.where(best >= 0, self.category.to(best.device)[best], missing)
        equal = (categories[:, None] == categories[:, :, None]).sum((1, 2)) - k
        return 1 - equal / (k * (k - 1))

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics by name, float64; 0 if there were no sources."""
        with_links, every = (max(1, number) for number in self.num_sources.tolist())
        found, covering = {}, 0
        for number, (name, (kind, k)) in enumerate(self.names.items()):
            if kind == "coverage":
                found[name] = self.shown[covering].double().mean()
                covering += 1
            elif kind == "popularity":
                found[name] = self.sums[number].double() / (k or 1) / every
            else:
                found[name] = self.sums[number].double() / (1 << UNIT) / (every if kind == "diversity" else with_links)
        return found
