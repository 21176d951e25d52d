"""Links against candidates: a loader's triplets, or all destinations of a batch; any loss and metric of ranks."""

import copy
import math
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from support.graphs import library, random_graph
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, HoploomError, LinkNeighborLoader, NeighborLoader
from hoploom.nn import ComplEx, Decoder, DistMult
from hoploom.ranking.losses import bpr_loss, softmax_loss
from hoploom.ranks.context import init
from hoploom.train.batch_adapter import adapted
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import NodeClassification, SeveralTasks

WRITES = ("author", "writes", "paper")
TRIPLETS = NegativeSampling("triplet", 3)


class Ids(nn.Module):
    """Rows that depend on the node alone."""

    def __init__(self, num_nodes: int = 60) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_nodes, 4)

    def forward(self, batch: Any) -> Tensor:
        found: Tensor = self.rows(batch.n_id)
        return found


class Distance(Decoder):
    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return -(sources - destinations).square().sum(-1)


class Scored(Ids):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Distance()


class TakesLinks(Ids):
    def forward(self, n_id: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
        z = self.rows(n_id)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(-1)


def loader(**options: Any) -> LinkNeighborLoader:
    given = {"edge_label_index": None, "batch_size": 40, "shuffle": True, "seed": 2, **options}
    return LinkNeighborLoader(random_graph(60, 500, seed=1), [3], **given)


def task(**options: Any) -> LinkPrediction:
    return LinkPrediction(**{"loss": "bpr", "metrics": ["mrr", "hits@2"], **options})


@pytest.mark.parametrize("kind", [Ids, Scored, TakesLinks])
def test_a_row_has_the_score_of_a_true_link_and_then_those_of_its_candidates(kind: type[Ids]) -> None:
    batch, model = next(iter(loader(neg_sampling=TRIPLETS))), kind()
    rows = task().outputs(adapted(model), batch)
    assert rows.shape == (40, 4)
    for row in range(40):
        for column in range(4):
            other = batch.dst_pos_index[row] if column == 0 else batch.dst_neg_index[row, column - 1]
            u, v = (model.rows.weight[batch.n_id[local]] for local in (batch.src_index[row], other))
            expected = -(u - v).square().sum() if kind is Scored else u @ v
            torch.testing.assert_close(rows[row, column], expected)
    assert task().targets(batch).tolist() == [[1, 0, 0, 0]] * 40
    assert "edge_label_index" not in batch


def test_triplets_of_two_node_types_are_rows_too() -> None:
    batch = next(iter(LinkNeighborLoader(library(), [2], (WRITES, None), neg_sampling=TRIPLETS, batch_size=5)))
    z = {"author": torch.randn(len(batch["author"].n_id), 3), "paper": torch.randn(len(batch["paper"].n_id), 3)}

    class Given(nn.Module):
        def forward(self, batch: Any) -> Any:
            return z

    rows = task().outputs(Given(), batch)
    sources = z["author"][batch["author"].src_index]
    others = torch.cat([batch["paper"].dst_pos_index[:, None], batch["paper"].dst_neg_index.view(5, -1)], dim=1)
    scores = (sources[:, None] * z["paper"][others]).sum(-1)
    scores[:, 1:][others[:, 1:] == others[:, :1]] = -torch.inf
    torch.testing.assert_close(rows, scores)


@pytest.mark.parametrize("is_typed", [False, True])
def test_each_link_and_its_candidates_have_the_scores_of_the_links_relation(is_typed: bool) -> None:
    torch.manual_seed(0)
    numbers, model = (torch.arange(12) % 3).to(torch.uint8), Ids(300)
    given = {"neg_sampling": TRIPLETS, "edge_label": numbers, "batch_size": 5, "shuffle": True}
    ends = torch.stack([torch.arange(12) % 5, torch.arange(12) % 7])
    if is_typed:
        batch = next(iter(LinkNeighborLoader(library(), [2], (WRITES, ends), **given)))
        storage, source, destination = batch[WRITES], batch["author"], batch["paper"]
    else:
        batch = next(iter(loader(edge_label_index=ends, **given)))
        storage = source = destination = batch
    assert torch.equal(storage.edge_label, numbers[storage.input_id])
    model.decoder = ComplEx(4, 3)
    z = [model.rows.weight[of.n_id] for of in (source, destination)]
    if is_typed:
        model.forward = lambda batch: dict(zip(("author", "paper"), z, strict=True))
    rows = task().outputs(model, batch)
    others = torch.cat([destination.dst_pos_index[:, None], destination.dst_neg_index], dim=1)
    for row, number in enumerate(storage.edge_label):
        u = z[0][source.src_index[row]].expand(4, 4)
        scores = model.decoder(u, z[1][others[row]], number.expand(4))
        scores[1:][others[row, 1:] == others[row, 0]] = -torch.inf
        torch.testing.assert_close(rows[row], scores)


def test_evaluation_has_the_metrics_of_each_relation_beside_those_of_all() -> None:
    """The loss and the metrics of all links are those without relations."""
    torch.manual_seed(0)
    model, numbers = Ids(300), torch.arange(500) % 4
    given: dict[str, Any] = {"neg_sampling": TRIPLETS, "edge_label": numbers, "batch_size": 30}
    names = ["mrr", "auroc", "average_precision"]
    with init(device="cpu") as context:
        plain, found = (
            evaluate(
                model, loader(**given), LinkPrediction(loss="softmax", metrics=names, num_relations=count), context
            )
            for count in (None, 4)
        )
        for wrong, message in (
            (None, "num_relations needs the number of each"),
            (numbers + 1, "edge_label holds id 4"),
        ):
            task = LinkPrediction(loss="softmax", metrics=names, num_relations=4)
            with pytest.raises(ConfigError, match=message):
                evaluate(model, loader(**given | {"edge_label": wrong}), task, context)
    assert {name: found[name] for name in plain} == plain
    links = [found[f"relations/{number}/links"] for number in range(4)]
    assert links == [125.0] * 4
    mean = sum(found[f"relations/{number}/mrr"] for number in range(4)) / 4
    assert mean == pytest.approx(found["mrr"], abs=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neg_sampling": TRIPLETS, "edge_label": torch.arange(500) % 4}, "relations holds id 3, out of range"),
        ({"neg_sampling": TRIPLETS, "edge_label": torch.rand(500)}, "edge_label has torch.float32 beside"),
        ({"neg_sampling": TRIPLETS}, r"DistMult has 3 relations; give the number of each link's \(edge_label"),
        ({"neg_sampling": "binary", "edge_label": torch.zeros(500).long()}, "DistMult has 3 relations"),
    ],
)  # fmt: skip
def test_numbers_that_are_no_relation_are_refused_before_the_first_step(options: Any, message: str) -> None:
    class Unused(Ids):
        def forward(self, batch: Any) -> Tensor:
            raise AssertionError

    model, judge = Unused(), LinkPrediction()
    model.decoder = DistMult(4, 3)
    with hoploom.init(device="cpu") as context:
        with pytest.raises(ConfigError, match=message):
            fit(Learner(model, torch.optim.SGD(model.parameters()), judge, loader(**options)), Training(1), context)
        with pytest.raises(ConfigError, match=message):
            evaluate(model, loader(**options), judge, context)


