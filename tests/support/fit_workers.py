"""What the tests of training share: a labelled graph, small models, and what spawned ranks run."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, LinkNeighborLoader, NeighborLoader, Store
from hoploom.load.loader import Loader
from hoploom.nn import MLP, Bilinear
from hoploom.ranks.context import Context, init
from hoploom.train.checkpoint import Checkpoint, write_state
from hoploom.train.journal import Journal
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import Outcome, evaluate, fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import MultiLabel, NodeClassification, NodeRegression, SeveralTasks
from support.loader_workers import a_share_read_by_rank_0_alone

NUM_NODES, NUM_TRAIN, NUM_CLASSES = 123, 53, 3  # 53 seeds in global batches of 16: the tail has 5
QUIET = {"progress": False}


def labelled() -> Data:
    """A random graph whose classes follow from the features, with two splits."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_NODES, 6, generator=generator)
    nodes = torch.arange(NUM_NODES)
    return Data(
        x=x,
        edge_index=torch.randint(NUM_NODES, (2, 5 * NUM_NODES), generator=generator),
        y=x[:, :NUM_CLASSES].argmax(dim=1),
        labels=(x[:, :4] > 0).float(),
        amount=x[:, 0] + x[:, 1],
        train_mask=nodes < NUM_TRAIN,
        val_mask=nodes >= NUM_TRAIN,
    )


def store() -> Store:
    return hoploom.from_pyg(labelled())


class Sage(nn.Module):
    """Two of PyG's layers, over blocks or over a whole subgraph."""

    def __init__(self, out: int = NUM_CLASSES, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convs = nn.ModuleList([SAGEConv(6, 8), SAGEConv(8, out)])
        self.dropout = dropout

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for depth, conv in enumerate(self.convs):
            if depth:
                x = nn.functional.dropout(x.relu(), self.dropout, self.training)
            if "blocks" in batch:
                block = batch.blocks[depth]
                x = conv((x, x[: block.num_destinations]), block.edge_index)
            else:
                x = conv(x, batch.edge_index)
        return x


class ScoredSage(Sage):
    """Scores links with parameters of its own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.decoder = Bilinear(4)
        with torch.no_grad():
            self.decoder.relations.weight.copy_((torch.eye(4) + 0.1).view(1, -1))


def train_loader(batch: int = 16, context: Context | None = None, **options: Any) -> NeighborLoader:
    """Blocks of a constant global batch, so that a step is the same for any number of ranks."""
    rank, world_size = (0, 1) if context is None else (context.rank, context.world_size)
    options = {"mode": "blocks", "shuffle": True, "input_nodes": "train", "seed": 5} | options
    return NeighborLoader(store(), [4, 3], batch_size=batch // world_size, rank=rank, world_size=world_size, **options)


def val_loader(**options: Any) -> NeighborLoader:
    return NeighborLoader(store(), [4, 3], input_nodes="val", **{"batch_size": 16, "mode": "blocks"} | options)


RANKED, TRIPLETS = ("mrr", "hits@3", "mean_rank", "auroc"), NegativeSampling("triplet", 5)


def link_loader(context: Context | None = None, **options: Any) -> LinkNeighborLoader:
    rank, world_size = (0, 1) if context is None else (context.rank, context.world_size)
    links = labelled().edge_index[:, :53]
    options = {"neg_sampling": "binary", "mode": "blocks", "shuffle": True, "batch_size": 16} | options
    return LinkNeighborLoader(store(), [4, 3], links, rank=rank, world_size=world_size, **options)


def learner_of(
    context: Context | None = None, *, dropout: float = 0.0, loader: Loader | None = None, learning_rate: float = 0.05
) -> Learner:
    model: nn.Module = Sage(dropout=dropout)
    if context is not None:
        model = context.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loader, task = train_loader(context=context) if loader is None else loader, NodeClassification(NUM_CLASSES)
    return Learner(model, optimizer, task, loader, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8))


def resumed(folder: Path, **options: Any) -> Learner:
    """A learner where the last checkpoint of a run stands."""
    learner = learner_of(**options)
    assert Checkpoint(folder, alone()).restore("last", learner.parts()) == {}
    return learner


def given(*values: float) -> Any:
    accuracies = iter(values)
    return lambda: {"accuracy": next(accuracies)}


def parameters_of(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def assert_close(left: list[Tensor], right: list[Tensor], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_state(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """The states of two runs' parts are equal to the last bit."""
    with TemporaryDirectory() as folder:
        for number, parts in enumerate((left, right)):
            write_state(Path(folder, str(number)), {name: part.state_dict() for name, part in parts.items()})
        assert Path(folder, "0").read_bytes() == Path(folder, "1").read_bytes()


def run(learner: Learner, epochs: int = 2, *, folder: Path | None = None, validate: Any = None, **more: Any) -> Outcome:
    context = alone()
    checkpoint = None if folder is None else Checkpoint(folder, context)
    training = Training(epochs, **QUIET | more)
    return fit(learner, training, context, validate=validate, checkpoint=checkpoint)


def assert_same_run(left: Learner, right: Learner) -> None:
    assert_same_state(left.parts(), right.parts())


def kill_at(model: nn.Module, call: int, *numbers: int) -> None:
    calls = iter(range(1, 1 << 30))

    def hook(*arguments: object) -> None:
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)

    model.register_forward_pre_hook(hook)


