"""Models in fit and evaluate: each is called with the fields that its forward names, or refused by one ConfigError."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.fit_workers import NUM_CLASSES, QUIET, Sage, alone, labelled, learner_of, link_loader, run
from support.refusals import assert_raises
from torch import Tensor, nn
from torch_geometric.data import HeteroData

import hoploom.nn as hnn
from hoploom import ConfigError, NeighborLoader
from hoploom.train.batch_adapter import BatchAdapter, adapted
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import NodeClassification

TYPES = ["paper", "author"]
RELATIONS = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "written_by", "author")]


class Plain(nn.Module):
    def __init__(self, given: int = 6) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(given, 8), pyg.GCNConv(8, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            pyg.HeteroConv({key: pyg.SAGEConv((-1, -1), width) for key in RELATIONS}) for width in (8, NUM_CLASSES)
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        x_dict = {name: x.relu() for name, x in self.convs[0](x_dict, edge_index_dict).items()}
        return self.convs[1](x_dict, edge_index_dict)  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    return pyg.Sequential("x, edge_index", [(pyg.SAGEConv(6, 8), "x, edge_index -> x"), nn.ReLU(), nn.Linear(8, 3)])


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GraphSAGE": lambda: pyg.GraphSAGE(6, 8, 2, NUM_CLASSES),
    "GCN": lambda: pyg.GCN(6, 8, 2, NUM_CLASSES),
    "GAT": lambda: pyg.GAT(6, 8, 2, NUM_CLASSES, heads=2),
    "GIN": lambda: pyg.GIN(6, 8, 2, NUM_CLASSES),
    "a module": Plain,
    "Sequential": sequential,
    "TorchScript": lambda: torch.jit.script(Scripted()),
    "MLP": lambda: pyg.MLP([6, 8, NUM_CLASSES], norm=None),
}
TYPED: dict[str, Callable[[], nn.Module]] = {
    "to_hetero": lambda: pyg.to_hetero(pyg.GraphSAGE((-1, -1), 8, 2, NUM_CLASSES), (TYPES, RELATIONS)),
    "HeteroConv": Typed,
}


def typed() -> HeteroData:
    """The labelled graph as papers, with authors of as many."""
    plain, data = labelled(), HeteroData()
    data["paper"].update({"x": plain.x, "y": plain.y, "train_mask": plain.train_mask, "val_mask": plain.val_mask})
    data["author"].x = plain.x[:, :4].contiguous()
    for number, key in enumerate(RELATIONS):
        data[key].edge_index = plain.edge_index.roll(number, 1)
    return data


def loader_of(split: str, data: Any = None, fanouts: tuple[int, ...] = (4, 3), **options: Any) -> NeighborLoader:
    data = labelled() if data is None else data
    seeds = split if not isinstance(data, HeteroData) else ("paper", split)
    return NeighborLoader(data, list(fanouts), seeds, batch_size=16, **options)


def learned(model: nn.Module, data: Any = None) -> None:
    torch.manual_seed(2)
    loader, task = loader_of("train", data, shuffle=True), NodeClassification(NUM_CLASSES)
    with torch.no_grad():
        adapted(model)(next(iter(loader)))  # lazy layers
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.03), task, loader)
    losses = [epoch["train_loss"] for epoch in fit(learner, Training(12, **QUIET), alone()).history]
    assert losses[-1] < 0.95 * losses[0]  # neighbours are noise here, and GCN and GIN see nothing else
    assert evaluate(model, loader_of("train", data), task, alone())["loss"] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_pyg_trains_and_evaluates_as_it_is(name: str) -> None:
    learned(MODELS[name]())


@pytest.mark.slow  # imports torch's compiler
def test_a_compiled_model_is_called_by_the_names_of_the_model_in_it() -> None:
    batch, model = next(iter(loader_of("train"))), Plain()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(BatchAdapter(compiled)(batch), model(batch.x, batch.edge_index))


@pytest.mark.parametrize("name", TYPED)
def test_a_model_for_many_types_gets_dictionaries(name: str) -> None:
    learned(TYPED[name](), typed())


def test_links_are_learned_from_the_rows_of_a_model_of_pyg() -> None:
    model, links = pyg.GraphSAGE(6, 8, 2, 4), link_loader(mode="subgraph", shuffle=False)
    before = evaluate(model, links, LinkPrediction(), alone())["loss"]
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=0.03), LinkPrediction(), links)
    fit(learner, Training(5, **QUIET), alone())
    assert evaluate(model, links, LinkPrediction(), alone())["loss"] < 0.95 * before


class Trimming(pyg.GraphSAGE):
    def forward(
        self, x: Tensor, edge_index: Tensor, num_sampled_nodes_per_hop: Any, num_sampled_edges_per_hop: Any
    ) -> Tensor:  # type: ignore[override]
        return super().forward(
            x, edge_index, None, None, None, None, num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        )


def test_a_module_that_asks_for_hops_is_given_them() -> None:
    batch, model = next(iter(loader_of("train"))), Trimming(6, 8, 2, NUM_CLASSES)
    assert BatchAdapter(model)(batch).shape[0] == sum(batch.num_sampled_nodes[:2])


def test_edge_weights_and_features_are_given_where_batches_have_them() -> None:
    data = labelled()
    data.edge_weight = torch.rand(data.num_edges)
    batch, model = next(iter(loader_of("train", data))), Plain()
    expected = model(batch.x, batch.edge_index, batch.edge_weight)
    assert not torch.allclose(expected, model(batch.x, batch.edge_index))
    torch.testing.assert_close(BatchAdapter(model)(batch), expected)
    data.edge_attr = torch.rand(data.num_edges, 2)
    batch, model = next(iter(loader_of("train", data))), pyg.GAT(6, 8, 2, NUM_CLASSES, edge_dim=2)
    expected = model(batch.x, batch.edge_index, edge_attr=batch.edge_attr)
    torch.testing.assert_close(BatchAdapter(model)(batch)[:16], expected[:16])


def test_edge_features_that_a_built_in_model_leaves_unused_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    data = labelled()
    data.edge_attr = torch.rand(data.num_edges, 2)
    for built_in in (False, True):
        model = hnn.GraphSAGE(6, 8, 2, NUM_CLASSES) if built_in else pyg.GAT(6, 8, 2, NUM_CLASSES, edge_dim=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        learner = Learner(model, optimizer, NodeClassification(NUM_CLASSES), loader_of("train", data))
        fit(learner, Training(epochs=1), alone())
        told = "the model does not read edge_attr of node to node; sage, gat, gatv2, gine, "
        assert (told in capsys.readouterr().err) == built_in


def assert_refused(model: nn.Module, loader: NeighborLoader, said: str) -> None:
    """Both evaluate and fit say this."""
    learner = learner_of(loader=loader)
    assert_raises(ConfigError, said, lambda: evaluate(model, loader, learner.task, alone()))
    learner.model = model
    assert_raises(ConfigError, said, run, learner)


class Curious(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, mood: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index) + mood


@pytest.mark.parametrize(
    ("model", "data", "options", "said"),
    [
        (Curious, labelled, {}, r"Curious.forward takes 'mood', and the batches have \['x', 'edge_index', "),
        (Plain, labelled, {"mode": "blocks"}, r"takes 'edge_index', .* give the loader mode='subgraph'"),
        (Typed, labelled, {}, r"Typed.forward takes 'x_dict', and the batches have \['x', "),
        (Plain, typed, {}, r"fails where they are dictionaries by type.*to_hetero\(model, data.metadata\(\)\)"),
    ],
    ids=["unknown", "blocks", "types without", "one for many"],
)
def test_a_forward_that_cannot_be_served_is_told_at_once(model: Any, data: Any, options: Any, said: str) -> None:
    assert_refused(model(), loader_of("train", data(), **options), said)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: pyg.GraphSAGE(64, 8, 2, NUM_CLASSES), r"in_channels=64 for features x of 6; give it in_channels=6"),
        (lambda: hnn.GraphSAGE(64, 8, 2, 3), r"x of 'node' has 6 features, but the model expects 64; .*in_channels"),
        (lambda: Plain(64), r"layer 'first.lin' of Plain takes rows of 64 and got rows of 6; x has 6"),
        (lambda: pyg.GraphSAGE(6, 8, 2, 2), r"out_channels=2 for 3 classes; give it out_channels=3"),
        (lambda: hnn.GraphSAGE(6, 8, 2, 2), r"out_channels=2 for 3 classes; give it out_channels=3"),
    ],
    ids=["PyG", "ours", "a module", "outputs of PyG", "outputs of ours"],
)
def test_a_wrong_width_is_told_with_both_numbers(model: Callable[[], nn.Module], said: str) -> None:
    assert_refused(model(), loader_of("train"), said)


def test_the_older_way_to_shard_is_refused_with_the_newer() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Torch's own needs a GPU to be made."""

    learner = learner_of(loader=loader_of("train"))
    learner.model = FullyShardedDataParallel(Plain())
    assert_raises(ConfigError, r"cut over the ranks, .* use context.wrap\(model\)", run, learner)