@pytest.mark.parametrize("kind", [Ids, Scored, TakesLinks])
def test_without_negatives_all_destinations_of_the_batch_are_candidates(kind: type[Ids]) -> None:
    batch, model = next(iter(loader())), kind()
    judge = task(loss="softmax")
    ends = batch.edge_label_index.clone()
    rows = judge.outputs(adapted(model), batch)
    assert rows.shape == judge.targets(batch).shape == (40, 41)
    assert torch.equal(batch.edge_label_index, ends)
    sources, destinations = batch.n_id[ends]
    for row in range(40):
        for column in range(40):
            u, v = model.rows.weight[sources[row]], model.rows.weight[destinations[column]]
            expected = -(u - v).square().sum() if kind is Scored else u @ v
            is_hit = destinations[column] == destinations[row] or sources[column] == sources[row]
            torch.testing.assert_close(rows[row, 1 + column], torch.tensor(-torch.inf) if is_hit else expected)
            if column == row:
                torch.testing.assert_close(rows[row, 0], expected)
    torch.testing.assert_close(judge.losses(rows, judge.targets(batch)), softmax_loss(rows))


def test_log_q_is_looked_up_by_the_destinations_ids() -> None:
    batch, model, log_q = next(iter(loader())), Ids(), torch.randn(60)
    judges = [task(loss="softmax", temperature=0.5, log_q=given) for given in (None, log_q)]
    plain, corrected = (judge.outputs(adapted(model), batch) for judge in judges)
    of_links = log_q[batch.n_id[batch.edge_label_index[1]]]
    of_rows = torch.cat([of_links[:, None], of_links.expand(40, 40)], dim=1)
    torch.testing.assert_close(judges[1].losses(corrected, corrected), softmax_loss(plain / 0.5 - of_rows))
    with torch.no_grad():
        assert torch.equal(judges[1].outputs(adapted(model).eval(), batch), judges[0].outputs(adapted(model), batch))