def spoil_at(model: nn.Module, call: int) -> None:
    calls = iter(range(1, 1 << 30))
    model.register_forward_hook(lambda module, given, found: found * float("nan") if next(calls) == call else None)


def gradients_of(context: Context, step: int) -> list[Tensor]:
    model = context.wrap(Sage())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loader = train_loader(context=context)
    steps = len(loader)
    assert loader.num_seeds(steps - 1) == NUM_TRAIN % 16
    consumed = step * 16
    loader.load_state_dict(loader.state_dict() | {"step": step, "consumed_seeds": consumed})
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=1.0), NodeClassification(NUM_CLASSES), loader)
    fit(learner, Training(1, max_steps=1, **QUIET), context)
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


def compiled_two_ranks(context: Context, folder: str) -> None:
    """torch.compile around DDP and DDP around torch.compile; "eager" traces as any backend, and needs no compiler."""
    for name in ("around", "within"):
        plain = Sage()
        model: Any = context.wrap(torch.compile(plain, backend="eager") if name == "within" else plain)
        model = torch.compile(model, backend="eager") if name == "around" else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        learner = Learner(model, optimizer, NodeClassification(NUM_CLASSES), train_loader(context=context))
        checkpoint = Checkpoint(Path(folder) / name, context)
        fit(learner, Training(2, accumulate=2, **QUIET), context, checkpoint=checkpoint)
        ours, theirs = (evaluate(each, val_loader(), learner.task, context) for each in (model, plain))
        assert ours == pytest.approx(theirs)


