"""Metrics of ranked links equal those of torch_geometric, OGB and loops in plain Python, however links are divided."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import metrics as pyg

from hoploom import ConfigError, DataError
from hoploom.ranking import rank_metrics as ranking
from hoploom.ranking.rank_metrics import ListMetrics, RankMetrics, doubled_ranks

NAMES = ["mrr", "hits@1", "hits@3", "hits@10", "mean_rank"]


def scored(rows: int, candidates: int, seed: int = 0) -> Tensor:
    """Scores with many ties."""
    return torch.randint(40, (rows, 1 + candidates), generator=torch.Generator().manual_seed(seed)).float()


def ranks_of(scores: Tensor) -> list[float]:
    """The mean of the optimistic and the pessimistic rank, as OGB has it."""
    found = []
    for true, *others in scores.tolist():
        optimistic, pessimistic = sum(other > true for other in others), sum(other >= true for other in others)
        found.append(1 + (optimistic + pessimistic) / 2)
    return found


def computed(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.compute().items()}


def test_each_relation_has_the_metrics_of_its_own_links_however_they_are_divided() -> None:
    scores, relations = scored(300, 30), torch.arange(300) % 7
    relations[relations == 3] = 5  # relation 3 has no links
    targets = torch.zeros(300, 31).long()
    targets[:, 0] = 1 + relations
    whole, *parts = (RankMetrics(["hits@3", "mean_rank", "ranks"], 7) for _ in range(3))
    whole.update(scores, targets)
    for part, own in zip(parts, torch.arange(300).tensor_split([111]), strict=True):
        part.update(scores[own], targets[own])
    found = {name: value for name, value in computed(whole).items() if name.startswith("relations/")}
    assert found.keys() == {
        f"relations/{r}/{n}" for r in {*range(7)} - {3} for n in ("links", "mrr", "hits@3", "mean_rank")
    }
    for relation in {*range(7)} - {3}:
        ranks = ranks_of(scores[relations == relation])
        assert found[f"relations/{relation}/links"] == len(ranks)
        assert found[f"relations/{relation}/mean_rank"] == sum(ranks) / len(ranks)
        assert found[f"relations/{relation}/hits@3"] == sum(rank <= 3 for rank in ranks) / len(ranks)
        mrr = sum(1 / rank for rank in ranks) / len(ranks)
        assert found[f"relations/{relation}/mrr"] == pytest.approx(mrr, abs=2e-8)
    parts[0].of_relations += parts[1].of_relations
    assert torch.equal(parts[0].of_relations, whole.of_relations)


def test_ranks_are_those_of_a_loop_and_ties_share_the_mean() -> None:
    scores = scored(200, 30)
    assert (doubled_ranks(scores) / 2).tolist() == ranks_of(scores)
    assert doubled_ranks(torch.ones(1, 5)).tolist() == [2 * 3]  # ranks 1 to 5
    assert doubled_ranks(torch.tensor([[1.0, -torch.inf, 2.0]])).tolist() == [4]
    assert doubled_ranks(torch.ones(2, 1)).tolist() == [2, 2]  # no candidates


def test_ranks_are_compared_a_block_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scored(50, 30)
    whole = doubled_ranks(scores)
    for at_once in (1, 31, 100):
        monkeypatch.setattr(ranking, "AT_ONCE", at_once)
        assert torch.equal(doubled_ranks(scores), whole)


def test_rank_metrics_are_means_over_all_links() -> None:
    scores, metrics = scored(300, 60), RankMetrics(NAMES)
    metrics.update(scores)
    ranks = ranks_of(scores)
    found = computed(metrics)
    assert math.isclose(found["mrr"], sum(1 / rank for rank in ranks) / 300, rel_tol=1e-12)
    assert math.isclose(found["mean_rank"], sum(ranks) / 300, rel_tol=1e-12)
    for k in (1, 3, 10):
        assert math.isclose(found[f"hits@{k}"], sum(rank <= k for rank in ranks) / 300, rel_tol=1e-12)


def test_great_ranks_are_summed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "SMALL", 32)
    scores, metrics = scored(300, 60), RankMetrics(["mrr", "mean_rank", "hits@10"])
    metrics.update(scores)
    ranks = ranks_of(scores)
    assert 2 * max(ranks) > 32
    found = computed(metrics)
    assert math.isclose(found["mrr"], sum(1 / rank for rank in ranks) / 300, rel_tol=1e-9)
    assert math.isclose(found["mean_rank"], sum(ranks) / 300, rel_tol=1e-12)
    assert sum(number for _, number in metrics.histogram()) == 300


def test_any_division_and_order_gives_the_same_bits() -> None:
    scores = scored(500, 40)
    whole = RankMetrics(NAMES)
    whole.update(scores)
    rng = random.Random(1)
    for _ in range(5):
        order = torch.tensor(rng.sample(range(500), 500))
        pieces = torch.split(scores[order], rng.choice([1, 7, 130]))
        divided = RankMetrics(NAMES)
        for piece in pieces:
            divided.update(piece)
        assert computed(divided) == computed(whole)


def test_the_histogram_counts_every_link_once() -> None:
    metrics = RankMetrics(["mrr", "ranks"])
    for rank, number in ((1, 5), (2, 1), (3, 2), (4, 3), (5, 1), (9, 2)):
        row = torch.arange(20, 0, -1).float().roll(0)
        scores = torch.cat([torch.tensor([20.5 - rank + 0.0]), row[row != 21 - rank]])
        metrics.update(scores.repeat(number, 1))
    assert [(least, number) for least, number in metrics.histogram() if number] == [
        (1, 5),
        (2, 1),
        (3, 5),
        (5, 1),
        (9, 2),
    ]
    found = computed(metrics)
    del found["mrr"]
    assert found == {"ranks/1": 5, "ranks/2": 1, "ranks/3": 5, "ranks/5": 1, "ranks/9": 2}


def test_ogb_computes_the_same() -> None:
    evaluator = pytest.importorskip("ogb.linkproppred").Evaluator(name="ogbl-wikikg2")
    scores = scored(400, 50)
    judged = evaluator.eval({"y_pred_pos": scores[:, 0], "y_pred_neg": scores[:, 1:]})
    metrics = RankMetrics(["mrr", "hits@1", "hits@3", "hits@10"])
    metrics.update(scores)
    for name, value in computed(metrics).items():
        assert math.isclose(value, float(judged[f"{name}_list"].double().mean()), abs_tol=1e-6)


# --- lists ------------------------------------------------------------------------------------

K = (1, 3, 7)
KINDS: dict[str, Any] = {
    "precision": pyg.LinkPredPrecision,
    "recall": pyg.LinkPredRecall,
    "f1": pyg.LinkPredF1,
    "map": pyg.LinkPredMAP,
    "ndcg": pyg.LinkPredNDCG,
    "mrr": pyg.LinkPredMRR,
    "hit_ratio": pyg.LinkPredHitRatio,
}
SOURCES, DESTINATIONS = 60, 25


def lists() -> tuple[Tensor, Tensor]:
    """The 7 best of each source, and its true links: none, one, or more than 7."""
    generator = torch.Generator().manual_seed(5)
    best = torch.stack([torch.randperm(DESTINATIONS, generator=generator)[:7] for _ in range(SOURCES)])
    links = [
        (s, d) for s in range(SOURCES) for d in torch.randperm(DESTINATIONS, generator=generator)[: s % 11].tolist()
    ]
    return best, torch.tensor(links).t()


def test_list_metrics_are_those_of_torch_geometric() -> None:
    best, links = lists()
    category, popularity = torch.arange(DESTINATIONS) % 4, torch.arange(DESTINATIONS) ** 2
    names = [f"{kind}@{k}" for kind in KINDS for k in K] + ["coverage@3", "diversity@7", "popularity@3"]
    metrics = ListMetrics(names, DESTINATIONS, category=category, popularity=popularity)
    metrics.update(best, links)
    theirs = {f"{kind}@{k}": made(k) for kind, made in KINDS.items() for k in K}
    theirs["coverage@3"] = pyg.LinkPredCoverage(3, DESTINATIONS)
    theirs["diversity@7"] = pyg.LinkPredDiversity(7, category)
    theirs["popularity@3"] = pyg.LinkPredAveragePopularity(3, popularity)
    for name, value in computed(metrics).items():
        theirs[name].update(best, links)
        assert math.isclose(value, float(theirs[name].compute()), rel_tol=1e-6, abs_tol=1e-6), name


def test_lists_in_any_division_give_the_same_bits() -> None:
    best, links = lists()
    names = ["ndcg@7", "map@7", "recall@3", "coverage@1"]
    whole, divided = ListMetrics(names, DESTINATIONS), ListMetrics(names, DESTINATIONS)
    whole.update(best, links)
    for first in reversed(range(0, SOURCES, 7)):
        own = (links[0] >= first) & (links[0] < first + 7)
        divided.update(best[first : first + 7], links[:, own] - torch.tensor([[first], [0]]))
    assert computed(divided) == computed(whole)


def test_missing_places_of_a_list_are_no_hits() -> None:
    metrics = ListMetrics(
        ["recall@3", "mrr@3", "coverage@3", "diversity@3"], 5, category=torch.zeros(5, dtype=torch.int64)
    )
    metrics.update(torch.tensor([[4, -1, -1]]), torch.tensor([[0, 0], [4, 2]]))
    assert computed(metrics) == {"recall@3": 0.5, "mrr@3": 1.0, "coverage@3": 0.2, "diversity@3": 1.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankMetrics(["mmr"]), r"metric 'mmr' is unknown; choose from \['mrr', 'hits', 'mean_rank', 'ranks'\]"),
        (lambda: RankMetrics(["hits"]), "metric 'hits' cannot be; give 'mrr', 'mean_rank', or hits, such as 'hits@10'"),
        (lambda: RankMetrics(["mrr@10"]), "metric 'mrr@10' cannot be"),
        (lambda: RankMetrics(["hits@0"]), "metric 'hits@0' is unknown"),
        (lambda: RankMetrics(["mrr"]).update(torch.ones(4)), "mrr need candidates for every true link"),
        (lambda: ListMetrics([], 9), r"names are \[\]; give a list, such as"),
        (lambda: ListMetrics(["map"], 9), "metric 'map' needs a k of at most 9, such as 'map@10'"),
        (lambda: ListMetrics(["map@10"], 9), "metric 'map@10' needs a k of at most 9"),
        (
            lambda: ListMetrics(["diversity@3"], 9),
            "metric 'diversity@3' needs category=, an integer for each of 9 nodes",
        ),
        (
            lambda: ListMetrics(["popularity@3"], 9, popularity=torch.ones(9)),
            "metric 'popularity@3' needs popularity=, an integer for each of 9 nodes",
        ),
        (
            lambda: ListMetrics(["map@3"], 9).update(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 0)),
            r"the best are of shape \[2, 2\]; give \[sources, k\], with a k of 3 at least",
        ),
    ],
)
def test_metrics_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("best", "links", "message"),
    [
        ([[9]], [[0], [1]], r"best hold 9 to 9, out of range \[-1, 9\)"),
        ([[1]], [[1], [1]], r"rows of links hold 1 to 1, out of range \[0, 1\)"),
        ([[1]], [[0], [-1]], r"destinations of links hold -1 to -1, out of range \[0, 9\)"),
        ([[1.0]], [[0], [1]], "best have dtype torch.float32; give integers"),
    ],
)
def test_ids_of_lists_are_checked(best: Any, links: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ListMetrics(["recall@1"], 9).update(torch.tensor(best), torch.tensor(links))


def test_a_score_that_is_no_number_is_refused_as_it_would_look_best() -> None:
    for place in (0, 2):
        scores = torch.ones(3, 4)
        scores[1, place] = torch.nan
        with pytest.raises(DataError, match="the score of a link is nan; look at the model that made it"):
            RankMetrics(["mrr"]).update(scores)