@pytest.mark.parametrize("kind", [Ids, Scored, TakesLinks])
@pytest.mark.parametrize("options", [{}, {"candidates": "joint"}, {"candidates": "joint", "disjoint": True}], ids=str)
def test_a_candidate_that_is_the_true_destination_does_not_count(kind: type[Ids], options: dict[str, Any]) -> None:
    options["neg_sampling"] = NegativeSampling("triplet", 200)
    batch, model = next(iter(loader(**options))), kind()
    found = [batch.n_id[ends] for ends in (batch.dst_neg_index, batch.dst_pos_index[:, None])]
    is_true = found[0] == found[1]
    assert is_true.sum() > 40  # 200 draws among 60 nodes
    rows = task().outputs(adapted(model), batch)
    assert torch.equal(rows[:, 1:].isneginf(), is_true)


def test_evaluation_ranks_every_link_among_its_candidates() -> None:
    model, links = Ids(), loader(neg_sampling=TRIPLETS, shuffle=False)
    with hoploom.init(device="cpu") as context:
        judge = task(metrics=["mrr", "hits@2", "auroc"])
        found = evaluate(model, links, judge, context)
    rows = torch.cat([judge.outputs(adapted(model), batch) for batch in links])
    ranks = 1 + (rows[:, 1:] > rows[:, :1]).sum(1) + (rows[:, 1:] == rows[:, :1]).sum(1) / 2
    assert math.isclose(found["mrr"], float((1 / ranks.double()).mean()), rel_tol=1e-6)
    assert math.isclose(found["hits@2"], float((ranks <= 2).double().mean()), rel_tol=1e-6)
    assert math.isclose(found["loss"], float(bpr_loss(rows).double().mean()), rel_tol=1e-6)
    true, others = rows[:, 0], rows[:, 1:][rows[:, 1:] > -torch.inf]
    wins = (true[:, None] > others).double() + (true[:, None] == others).double() / 2
    assert math.isclose(found["auroc"], float(wins.mean()), rel_tol=1e-5)


@pytest.mark.parametrize("loss", ["binary", "focal", "bpr", "margin", "softmax"])
def test_every_loss_trains_and_the_best_epoch_is_that_of_the_first_metric(loss: str) -> None:
    torch.manual_seed(1)
    model, judge = Ids(), task(loss=loss)
    with hoploom.init(device="cpu") as context:
        val = loader(neg_sampling=TRIPLETS, shuffle=False)
        before = evaluate(model, val, judge, context)
        learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.05), judge, loader(neg_sampling=TRIPLETS))
        validate = partial(evaluate, learner.model, val, judge, context)
        outcome = fit(learner, Training(epochs=3), context, validate=validate)
        after = evaluate(model, val, judge, context)
    assert judge.monitor == ("mrr", "max")
    assert outcome.best == max(epoch["mrr"] for epoch in outcome.history)
    assert after["mrr"] > before["mrr"]