def link_curve(context: Context, exclude: str = "none") -> list[Tensor]:
    model = context.wrap(ScoredSage())
    loader = link_loader(context, batch_size=16 // context.world_size, exclude=exclude)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), LinkPrediction(), loader)
    fit(learner, Training(2, accumulate=2, **QUIET), context)
    return parameters_of(learner)


def in_batch_curve(context: Context, *, across: bool = True) -> tuple[list[float], list[Tensor]]:
    """Links are ranked among the destinations of the step; of its tail, 5 links, rank 0 has 2 and rank 1 has 3."""
    model = Sage(4)
    model.decoder = Bilinear(4)
    learning = context.wrap(model)
    loader = link_loader(context, batch_size=16 // context.world_size, neg_sampling=None)
    counts = 1 + torch.bincount(labelled().edge_index[1], minlength=NUM_NODES)
    given: dict[str, Any] = {"log_q": (counts / counts.sum()).log(), "temperature": 0.5, "across_ranks": across}
    task = LinkPrediction(loss="softmax", metrics=["mrr"], **given)
    learner = Learner(learning, torch.optim.SGD(learning.parameters(), lr=0.1), task, loader)
    outcome = fit(learner, Training(2, **QUIET), context)
    return [epoch["train_loss"] for epoch in outcome.history], parameters_of(learner)


def features_curve(context: Context) -> dict[str, tuple[list[float], list[Tensor], dict[str, float]]]:
    """Losses, parameters and metrics with features of links, against negatives and against destinations of all ranks.

    Features are large, so that a row of another link would show.
    """
    given = {"features": 9 * torch.randn(53, 3, generator=torch.Generator().manual_seed(8))}
    kinds: dict[str, tuple[Any, LinkPrediction]] = {
        "binary": ("binary", LinkPrediction(**given)),
        "in batch": (None, LinkPrediction(loss="softmax", metrics=["mrr"], across_ranks=True, **given)),
    }
    found = {}
    for name, (negatives, task) in kinds.items():
        model = Sage(4)
        model.decoder = MLP(4, 8, edge_channels=3)
        learning = context.wrap(model)
        loader = link_loader(context, batch_size=16 // context.world_size, neg_sampling=negatives)
        learner = Learner(learning, torch.optim.SGD(learning.parameters(), lr=0.01), task, loader)
        outcome = fit(learner, Training(2, **QUIET), context)
        metrics = evaluate(model, link_loader(shuffle=False, neg_sampling=negatives), task, context)
        found[name] = [epoch["train_loss"] for epoch in outcome.history], parameters_of(learner), metrics
    return found


def curve(context: Context, accumulate: int = 1) -> tuple[list[float], list[Tensor]]:
    learner = learner_of(context)
    outcome = fit(learner, Training(3, accumulate=accumulate, **QUIET), context)
    return [epoch["train_loss"] for epoch in outcome.history], parameters_of(learner)


def all_metrics(context: Context) -> dict[str, dict[str, float]]:
    """What evaluate says, for every task and way to share out the seeds; some ranks have no step at batch size 200."""
    share = {"batch_size": 16 // context.world_size, "rank": context.rank, "world_size": context.world_size}
    loaders = {"16": val_loader(), "200": val_loader(batch_size=200), "ranks": val_loader(**share)}
    tasks: dict[str, tuple[int, Any]] = {
        "classes": (NUM_CLASSES, NodeClassification(NUM_CLASSES, confusion=True)),
        "labels": (4, MultiLabel(4, label="labels")),
        "amount": (1, NodeRegression(label="amount")),
    }
    several = SeveralTasks({name: task for name, (_, task) in tasks.items()}, {"amount": 0.5})
    tasks["several"] = several.columns[0], several
    few = labelled()  # only the first batch has labels, so the other ranks have none to compare
    few.y[NUM_TRAIN + 10 :], few.labels[NUM_TRAIN + 10 :], few.amount[NUM_TRAIN + 10 :] = -1, torch.nan, torch.nan
    labels_in_one = NeighborLoader(hoploom.from_pyg(few), [4, 3], input_nodes="val", batch_size=16, mode="blocks")
    found = {"few labels": evaluate(Sage(several.columns[0]), labels_in_one, several, context)}
    found |= {"links": evaluate(ScoredSage(), link_loader(shuffle=False), LinkPrediction(), context)}
    ranked, batch = LinkPrediction(loss="bpr", metrics=RANKED), {"shuffle": False, "neg_sampling": TRIPLETS}
    found["ranked links"] = evaluate(ScoredSage(), link_loader(**batch), ranked, context)
    found["ranked links 200"] = evaluate(ScoredSage(), link_loader(**batch, batch_size=200), ranked, context)
    for size, loader in loaders.items():
        for name, (out, task) in tasks.items():
            found[f"{name} {size}"] = evaluate(Sage(out), loader, task, context)
    return found


def a_model_that_nobody_wrapped(context: Context) -> None:
    learner = learner_of(loader=train_loader(context=context))
    with pytest.raises(
        ConfigError, match=r"the model is not wrapped in DistributedDataParallel.* the 2 ranks.*context.wrap\(model\)"
    ):
        fit(learner, Training(1, **QUIET), context)
    convs: Any = learner.model.convs
    convs[0] = context.wrap(convs[0])
    with pytest.raises(ConfigError, match=r"parameter 'convs.1.*' of the model is not wrapped in DistributedDataParal"):
        fit(learner, Training(1, **QUIET), context)
    context.barrier()  # both are here


def two_ranks(context: Context, folder: str) -> None:
    """Everything that needs two ranks; what rank 0 finds is saved for the test to compare."""
    a_model_that_nobody_wrapped(context)
    found = {
        "gradients": [gradients_of(context, step) for step in (0, 3)],
        "links": link_curve(context),
        "links, left out": link_curve(context, "both"),
        "in batch": in_batch_curve(context),
        "in batch, own": in_batch_curve(context, across=False),
        "features": features_curve(context),
        "curve": curve(context),
        "accumulated": curve(context, accumulate=2),
        "metrics": all_metrics(context),
    }
    if context.is_main:
        write_state(Path(folder) / "found", found)
    resume_of_one_by_two(context, folder)
    checks = (a_loss_that_is_not_finite_on_rank_1, a_signal_for_rank_1, a_full_disk_for_rank_0)
    checks += (rank_0_alone_says_when_to_save, loaders_that_differ_are_not_evaluated, a_share_read_by_rank_0_alone)
    for check in checks:
        check(context, folder)


def four_ranks(context: Context, folder: str) -> None:
    """The curve and the metrics, where some ranks have no step to evaluate."""
    found = {"curve": curve(context), "metrics": all_metrics(context)}
    if context.is_main:
        write_state(Path(folder) / "found", found)


def loaders_that_differ_are_not_evaluated(context: Context, folder: str) -> None:
    task = NodeClassification(NUM_CLASSES)
    with pytest.raises(ConfigError, match=r"rank 0 and rank 1 .*\(batch_size: 16 on rank 0, 17 on rank 1\)"):
        evaluate(Sage(), val_loader(batch_size=16 + context.rank), task, context)


def resume_of_one_by_two(context: Context, folder: str) -> None:
    """Continue what one process left in `one`; leave what one process is to continue in `two`."""
    learner, checkpoint = learner_of(context), Checkpoint(Path(folder) / "one", context)
    assert checkpoint.restore("last", learner.parts()) == {}
    journal = Journal(Path(folder) / "journal", context, loggers=[]) if context.is_main else None
    checkpoint = Checkpoint(Path(folder) / "one-by-two", context)
    fit(learner, Training(2, **QUIET), context, checkpoint=checkpoint, journal=journal)
    learner = learner_of(context)
    fit(learner, Training(2, max_steps=3, **QUIET), context, checkpoint=Checkpoint(Path(folder) / "two", context))


def a_loss_that_is_not_finite_on_rank_1(context: Context, folder: str) -> None:
    learner, checkpoint = learner_of(context), Checkpoint(Path(folder) / "nan", context)
    fit(learner, Training(1, **QUIET), context, checkpoint=checkpoint)
    if context.rank == 1:
        spoil_at(learner.model, 2)
    said = r"loss is nan at epoch 2 step 6 on rank 1; .*last good checkpoint is .*nan/last.safetensors"
    with pytest.raises(hoploom.TrainError, match=said):
        fit(learner, Training(2, **QUIET), context, checkpoint=checkpoint)


def a_signal_for_rank_1(context: Context, folder: str) -> None:
    learner, checkpoint = learner_of(context), Checkpoint(Path(folder) / "asked", context)
    if context.rank == 1:
        kill_at(learner.model, 3, signal.SIGTERM)
    outcome = fit(learner, Training(2, **QUIET), context, checkpoint=checkpoint)
    assert (outcome.stopped, outcome.steps) == ("asked", 3)
    assert checkpoint.path("last").exists()

    def validate() -> dict[str, float]:
        if context.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return {"accuracy": 0.5}

    outcome = fit(learner, Training(2, **QUIET), context, validate=validate, checkpoint=checkpoint)
    assert (outcome.stopped, outcome.epochs) == ("asked", 1)


def a_full_disk_for_rank_0(context: Context, folder: str) -> None:
    """Only rank 0 writes; all ranks learn that it could not, and why."""
    blocked = Path(folder) / "blocked"
    if context.is_main:
        blocked.write_text("a file where the folder should be")
    context.barrier()
    kind = hoploom.StoreError if context.is_main else hoploom.PeerError
    with pytest.raises(kind, match=r"cannot write .*blocked/last.safetensors"):
        fit(learner_of(context), Training(1, **QUIET), context, checkpoint=Checkpoint(blocked, context))


def rank_0_alone_says_when_to_save(context: Context, folder: str) -> None:
    """Clocks differ, and even their intervals here: all ranks save when rank 0 does, or they would wait for ever."""
    for minutes, expected in ((5.0, 2), (0.0, 1)):  # within the epoch and at its end
        checkpoint, saved = Checkpoint(Path(folder) / f"clock-{minutes}", context), []
        own = minutes if context.is_main else 5.0 - minutes
        save = checkpoint.save
        checkpoint.save = lambda *given, save=save, saved=saved: (saved.append(given[0]), save(*given))  # type: ignore
        training = Training(1, max_steps=3, checkpoint_minutes=own, **QUIET)
        fit(learner_of(context), training, context, checkpoint=checkpoint)
        assert len(saved) == expected, (context.rank, minutes, saved)


def alone() -> Context:
    return init(device="cpu")
