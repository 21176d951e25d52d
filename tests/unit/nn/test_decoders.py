"""Decoders are their formulas, one link at a time; and they learn with LinkPrediction."""

import cmath
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.kge import ComplEx as PygComplEx
from torch_geometric.nn.kge import DistMult as PygDistMult
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, LinkNeighborLoader
from hoploom.nn import MLP, Bilinear, ComplEx, Cosine, Decoder, DistMult, Dot, RotatE, TransE
from hoploom.nn.decoders import OfRelations
from hoploom.train.batch_adapter import adapted
from hoploom.train.link_prediction import LinkPrediction

D, R = 6, 4


def by_hand(decoder: Any, source: list[float], destination: list[float], relation: int) -> float:
    """A score from lists of floats."""
    pairs = list(zip(source, destination, strict=True))
    dot = sum(u * v for u, v in pairs)
    if type(decoder) is Dot:
        return dot
    if isinstance(decoder, Cosine):
        return dot / (sum(u * u for u in source) * sum(v * v for v in destination)) ** 0.5
    row = decoder.relations.weight[relation].tolist()
    if isinstance(decoder, Bilinear):
        return sum(source[i] * row[i * D + j] * destination[j] for i in range(D) for j in range(D))
    if isinstance(decoder, DistMult):
        return sum(u * r * v for (u, v), r in zip(pairs, row, strict=True))
    if isinstance(decoder, TransE):
        return -(sum(abs(u + r - v) ** decoder.p for (u, v), r in zip(pairs, row, strict=True)) ** (1 / decoder.p))
    ends = [[complex(rows[i], rows[i + D // 2]) for i in range(D // 2)] for rows in (source, destination)]
    if isinstance(decoder, ComplEx):
        relation_row = [complex(row[i], row[i + D // 2]) for i in range(D // 2)]
        return sum((u * r * v.conjugate()).real for u, v, r in zip(*ends, relation_row, strict=True))
    assert isinstance(decoder, RotatE)
    return -sum(abs(u * cmath.exp(1j * r) - v) for u, v, r in zip(*ends, row, strict=True))


MAKERS: dict[str, Callable[[int], Decoder]] = {
    "dot": lambda relations: Dot(),
    "cosine": lambda relations: Cosine(),
    "bilinear": lambda relations: Bilinear(D, relations),
    "distmult": lambda relations: DistMult(D, relations),
    "complex": lambda relations: ComplEx(D, relations),
    "transe": lambda relations: TransE(D, relations),
    "transe 2": lambda relations: TransE(D, relations, p=2.0),
    "rotate": lambda relations: RotatE(D, relations),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_score_is_the_formula(make: Callable[[int], Decoder]) -> None:
    torch.manual_seed(0)
    decoder, sources, destinations, relations = make(R), torch.randn(5, D), torch.randn(5, D), torch.arange(5) % R
    found = decoder(sources, destinations, relations)
    expected = [
        by_hand(decoder, source, destination, relation)
        for source, destination, relation in zip(
            sources.tolist(), destinations.tolist(), relations.tolist(), strict=True
        )
    ]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("make", [*MAKERS.values(), lambda relations: MLP(D, 8)], ids=[*MAKERS, "mlp"])
def test_candidates_of_a_link_have_the_scores_of_pairs(make: Callable[[int], Decoder]) -> None:
    torch.manual_seed(0)
    decoder, sources, destinations, relations = make(R), torch.randn(5, D), torch.randn(5, 7, D), torch.arange(5) % R
    rows = decoder(sources[:, None], destinations, relations)
    assert rows.shape == (5, 7)
    for column in range(7):
        torch.testing.assert_close(rows[:, column], decoder(sources, destinations[:, column], relations))


def test_an_mlp_is_its_layers_over_joined_rows() -> None:
    torch.manual_seed(0)
    decoder, sources, destinations = MLP(D, 8), torch.randn(5, D), torch.randn(5, D)
    joined = decoder.layers(torch.cat([sources, destinations], dim=1))[:, 0]
    torch.testing.assert_close(decoder(sources, destinations), joined)
    features, decoder = torch.randn(5, 3), MLP(D, 8, edge_channels=3)
    joined = decoder.layers(torch.cat([sources, features, destinations], dim=1))[:, 0]
    rows = torch.cat([sources, features], dim=1)
    torch.testing.assert_close(decoder(rows, destinations), joined)
    torch.testing.assert_close(decoder.against(rows, destinations).diagonal(), joined)


@pytest.mark.parametrize("edge_channels", [-1, "3", 1.5])
def test_a_number_of_features_that_is_none_is_refused(edge_channels: Any) -> None:
    with pytest.raises(ConfigError, match=f"^edge_channels is {edge_channels!r}; give the number of features"):
        MLP(D, 8, edge_channels=edge_channels)


@pytest.mark.parametrize(("left", "right"), [(D, D), (D + 3, D + 1), (D + 4, D - 1)])
def test_rows_of_other_widths_are_one_error(left: int, right: int) -> None:
    wanted = f"of {left} and {right} columns.* takes {D + 3} and {D}; give MLP the width of a node's row"
    with pytest.raises(ConfigError, match=wanted):
        MLP(D, 8, edge_channels=3)(torch.ones(5, left), torch.ones(5, right))


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("make", [*MAKERS.values(), lambda relations: MLP(D, 8)], ids=[*MAKERS, "mlp"])
def test_all_pairs_have_the_scores_of_pairs(
    make: Callable[[int], Decoder], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("hoploom.nn.decoders.AT_ONCE", at_once)
    decoder, sources, destinations, relations = make(R), torch.randn(5, D), torch.randn(7, D), torch.arange(5) % R
    expected = decoder(sources[:, None], destinations, relations)
    torch.testing.assert_close(decoder.against(sources, destinations, relations), expected, rtol=1e-5, atol=1e-5)
    assert decoder.against(sources[:0], destinations, relations[:0]).shape == (0, 7)
    assert decoder.against(sources, destinations[:0], relations).shape == (5, 0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_one_relation_of_several_is_a_decoder(make: Callable[[int], Decoder]) -> None:
    torch.manual_seed(0)
    decoder, sources, destinations = make(R), torch.randn(5, D), torch.randn(5, D)
    if isinstance(decoder, OfRelations):
        expected = decoder(sources, destinations, torch.full((5,), 2))
        torch.testing.assert_close(decoder.only(2)(sources, destinations), expected)
        with pytest.raises(ConfigError, match=r"relations holds id 4, out of range \[0, 4\)"):
            decoder.only(R)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_one_relation_need_need_not_be_named(make: Callable[[int], Decoder]) -> None:
    torch.manual_seed(0)
    decoder, sources, destinations = make(1), torch.randn(5, D), torch.randn(5, D)
    zero = torch.zeros(5, dtype=torch.int64)
    torch.testing.assert_close(decoder(sources, destinations), decoder(sources, destinations, zero))


def test_distmult_and_complex_are_those_of_torch_geometric() -> None:
    torch.manual_seed(0)
    head, tail, relation = torch.arange(3), torch.arange(3) + 3, torch.tensor([1, 0, 2])
    theirs: Any = PygDistMult(6, 3, D)
    ours: Any = DistMult(D, 3)
    ours.relations.weight.data = theirs.rel_emb.weight.data
    rows = theirs.node_emb.weight
    torch.testing.assert_close(ours(rows[head], rows[tail], relation), theirs(head, relation, tail))
    theirs, ours = PygComplEx(6, 3, D // 2), ComplEx(D, 3)
    ours.relations.weight.data = torch.cat([theirs.rel_emb.weight.data, theirs.rel_emb_im.weight.data], dim=1)
    rows = torch.cat([theirs.node_emb.weight, theirs.node_emb_im.weight], dim=1)
    torch.testing.assert_close(ours(rows[head], rows[tail], relation), theirs(head, relation, tail))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(random_graph(60, 500, seed=1).x.shape[1], D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found: Tensor = self.conv(x, edge_index)
        return found


@pytest.mark.parametrize("negatives", [None, 3])
def test_the_decoder_of_a_model_scores_its_links_and_learns(negatives: int | None) -> None:
    torch.manual_seed(0)
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    neg_sampling = None if negatives is None else NegativeSampling("triplet", negatives)
    batch = next(iter(LinkNeighborLoader(store, [3], neg_sampling=neg_sampling, batch_size=20)))
    model, task = Encoder(), LinkPrediction(loss="bpr", metrics=["mrr"])
    model.decoder = Bilinear(D)
    rows = task.outputs(adapted(model), batch)
    z = model(batch.x, batch.edge_index)
    if negatives is None:
        ends = batch.edge_label_index
        torch.testing.assert_close(rows[:, 0], model.decoder(z[ends[0]], z[ends[1]]))
    else:
        others = torch.cat([batch.dst_pos_index[:, None], batch.dst_neg_index], dim=1)
        torch.testing.assert_close(rows, model.decoder(z[batch.src_index][:, None], z[others]))
    task.losses(rows, task.targets(batch)).mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_what_a_decoder_cannot_take_is_refused() -> None:
    rows = torch.randn(2, 5)
    with pytest.raises(ConfigError, match="DistMult has 3 relations; give the number of each link's"):
        DistMult(5, 3)(rows, rows)
    with pytest.raises(ConfigError, match="rows have 5 channels; complex numbers need an even number"):
        ComplEx(5)(rows, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [*MAKERS.values(), lambda relations: MLP(D, 8)], ids=[*MAKERS, "mlp"])
def test_half_types_have_nearly_the_scores_of_float32(make: Callable[[int], Decoder], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    decoder, sources, destinations, relations = make(R), torch.randn(5, D), torch.randn(5, D), torch.arange(5) % R
    sources[0] = 0.0
    expected = decoder.against(sources, destinations, relations)
    decoder, sources, destinations = decoder.to(dtype), sources.to(dtype), destinations.to(dtype)
    found = decoder(sources[:, None], destinations, relations).float()
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    found = decoder.against(sources, destinations, relations).float()
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("make", [*MAKERS.values(), lambda relations: MLP(D, 8)], ids=[*MAKERS, "mlp"])
def test_a_decoder_scores_rows_of_half_types_in_mixed_precision(make: Callable[[int], Decoder]) -> None:
    decoder, rows, relations = make(R), torch.randn(5, D).bfloat16(), torch.arange(5) % R
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder(rows, rows, relations).isfinite().all()
        decoder.against(rows, rows, relations).float().sum().backward() if [*decoder.parameters()] else None
    assert all(own.grad is not None and own.grad.isfinite().all() for own in decoder.parameters())