def test_what_needs_candidates_refuses_a_loader_without() -> None:
    batch = next(iter(loader(neg_sampling="binary")))
    for judge, name in ((task(), "bpr"), (LinkPrediction(metrics=["mrr"]), "mrr")):
        with pytest.raises(ConfigError, match=rf"'{name}' needs candidates for each true link; use LinkNeighborLoader"):
            judge.targets(batch)


def test_a_low_mean_rank_is_best() -> None:
    assert task(metrics=["mean_rank"]).monitor == ("mean_rank", "min")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": "mrr"}, r"metrics is 'mrr'; give a list of names, such as \['mrr', 'hits@10'\]"),
        ({"metrics": []}, r"metrics is \[\]; give a list of names"),
        ({"metrics": ["mrr", "recall@3"]}, "metric 'recall@3' is unknown"),
        ({"log_q": torch.tensor([0.0, -torch.inf])}, "log_q needs a finite number for each destination"),
        ({"loss": "nll"}, "loss is 'nll'; choose one of"),
        ({"margin": 2.0}, "margin belongs to loss='margin', and loss is 'bpr'"),
        (
            {"best": "auroc"},
            r"best is 'auroc', no metric of LinkPrediction; give one of \['val_loss', 'mrr', 'hits@2'\]",
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**options)


def test_what_would_not_score_a_link_is_an_error_and_no_dot_product() -> None:
    batch = next(iter(loader(neg_sampling=TRIPLETS)))
    foreign, with_score = Ids(), Ids()
    foreign.decoder = nn.Bilinear(4, 4, 1)
    with_score.score = lambda z, links: z.sum()  # type: ignore[assignment]
    for model, what in ((foreign, "`decoder` of type Bilinear"), (with_score, "method `score`")):
        with pytest.raises(ConfigError, match=f"the model has a {what}, which nothing would call; give it a `decoder`"):
            task().outputs(adapted(model), batch)


class Pairs(Ids):
    """Scores of links, as in a loop of PyG: forward takes the batch."""

    def forward(self, batch: Any) -> Tensor:
        ends = batch.edge_label_index if "edge_label_index" in batch else torch.stack([batch.src_index] * 2)
        scores = (self.rows(batch.n_id[ends[0]]) * self.rows(batch.n_id[ends[1]])).sum(-1)
        return scores[:, None] if self.is_column else scores


@pytest.mark.parametrize("is_column", [False, True])
@pytest.mark.parametrize("negatives", ["binary", TRIPLETS, None])
def test_scores_of_a_forward_without_edge_label_index_are_refused(is_column: bool, negatives: Any) -> None:
    model, judge = Pairs(), LinkPrediction() if negatives == "binary" else task()
    model.is_column = is_column
    batch = next(iter(loader(neg_sampling=negatives, batch_size=17)))
    with pytest.raises(
        ConfigError, match=r"returned \[\d+(, 1)?\] for the \d+ nodes 'node' .* they are only taken from"
    ):
        judge.outputs(adapted(model), batch)


@pytest.mark.parametrize("edge_label", [torch.arange(500).float() % 2, torch.arange(500) % 2])
def test_links_that_are_labelled_0_are_no_true_links_of_triplets(edge_label: Tensor) -> None:
    with (
        hoploom.init(device="cpu") as context,
        pytest.raises(ConfigError, match=r"give true links only, .*without edge_label"),
    ):
        evaluate(Ids(), loader(neg_sampling="triplet", edge_label=edge_label), task(), context)


