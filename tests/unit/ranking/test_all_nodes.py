"""Ranks among all nodes: those of a loop in plain Python and of OGB, whatever the blocks and the number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hoploom
from hoploom import ConfigError, DataError
from hoploom.nn import MLP, ComplEx, Decoder, DistMult, RotatE, TransE
from hoploom.ranking import rank_links
from hoploom.ranks.context import Context

NODES, RELATIONS, D = 61, 5, 8
ONE = {"relations": torch.tensor([0])}
DECODERS: dict[str, Callable[[], Decoder | None]] = {
    "dot": lambda: None,
    "mlp": lambda: MLP(D, 4),
    "distmult": lambda: DistMult(D, RELATIONS),
    "complex": lambda: ComplEx(D, RELATIONS),
    "transe": lambda: TransE(D, RELATIONS),
    "rotate": lambda: RotatE(D, RELATIONS),
}


def graph(count: int = 150, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, half of which occur twice; links, some of them twice; relations."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NODES, D, generator=generator)
    rows[1::4] = rows[0:-1:4]
    ends = torch.randint(NODES, (2, count), generator=generator)
    ends[0, ::3] = 7  # a source with many links
    return rows, ends, torch.randint(RELATIONS, (count,), generator=generator)


def by_loop(
    decoder: Decoder | None, rows: Tensor, ends: Tensor, relations: Tensor, known: set[tuple[int, int, int]] | None
) -> list[float]:
    """The mean of the optimistic and the pessimistic rank of each link, one pair after the other."""
    table, found = rows.double(), []
    for source, destination, relation in zip(*ends.tolist(), relations.tolist(), strict=True):
        if decoder is None:
            scores = (table[source] * table).sum(-1).tolist()
        else:
            number = torch.full((NODES,), relation)
            scores = decoder(table[source].expand(NODES, D), table, number).tolist()
        others = [
            score
            for node, score in enumerate(scores)
            if node != destination and (known is None or (source, node, relation) not in known)
        ]
        true = scores[destination]
        before, level = sum(o > true + 1e-9 for o in others), sum(abs(o - true) <= 1e-9 for o in others)
        found.append(1 + before + level / 2)
    return found


@pytest.mark.parametrize("blocks", [(1024, 16384), (5, 13), (1, 1)])
@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_ranks_are_those_of_a_loop(
    make: Callable[[], Decoder | None], is_filtered: bool, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("hoploom.ranking.highest.DESTINATIONS", blocks[1])
    monkeypatch.setattr("hoploom.ranking.all_nodes.SOURCES", blocks[0])
    decoder, (rows, ends, relations) = make(), graph()
    further, numbers = graph(400, seed=3)[1:]
    known = set(zip(*further.tolist(), numbers.tolist(), strict=True)) | set(
        zip(*ends.tolist(), relations.tolist(), strict=True)
    )
    found = rank_links(
        rows, ends, decoder=decoder, relations=relations, known=(further, numbers) if is_filtered else None
    )
    double = None if decoder is None else decoder.double()
    assert (found.doubled / 2).tolist() == by_loop(double, rows, ends, relations, known if is_filtered else None)


def test_without_relations_all_links_of_a_source_are_known() -> None:
    rows, ends, _ = graph()
    none = torch.zeros_like(ends[0])
    known = {(source, destination, 0) for source, destination in ends.t().tolist()}
    assert (rank_links(rows, ends, known=ends[:, :0]).doubled / 2).tolist() == by_loop(None, rows, ends, none, known)


def test_rows_may_be_of_two_node_types() -> None:
    rows, ends, relations = graph()
    ends[0] %= 20
    typed = {"user": rows[:20].half(), "item": rows.half().numpy()}
    found = rank_links(typed, (("user", "rates", "item"), ends))  # type: ignore[arg-type]
    assert (found.doubled / 2).tolist() == by_loop(None, rows.half(), ends, relations, None)


def test_metrics_are_those_of_ogb_overall_and_by_relation() -> None:
    evaluator = pytest.importorskip("ogb.linkproppred").Evaluator("ogbl-wikikg2")
    torch.manual_seed(1)
    decoder, (rows, ends, relations) = DistMult(D, RELATIONS), graph()
    found = rank_links(rows, ends, decoder=decoder, relations=relations)

    decoder.double()

    def of_ogb(which: Tensor) -> dict[str, float]:
        scores = decoder.against(rows[ends[0, which]].double(), rows.double(), relations[which]).detach()
        is_true = torch.zeros_like(scores).scatter_(1, ends[1, which, None], 1).bool()
        level = (scores * 1e9).round()  # of equal rows, the same
        others = level[~is_true].view(len(level), -1)
        result = evaluator.eval({"y_pred_pos": level[is_true], "y_pred_neg": others})
        return {"mrr": float(result["mrr_list"].double().mean()), "hits@10": float(result["hits@10_list"].mean())}

    assert found.metrics() == pytest.approx(of_ogb(torch.arange(len(relations))), abs=1e-6)
    by_relation = found.by_relation()
    assert sorted(by_relation) == list(range(RELATIONS))
    assert [entry["mrr"] for entry in by_relation.values()] == sorted(entry["mrr"] for entry in by_relation.values())
    for number, metrics in by_relation.items():
        which = (relations == number).nonzero()[:, 0]
        assert metrics == pytest.approx({"links": len(which), **of_ogb(which)}, abs=1e-6)


def test_a_link_ranks_alike_alone_and_among_others() -> None:
    torch.manual_seed(1)
    decoder, (rows, ends, relations) = ComplEx(D, RELATIONS), graph()
    whole = rank_links(rows, ends, decoder=decoder, relations=relations, known=(ends, relations)).doubled
    alone = [
        rank_links(rows, ends[:, [i]], decoder=decoder, relations=relations[[i]], known=(ends, relations)).doubled
        for i in range(ends.shape[1])
    ]
    assert torch.equal(torch.cat(alone), whole)


def test_equal_rows_have_equal_ranks_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of tenths differ in their last bits from one block to the next."""
    rows = torch.full((1000, 33), 0.1)
    for size in (16384, 7, 1):
        monkeypatch.setattr("hoploom.ranking.highest.DESTINATIONS", size)
        assert rank_links(rows, torch.tensor([[0], [500]])).doubled.tolist() == [1001]  # the mean of 1 to 1000
    assert rank_links(1e-9 * rows, torch.tensor([[0], [500]])).doubled.tolist() == [1001]


