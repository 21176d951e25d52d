"""Features of links, which a decoder sees beside the rows of the two ends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batch_servers import without_graph
from support.graphs import random_graph
from support.shards import spread
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, HoploomError, LinkNeighborLoader, Store
from hoploom.nn import MLP, Decoder, Dot
from hoploom.ranking.losses import in_batch
from hoploom.ranks.context import init
from hoploom.train.batch_adapter import adapted
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training

N, LINKS = 20, 90
LABELS: dict[str, Any] = {"metrics": ["auroc"], "features": "f"}
RANKS: dict[str, Any] = {"loss": "softmax", "metrics": ["mrr"], "features": "f"}
PLACES: dict[str, Callable[[Store], Store]] = {
    "one": lambda store: store,
    "parts": lambda store: spread(store, 3, {0}),
    "servers": lambda store: without_graph(store)[0],
}


class Rows(nn.Module):
    """A row for each node."""

    def __init__(self, decoder: Decoder | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(N, 4)
        self.decoder = decoder or MLP(4, 8, edge_channels=2)

    def forward(self, batch: Any) -> Tensor:
        found: Tensor = self.rows(batch.n_id)
        return found


class TakesLinks(Rows):
    def forward(self, n_id: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
        z = self.rows(n_id)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(-1)


def score(model: Rows, source: Tensor, features: Tensor, destination: Tensor) -> Tensor:
    """The layers of the decoder over three joined rows: those of one pair and its link."""
    layers: Any = model.decoder.layers
    found: Tensor = layers(torch.cat([model.rows.weight[source], features, model.rows.weight[destination]]))[0]
    return found


def graph() -> tuple[Store, Tensor, Tensor]:
    """A graph whose edges are in no order and have a field `f`; the edges, and their rows of two numbers."""
    edges = torch.randperm(N * N, generator=torch.Generator().manual_seed(4))[:LINKS]
    edges, rows = (
        torch.stack([edges // N, edges % N]),
        torch.randn(LINKS, 2, generator=torch.Generator().manual_seed(5)),
    )
    return hoploom.from_tensors({"x": torch.ones(N, 1)}, {"edge_index": edges, "f": rows.double()}), edges, rows


def loader(store: Store | None = None, **options: Any) -> LinkNeighborLoader:
    given = {"edge_label_index": None, "batch_size": 12, "shuffle": True, "seed": 2, **options}
    return LinkNeighborLoader(store or graph()[0], [3], **given)


def learner_of(task: LinkPrediction, batches: LinkNeighborLoader, model: nn.Module | None = None) -> Learner:
    model = model or Rows()
    return Learner(model, torch.optim.Adam(model.parameters(), lr=0.05), task, batches)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "options",
    [
        {"neg_sampling": NegativeSampling("binary", 2)},
        {"neg_sampling": NegativeSampling("triplet", 3)},
        {"neg_sampling": NegativeSampling("triplet", 3), "candidates": "joint"},
        {"candidates": "all", "neg_sampling": "triplet"},
        {"candidates": torch.arange(LINKS * 4).view(LINKS, 4) % (N + 1) - 1},  # -1 is no candidate
        {},  # the other destinations of the batch
    ],
    ids=["binary", "triplet", "joint", "all", "listed", "in batch"],
)
def test_pairs_are_scored_with_the_features_of_the_true_link(options: dict[str, Any], place: str) -> None:
    store, edges, rows = graph()
    model, batches = Rows(), loader(PLACES[place](store), **options)
    of_edge = {tuple(edge): row for edge, row in zip(edges.t().tolist(), rows, strict=True)}
    is_binary = "candidates" not in options and str(getattr(options.get("neg_sampling"), "mode", "")).endswith("binary")
    with init(device="cpu") as context:
        judge = LinkPrediction(**LABELS if is_binary else RANKS).bound(batches, context)
    for batch in batches:
        found = judge.outputs(adapted(model), batch)
        if is_binary or not options:
            sources, destinations = batch.n_id[batch.edge_label_index]
            count = batch.input_id.numel()
        else:
            sources, destinations = batch.n_id[batch.src_index], batch.n_id[batch.dst_pos_index]
            count = sources.numel()
        own = [of_edge[int(u), int(v)] for u, v in zip(sources[:count], destinations, strict=False)]
        if is_binary:  # after the true links, a negative for each, and then another one
            pairs = zip(sources, own * 3, destinations, strict=True)
            torch.testing.assert_close(found, torch.stack([score(model, u, f, v) for u, f, v in pairs]))
            continue
        if options:
            others = torch.cat([batch.dst_pos_index[:, None], batch.dst_neg_index.view(count, -1)], dim=1)
            is_there, others = others >= 0, batch.n_id[others.clamp(min=0)]
            is_there[:, 1:] &= others[:, 1:] != others[:, :1]
        else:
            is_there, others = torch.ones(count, count, dtype=torch.bool), destinations.expand(count, count)
        wanted = torch.stack(
            [torch.stack([score(model, u, f, v) for v in row]) for u, f, row in zip(sources, own, others, strict=True)]
        ).masked_fill(~is_there, -torch.inf)
        torch.testing.assert_close(found, wanted if options else in_batch(wanted, sources, destinations))


def test_binary_negatives_come_in_rounds_over_the_links_for_which_they_are_drawn() -> None:
    """A negative has the time of its link, which no other link has."""
    graph = random_graph(N, LINKS, seed=1)
    graph.time = torch.zeros(N, dtype=torch.int64)
    times: Any = {"edge_label_time": torch.arange(LINKS), "time_attr": "time"}
    for batch in loader(hoploom.from_pyg(graph, time_attr="time"), neg_sampling=NegativeSampling("binary", 2), **times):
        assert torch.equal(batch.edge_label_time, batch.input_id.repeat(3))


def test_training_and_evaluation_look_features_up_for_their_own_links() -> None:
    """The losses of plain torch, of one step that learns nothing; links of validation are no edges of the graph."""
    store, edges, rows = graph()
    given = torch.randint(N, (2, 7), generator=torch.Generator().manual_seed(6))
    held_out, own = loader(store, edge_label_index=given, neg_sampling="binary", batch_size=7), torch.randn(7, 2)
    model = Rows()
    task, batches = LinkPrediction(**LABELS), loader(store, neg_sampling="binary", batch_size=LINKS)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), task, batches)

    def by_hand(batch: Any, of: Tensor) -> float:
        links = zip(*batch.n_id[batch.edge_label_index], of[batch.input_id].repeat(2, 1), strict=True)
        scores = torch.stack([score(model, u, f, v) for u, v, f in links])
        return functional.binary_cross_entropy_with_logits(scores, batch.edge_label).item()

    with init(device="cpu") as context:

        def validate() -> dict[str, float]:
            return evaluate(learner.model, held_out, replace(learner.task, features=own), context)

        (epoch,) = fit(learner, Training(1, progress=False), context, validate=validate).history
        again = evaluate(model, batches, learner.task, context)["loss"]
    held_out.set_epoch(0)
    batches.set_epoch(0)
    assert torch.equal(batches.maker.ends, edges)
    torch.testing.assert_close(epoch["val_loss"], by_hand(next(iter(held_out)), own), rtol=1e-5, atol=0)
    expected = by_hand(next(iter(batches)), rows)
    torch.testing.assert_close([epoch["train_loss"], again], [expected, expected], rtol=1e-5, atol=0)


class Oracle(Decoder):
    """A decoder that knows how the graph was planted: features are the class of the destination, as its row is."""

    edge_channels = 4

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return (sources[..., 4:] * destinations).sum(-1)


class Classes(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("neg_sampling", ["triplet", "binary"])
def test_a_model_with_features_finds_links_that_only_their_features_tell(neg_sampling: str) -> None:
    """Ends are random; an edge has the class of its destination as its feature, and negatives are of any class."""
    generator = torch.Generator().manual_seed(3)
    x = functional.one_hot(torch.arange(200) % 4).float()
    edges = torch.randint(200, (2, 4000), generator=generator)
    store = hoploom.from_tensors({"x": x}, {"edge_index": edges, "f": x[edges[1]]})
    options: Any = {"edge_label_index": None, "neg_sampling": neg_sampling, "exclude": "none", "batch_size": 500}
    if neg_sampling == "triplet":
        options["neg_sampling"], given = NegativeSampling("triplet", 5), {"loss": "bpr", "metrics": ["mrr"]}
    else:
        given = {"metrics": ["auroc"]}
    found = {}
    with init(device="cpu") as context:
        for name, decoder in {"known": Oracle(), "f": MLP(4, 16, edge_channels=4), None: MLP(4, 16)}.items():
            torch.manual_seed(1)
            model = Classes(decoder)
            task = LinkPrediction(**given, features="f" if name else None)
            batches = LinkNeighborLoader(store, [1], **options, shuffle=True, seed=7)
            if name != "known":
                optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
                fit(Learner(model, optimizer, task, batches), Training(8, progress=False), context)
            judged = LinkNeighborLoader(store, [1], **options, seed=8)
            found[name] = evaluate(model, judged, task, context)[given["metrics"][0]]
    assert found["f"] == pytest.approx(found["known"], rel=0.02)
    assert found["f"] > found[None] + 0.2


NAN = torch.zeros(LINKS, 2).index_fill_(0, torch.tensor([3]), torch.nan)


@pytest.mark.parametrize(
    ("features", "decoder", "options", "message"),
    [
        ("f", Dot(), {}, "the decoder Dot has edge_channels=0, and a link has 2 features"),
        ("f", MLP(4, 8), {}, "the decoder MLP has edge_channels=0, and a link has 2 features"),
        (None, MLP(4, 8, edge_channels=2), {}, "MLP has edge_channels=2, and a link has 0 features; take MLP"),
        ("f", MLP(4, 8, edge_channels=3), {}, "has edge_channels=3, and a link has 2 features"),
        ("g", None, {}, r"features is 'g', and edges of .* have \['f'\]; name one, or give a tensor"),
        (torch.ones(3, 2), None, {}, r"features has shape \[3, 2\] for 90 links; give one row for each"),
        (torch.tensor(1.0), None, {}, r"features has shape \[\] for 90 links"),
        (NAN, None, {}, r"link \[.*\] has features \[nan, nan\]; give finite numbers$"),
        ("f", None, {"edge_label_index": torch.tensor([[0], [0]])}, r"link \[0, 0\] is no edge of .* give features"),
        ("f", None, {"neg_sampling": NegativeSampling("binary", 0.5)}, r"neg_sampling has 0.5 .* give a whole number"),
        (torch.ones(LINKS, 2), None, {"input_id": torch.arange(LINKS)}, "features is by link of edge_label_index"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error_before_the_first_step(
    features: Any, decoder: Decoder | None, options: dict[str, Any], message: str
) -> None:
    assert [0, 0] not in graph()[1].t().tolist()
    if "input_id" in options:
        options["edge_label_index"] = graph()[1]
    task, batches = LinkPrediction(metrics=["auroc"], features=features), loader(**{"neg_sampling": "binary"} | options)
    learner = learner_of(task, batches, Rows(decoder))
    with init(device="cpu") as context:
        with pytest.raises(HoploomError, match=message):
            fit(learner, Training(1, progress=False), context)
        with pytest.raises(HoploomError, match=message):
            evaluate(learner.model, batches, task, context)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("given", [[[1.0] * 3] * LINKS, torch.ones(LINKS).numpy(), 3], ids=["list", "array", "int"])
@pytest.mark.parametrize("name", ["features", "weight"])
def test_values_of_links_that_are_no_tensor_are_refused_when_the_task_is_made(name: str, given: Any) -> None:
    wanted = f"^{name} is a {type(given).__name__}; give a field of edges or a tensor, a row for each link$"
    with pytest.raises(ConfigError, match=wanted):
        LinkPrediction(**{name: given})


def test_features_reach_a_decoder_only() -> None:
    batches, model = loader(neg_sampling="binary"), Rows()
    with init(device="cpu") as context:
        learner = learner_of(LinkPrediction(**LABELS), batches, TakesLinks())
        with pytest.raises(ConfigError, match="does not get them here; let a decoder score the links"):
            fit(learner, Training(1, progress=False), context)
    with pytest.raises(ConfigError, match=r"does not get them here; use task.bound\(loader, context\)"):
        LinkPrediction(**LABELS).outputs(adapted(model), next(iter(batches)))
    with pytest.raises(ConfigError, match="edge_channels=2, and rows of nodes have no features of links; give one"):
        hoploom.best(model.rows.weight.detach(), graph()[0], k=2, decoder=model.decoder)