def test_a_node_type_that_is_not_the_loaders_is_refused() -> None:
    graph = random_graph(60, 500, seed=1)
    nodes = NeighborLoader(graph, [3], batch_size=40)
    named = NodeClassification(4, node_type="papr")
    for judge in (named, SeveralTasks({"a": named})):
        model = Ids()
        learner = Learner(model, torch.optim.Adam(model.parameters()), judge, nodes)
        with hoploom.init(device="cpu") as context, pytest.raises(ConfigError, match="'papr', and the loader's seeds"):
            fit(learner, Training(epochs=1), context)


@pytest.mark.parametrize(
    ("judge", "options", "message"),
    [
        ({"across_ranks": True}, {"neg_sampling": TRIPLETS}, "across_ranks is for candidates from the batch"),
        ({"log_q": torch.zeros(60)}, {"neg_sampling": TRIPLETS}, "log_q is for candidates from the batch"),
        ({"log_q": torch.zeros(59)}, {}, "log_q has 59 numbers for 60 'node' nodes"),
    ],
)
def test_options_of_candidates_fit_the_loader(judge: dict[str, Any], options: dict[str, Any], message: str) -> None:
    model = Ids()
    learner = Learner(model, torch.optim.SGD(model.parameters()), task(loss="softmax", **judge), loader(**options))
    with hoploom.init(device="cpu") as context, pytest.raises(ConfigError, match=message):
        fit(learner, Training(1, progress=False), context)


# --- weights of links -------------------------------------------------------------------------


def rated(**options: Any) -> tuple[LinkNeighborLoader, Tensor, Tensor]:
    """A loader of all edges of a graph, which are in no order and have a field `stars`; the edges, and their stars."""
    edges = torch.randperm(20 * 20, generator=torch.Generator().manual_seed(4))[:90]
    edges, stars = torch.stack([edges // 20, edges % 20]), torch.arange(90) % 5 + 0.5
    store = hoploom.from_tensors({"x": torch.ones(20, 1)}, {"edge_index": edges, "stars": stars})
    given = {"edge_label_index": None, "batch_size": 12, "shuffle": True, "seed": 2, **options}
    return LinkNeighborLoader(store, [3], **given), edges, stars


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
@pytest.mark.parametrize("given", ["field", "tensor", "some links"])
def test_a_true_link_weighs_what_its_edge_says(negatives: str, given: str) -> None:
    """A loop over the links: torch's binary cross-entropy with the stars of each link, found by its two ends."""
    some = rated()[1][:, 10:40] if given == "some links" else None
    batches, edges, stars = rated(neg_sampling=NegativeSampling(negatives, 2), edge_label_index=some)
    stars_of = {tuple(edge): float(star) for edge, star in zip(edges.t().tolist(), stars, strict=True)}
    weight: Any = "stars"
    if given == "tensor":
        weight = torch.tensor([stars_of[tuple(edge)] for edge in batches.maker.ends.t().tolist()])
    model = Ids()
    with hoploom.init(device="cpu") as context:
        judge = LinkPrediction(metrics=["auroc"], weight=weight).bound(batches, context)
    for batch in batches:
        outputs = judge.outputs(adapted(model), batch)
        found = judge.losses(outputs, judge.targets(batch))
        if negatives == "binary":
            labels = batch.edge_label
            ends = batch.n_id[batch.edge_label_index].t().tolist()
            weights = torch.tensor([stars_of[tuple(e)] if y else 1 for e, y in zip(ends, labels, strict=True)])
        else:
            labels = torch.tensor([1.0, 0, 0]).expand_as(outputs)
            ends = torch.stack([batch.n_id[batch.src_index], batch.n_id[batch.dst_pos_index]], dim=1).tolist()
            weights = torch.ones_like(labels).clone()
            weights[:, 0] = torch.tensor([stars_of[tuple(e)] for e in ends])
        wanted = functional.binary_cross_entropy_with_logits(outputs, labels, weights, reduction="none")
        of_rows = wanted if negatives == "binary" else wanted.nanmean(1)  # nan: the true destination again
        torch.testing.assert_close(found, of_rows)


def test_weights_count_in_training_and_not_in_evaluation() -> None:
    batches, _, _ = rated(neg_sampling="binary")
    with hoploom.init(device="cpu") as context:
        found = []
        for weight in (None, "stars"):
            torch.manual_seed(0)
            model, judge = Ids(), LinkPrediction(weight=weight)
            before = evaluate(model, batches, judge, context)
            learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), judge, batches)
            outcome = fit(learner, Training(1, progress=False), context)
            found.append((before, outcome.history[0]["train_loss"]))
            assert evaluate(model, batches, learner.task, context) == evaluate(model, batches, judge, context)
            batches.set_epoch(0)
    assert found[0][0] == found[1][0]
    assert found[1][1] > 1.2 * found[0][1]  # the mean of all stars is 2.5


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("likes", r"weight is 'likes', and edges of .* have \['stars'\]; name one, or give a tensor"),
        (torch.ones(3), r"weight has shape \[3\] for 90 links; give one number for each"),
        (-torch.ones(90), r"link \[.*\] has weight \[-1.0\]; give finite numbers of at least 0"),
        (torch.full((90,), torch.nan), r"has weight \[nan\]"),
    ],
)
def test_bad_weights_are_one_error_before_the_first_step(weight: Any, message: str) -> None:
    batches, _, _ = rated(neg_sampling="binary")
    model = Ids()
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), LinkPrediction(weight=weight), batches)
    with hoploom.init(device="cpu") as context, pytest.raises(HoploomError, match=message):
        fit(learner, Training(1, progress=False), context)
    assert learner.progress.steps == 0