def test_no_links_and_nothing_known() -> None:
    rows, ends, relations = graph()
    assert rank_links(rows, ends[:, :0], known=ends).doubled.tolist() == []
    assert rank_links(rows, ends[:, :0], relations=relations[:0]).by_relation() == {}


def rank_on(context: Context | None, folder: Path) -> None:
    """Write what a rank has found of all links."""
    rows, ends, relations = graph()
    torch.manual_seed(1)
    decoder = RotatE(D, RELATIONS)
    found = rank_links(rows, ends, decoder=decoder, relations=relations, known=(ends, relations), context=context)
    name = "alone" if context is None else context.rank
    (folder / f"{name}.txt").write_text(repr((found.doubled.tolist(), found.metrics(), found.by_relation())))


def test_two_ranks_find_what_one_process_does(tmp_path: Path) -> None:
    rank_on(None, tmp_path)
    hoploom.spawn(rank_on, 2, [tmp_path], device="cpu")
    alone = (tmp_path / "alone.txt").read_text()
    assert "nan" not in alone
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == [alone] * 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"links": torch.zeros(3, 2)}, ConfigError, r"links have shape \[3, 2\]; give \[2, n\]"),
        ({"links": torch.tensor([[0], [NODES]]), **ONE}, ConfigError, "destinations of links holds id 61"),
        ({"links": torch.tensor([[0.5], [1.0]]), **ONE}, ConfigError, "give a list of integer ids"),
        ({"relations": torch.tensor([0])}, ConfigError, "there are 1 relations of 150 links; give one each"),
        ({"relations": None}, ConfigError, "DistMult has 5 relations; give the number of each link's"),
        ({"relations": torch.full((150,), 5)}, ConfigError, r"relations holds id 5, out of range \[0, 5\)"),
        ({"known": torch.zeros(2, 1).long()}, ConfigError, "known and links need relations both"),
        ({"known": (torch.zeros(2, 1).long(), torch.zeros(2).long())}, ConfigError, "2 relations of 1 known"),
        ({"rows": torch.zeros(NODES)}, ConfigError, "give floats"),
        ({"rows": {"a": torch.zeros(2, 3)}}, ConfigError, "there are no rows of 'node'"),
        ({"rows": torch.full((NODES, D), torch.nan)}, DataError, "rows of 'node' have values that are not finite"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error(change: dict[str, Any], error: type[Exception], message: str) -> None:
    rows, ends, relations = graph()
    given = {"rows": rows, "links": ends, "relations": relations, "decoder": DistMult(D, RELATIONS)} | change
    with pytest.raises(error, match=message):
        rank_links(given.pop("rows"), given.pop("links"), **given)


def test_a_decoder_that_is_not_finite_is_refused() -> None:
    rows, ends, _ = graph()
    decoder = MLP(D, 4)
    torch.nn.init.constant_(decoder.layers[0].weight, torch.inf)
    with pytest.raises(DataError, match="the decoder has values that are not finite"):
        rank_links(rows, ends, decoder=decoder)
    assert hoploom.rank_links is rank_links


class LogDot(Decoder):
    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return (sources * destinations).sum(-1).log()


class Minus(DistMult):
    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return -super().forward(sources, destinations, relations)


@pytest.mark.parametrize("known", [None, torch.zeros(2, 0).long()])
def test_a_score_that_is_nan_is_no_rank(known: Tensor | None) -> None:
    rows, ends, _ = graph()
    with pytest.raises(DataError, match="the score of a link is nan"):
        rank_links(rows, ends, decoder=LogDot(), known=known)
    store = hoploom.from_tensors({"x": rows}, ends)
    with pytest.raises(DataError, match="the score of a link is nan"):
        hoploom.best(rows, store, k=3, decoder=LogDot())


def test_a_score_of_minus_infinity_is_the_last() -> None:
    rows = torch.tensor([[1.0], [0.0], [2.0], [0.0]])
    ends = torch.tensor([[0, 0, 0], [0, 1, 2]])
    assert rank_links(rows, ends, decoder=LogDot()).doubled.tolist() == [4, 7, 2]
    assert rank_links(rows, ends, decoder=LogDot(), known=ends[:, :0]).doubled.tolist() == [2, 3, 2]


def test_a_forward_of_an_own_class_is_not_passed_by() -> None:
    torch.manual_seed(1)
    rows, ends, _ = graph()
    decoder, zero = Minus(D), torch.zeros_like(ends[0])
    found = rank_links(rows, ends, decoder=decoder)
    store = hoploom.from_tensors({"x": rows}, ends)
    best = hoploom.best(rows, store, k=3, decoder=decoder, exclude=None)
    torch.testing.assert_close(best.scores, decoder(rows[:, None], rows).topk(3).values)
    assert (found.doubled / 2).tolist() == by_loop(decoder.double(), rows, ends, zero, None)


def test_great_scores_of_another_source_change_no_rank() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1e14], [1.0, 0.0], [1.001, 0.0]])
    links = torch.tensor([[0, 1], [2, 2]])
    assert rank_links(rows, links).doubled.tolist()[:1] == rank_links(rows, links[:, :1]).doubled.tolist() == [5]