TASK = NodeClassification(NUM_CLASSES)


class OwnCall(NodeClassification):
    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch.x, batch.edge_index)[: batch.batch_size]  # type: ignore[no-any-return]


def test_a_task_may_call_the_model_itself() -> None:
    model = Scripted()
    ours, theirs = (evaluate(model, loader_of("train"), task, alone()) for task in (TASK, OwnCall(NUM_CLASSES)))
    assert ours == theirs


class Defaulted(Scripted):
    def forward(self, x: Any = None, edge_index: Any = None) -> Tensor:
        assert edge_index.shape[0] == 2
        return super().forward(x, edge_index)


def shaped(name: str, base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """Return a class of models with such a forward, which hands on to that of the base."""
    return type(name, (base,), {"forward": forward})


FORMS = [
    Defaulted,
    shaped("ByPosition", Scripted, lambda self, x, edge_index, /: Scripted.forward(self, x, edge_index)),
    shaped("Anything", Sage, lambda self, *args: Sage.forward(self, *args)),
    shaped("BatchAndMore", Sage, lambda self, batch, edge_weight=None: Sage.forward(self, batch)),
]
Named = shaped("Named", Scripted, lambda self, **given: Scripted.forward(self, **given))
Unpacked = shaped("Unpacked", Scripted, lambda self, *given: Scripted.forward(self, *given))
Twofold = shaped("Twofold", Scripted, lambda self, x, edge_index: (Scripted.forward(self, x, edge_index), x))


@pytest.mark.parametrize("made", FORMS)
def test_a_forward_of_any_shape_is_called_with_what_it_names(made: Callable[[], nn.Module]) -> None:
    loader, model = loader_of("train"), made()
    assert adapted(model)(next(iter(loader))).shape[1] == NUM_CLASSES


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Named, r"Named.forward was called with the batch.*forward\(self, batch\)"),
        (Unpacked, r"Unpacked.forward was called with the batch.*forward\(self, x, edge_index\)"),
        (lambda: nn.Linear(6, NUM_CLASSES), r"Linear.forward was called with the batch.*forward\(self, x\)"),
        (lambda: nn.Sequential(nn.Linear(6, 3)), r"Sequential.forward was called with the batch"),
        (Twofold, r"the model returned a tuple; return a tensor with a row for every seed"),
    ],
    ids=["names", "positions", "Linear", "Sequential", "tuple"],
)
def test_a_forward_that_cannot_be_called_is_told_what_it_was_given(made: Callable[[], nn.Module], said: str) -> None:
    assert_raises(ConfigError, said, lambda: evaluate(made(), loader_of("train"), TASK, alone()))