def test_weights_need_edges_and_a_loss_of_single_links() -> None:
    _, edges, _ = rated()
    missing = next(pair for pair in combinations(range(20), 2) if list(pair) not in edges.t().tolist())
    batches, _, _ = rated(neg_sampling="binary", edge_label_index=torch.tensor(missing)[:, None])
    numbered, _, _ = rated(neg_sampling="binary", edge_label_index=edges[:, :2], input_id=torch.tensor([7, 8]))
    with hoploom.init(device="cpu") as context:
        with pytest.raises(ConfigError, match=r"is no edge of .*, so it has no 'stars'; give weight as a tensor"):
            LinkPrediction(weight="stars").bound(batches, context)
        with pytest.raises(ConfigError, match=r"weight is by link of edge_label_index; .*, without input_id"):
            LinkPrediction(weight=torch.ones(2)).bound(numbered, context)
    with pytest.raises(ConfigError, match="weight belongs to loss='binary', and loss is 'bpr'"):
        task(weight="stars")
    with pytest.raises(ConfigError, match="across_ranks is for losses of candidates"):
        LinkPrediction(across_ranks=True)


@pytest.mark.parametrize(
    ("decoder", "dtype"),
    [(None, torch.float32), (DistMult(4, 3), torch.float32), (Distance(), torch.float32), (None, torch.bfloat16)],
    ids=["dot", "distmult", "distance", "half"],
)
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_losses_of_a_batch_are_those_of_its_outputs(
    decoder: Decoder | None, dtype: torch.dtype, temperature: float | None
) -> None:
    options = {"neg_sampling": NegativeSampling("triplet", 70), "candidates": "joint"}
    batch, found = next(iter(loader(**options, edge_label=torch.arange(500) % 3))), []
    judge = LinkPrediction(loss="softmax", metrics=["mrr"], temperature=temperature)
    model = Ids().to(dtype)
    model.decoder = decoder
    for losses in (judge.batch_losses, lambda *given: judge.losses(judge.outputs(*given), judge.targets(batch))):
        own = copy.deepcopy(model)
        of_links = losses(adapted(own), batch)
        (of_links * torch.arange(40)).sum().backward()
        found.append([of_links, *(parameter.grad for parameter in own.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