def test_a_forward_that_takes_links_returns_their_scores() -> None:
    class Scores(pyg.GraphSAGE):
        def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
            z = super().forward(x, edge_index)
            return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=1, keepdim=True)

    ours, theirs = Scores(6, 8, 2, 4).eval(), pyg.GraphSAGE(6, 8, 2, 4).eval()
    theirs.load_state_dict(ours.state_dict())
    links = link_loader(mode="subgraph", shuffle=False)
    expected = evaluate(theirs, links, LinkPrediction(), alone())
    assert evaluate(ours, links, LinkPrediction(), alone()) == pytest.approx(expected)


def test_edge_features_go_only_to_models_of_pyg_that_were_made_for_them() -> None:
    data = labelled()
    data.edge_attr = torch.rand(data.num_edges, 2)
    loader, degrees = loader_of("train", data), torch.ones(9, dtype=torch.long)
    model = pyg.PNA(6, 8, 2, NUM_CLASSES, aggregators=["mean"], scalers=["identity"], deg=degrees)
    batch = next(iter(loader))
    torch.testing.assert_close(adapted(model)(batch), model(batch.x, batch.edge_index))


def halved(batch: Any) -> Any:
    batch.edge_index = batch.edge_index[:, ::2]
    return batch


def test_a_forward_that_asks_for_counts_is_told_that_they_do_not_add_up() -> None:
    said = r"takes 'num_sampled_nodes_per_hop', but the loader's transform changed .* no longer match; leave"
    with pytest.raises(ConfigError, match=said):
        evaluate(
            Trimming(6, 8, 3, NUM_CLASSES),
            loader_of("train", fanouts=(3, 2, 2), transform=halved),
            NodeClassification(NUM_CLASSES),
            alone(),
        )
