"""The pieces of a run, made from run.toml and a store: setup, model, schedules, loaders."""

import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hoploom
from hoploom import ConfigError, DataError, HoploomError, Store
from hoploom.ingest.synthetic import generate
from hoploom.train.runs.run import (
    eval_loader,
    make_model,
    make_optimizer,
    make_scheduler,
    relation_of,
    train_loader,
    training_setup,
)
from hoploom.train.runs.run_file import RunFile, parse_run_file


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of two parts with edge weights."""
    folder = tmp_path_factory.mktemp("graphs") / "graph.store"
    generate(folder, num_nodes=2000, avg_degree=8, num_features=8, num_classes=4, num_parts=2, weights=True)
    return folder


def small_store(**fields: Any) -> Store:
    """Ten nodes in a ring."""
    ring = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
    splits = {
        "train": torch.arange(6),
        "val": torch.tensor([6, 7]),
        "test": torch.tensor([8, 9]),
        "none": torch.empty(0),
    }
    splits["none"] = splits["none"].long()
    x = torch.randn(10, 3)
    return hoploom.from_tensors({"x": x, "y": torch.arange(10) % 3} | fields, ring, splits=splits)


def run_file_with(*overrides: str) -> RunFile:
    return parse_run_file('store = "s"\n[loader]\nfanouts = [2]\n', overrides)


DISAGREEMENTS: list[tuple[list[str], dict[str, Any], type[HoploomError], str]] = [
    (["task.label=z"], {}, ConfigError, r"^--set task.label=z: task.label is 'z', no field of 'node'"),
    (["task.val=valid"], {}, ConfigError, r'valid.*has the splits .*; task.val = "" does without'),
    (["task.train=trian"], {}, ConfigError, r"the split 'trian' is in no node type"),
    (["task.train=none"], {}, ConfigError, r"the split 'none' of 'node' is empty"),
    (["task.node_type=nod"], {}, ConfigError, r"names 'nod', no node type.*did you mean 'node'\?"),
    (["task.num_classes=2"], {}, DataError, r"node 2 is a seed with the label y=2"),
    (["task.label=m"], {"m": torch.ones(10, 4)}, ConfigError, r'rows of shape \[4\].*task.kind = "multi-label"'),
    (
        ["task.label=m"],
        {"m": torch.ones(10).long().index_fill(0, torch.tensor(4), -1)},
        DataError,
        r"label m=-1; .*a null label in a table becomes -1",
    ),
    (["task.label=m"], {"m": torch.zeros(10).long()}, ConfigError, r"the largest label 'm' of the splits is 0"),
    (["train.monitor=acuracy"], {}, ConfigError, r"train.monitor is 'acuracy'.*did you mean 'accuracy'\?"),
    (["loader.weighted=true"], {}, ConfigError, r"built without weight_attr"),
    (["loader.temporal=last"], {}, ConfigError, r"built without time_attr"),
    (["loader.relation_fanouts.too=[1]"], {}, ConfigError, r"names 'too', no relation; there are \['node to node'\]"),
    (["task.kind=link-prediction", "task.relation=a b c"], {}, ConfigError, r"names 'a b c', no relation"),
    (["task.kind=link-prediction", "task.links=nowhere"], {}, ConfigError, r"nowhere has no train, val or test as"),
]


@pytest.mark.parametrize(
    ("overrides", "fields", "kind", "message"), DISAGREEMENTS, ids=[" ".join(entry[0]) for entry in DISAGREEMENTS]
)
def test_a_run_file_that_does_not_fit_the_store_is_refused(
    overrides: list[str], fields: dict[str, Any], kind: type[HoploomError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        training_setup(run_file_with(*overrides), small_store(**fields))


def test_a_mistyped_short_name_of_a_relation_gets_a_hint() -> None:
    edges = {
        ("author", "writes", "paper"): torch.zeros(2, 1).long(),
        ("paper", "cites", "paper"): torch.ones(2, 1).long(),
    }
    schema = hoploom.from_tensors({"author": {}, "paper": {}}, edges, num_nodes={"author": 1, "paper": 2}).schema
    for name, meant in {"writs": "writes", "author writ paper": "author writes paper"}.items():
        with pytest.raises(ConfigError, match=f"task.relation names '{name}', no relation; .* did you mean '{meant}'"):
            relation_of(run_file_with(), "task.relation", schema, name)


def test_the_classes_of_all_splits_are_counted() -> None:
    labels = torch.zeros(10, dtype=torch.int64)
    labels[9] = 5  # in the test split only
    assert training_setup(run_file_with(), small_store(y=labels)).num_outputs == 6
    assert training_setup(run_file_with("task.num_classes=9"), small_store(y=labels)).num_outputs == 9


FACTORIES = [  # my_model.py, what the message says
    ("import nowhere", "my_model cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ("def built(store, n): ...", r"my_model \(/.*my_model.py\) has no function 'make'; write one"),
    ("make = 128", r"my_model \(/.*my_model.py\) has no function 'make'; write one"),
    ("def make(store, n): return 3", r"returned a int; make it a torch.nn.Module"),
    ("def make(store): ...", r"failed: TypeError: make\(\) takes 1 positional argument but 2 were given"),
]


@pytest.mark.parametrize(("code", "message"), FACTORIES, ids=["import", "name", "number", "type", "signature"])
def test_a_factory_that_makes_no_model_is_named(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"my_model_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    text = f'store = "graph.store"\n[model]\nfactory = "{name}:make"\n'
    run_file = parse_run_file(text, folder=tmp_path)
    setup = training_setup(run_file, hoploom.open(graph))
    with pytest.raises(ConfigError, match=message.replace("my_model", name)) as raised:
        make_model(run_file, setup)
    assert str(raised.value).startswith("run.toml:3: ")


def rates(*overrides: str, num_batches: int = 10, steps: int = 40) -> list[float]:
    """The learning rate of every step."""
    run_file = run_file_with("train.epochs=4", "optimizer.lr=1.0", *overrides)
    optimizer = make_optimizer(run_file, torch.nn.Linear(1, 1))
    scheduler: Any = make_scheduler(run_file, optimizer, num_batches, "max")
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_follow_their_curves() -> None:
    cosine = rates("scheduler.name=cosine", "scheduler.min_lr=0.2")
    assert (cosine[0], cosine[20]) == (1.0, pytest.approx(0.6))
    assert cosine == sorted(cosine, reverse=True)
    assert rates("scheduler.name=cosine", "train.max_steps=20", steps=30)[20:] == [0.0] * 10
    warm = rates("scheduler.name=warmup-cosine", "scheduler.warmup=0.25")
    assert warm[:11] == pytest.approx([(step + 1) / 10 for step in range(10)] + [1.0])
    cuts = rates("scheduler.name=step", "scheduler.every=2", "scheduler.factor=0.1", "train.accumulate=3")
    assert cuts[:17] == pytest.approx([1.0] * 8 + [0.1] * 8 + [0.01])  # ten batches make four steps an epoch


ALONE: Any = SimpleNamespace(rank=0, world_size=1, num_cores=2, device=torch.device("cpu"))


def random_store(x: torch.Tensor) -> Store:
    torch.manual_seed(0)
    edge_index = torch.randint(len(x), (2, 12 * len(x)))
    nodes = torch.arange(len(x))
    splits = {"train": nodes[:40], "val": nodes[40:50], "test": nodes[50:]}
    return hoploom.from_tensors({"x": x, "y": nodes % 3}, edge_index, splits=splits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_step_has_the_same_seeds_for_any_number_of_processes(world_size: int) -> None:
    """16 seeds go to 3 processes as 5, 5 and 6."""
    run_file = parse_run_file('store = "s"\n[loader]\nfanouts = [2, 2]\nbatch_size = 16\n')
    setup = training_setup(run_file, random_store(torch.randn(60, 8)))

    def steps(world_size: int, rank: int) -> list[list[int]]:
        place: Any = SimpleNamespace(**vars(ALONE) | {"rank": rank, "world_size": world_size})
        loader = train_loader(run_file, setup, place, make_model(run_file, setup))
        return [batch.n_id[: batch.batch_size].tolist() for batch in loader]

    shares = [steps(world_size, rank) for rank in range(world_size)]
    assert [[*chain(*of_ranks)] for of_ranks in zip(*shares, strict=True)] == steps(1, 0)
    for of_ranks in zip(*shares, strict=True):
        sizes = [len(seeds) for seeds in of_ranks]
        assert max(sizes) - min(sizes) <= 1


def made(store: Store, *overrides: str) -> tuple[Any, Any, Any]:
    run_file = parse_run_file('store = "s"\n[loader]\nfanouts = [2, 2]\nbatch_size = 16\n', overrides)
    setup = training_setup(run_file, store)
    model = make_model(run_file, setup)
    return model, train_loader(run_file, setup, ALONE, model), eval_loader(run_file, setup, ALONE, model, "val")


@pytest.mark.parametrize("kind", ["node-classification", "link-prediction"])
def test_a_gcn_is_told_the_degrees_and_a_sage_gets_layer_one_aggregated(kind: str) -> None:
    store = random_store(torch.randn(60, 8))
    for name, field in (("gcn", "in_degree"), ("sage", "aggregated")):
        for loader in made(store, f"task.kind={kind}", f"model.name={name}")[1:]:
            assert field in next(iter(loader))


@pytest.mark.parametrize("name", ["sage", "gin"])
def test_whole_numbers_as_features_are_trained_on(name: str) -> None:
    model, train, _ = made(random_store(torch.randint(-9, 9, (60, 8), dtype=torch.int8)), f"model.name={name}")
    assert model(next(iter(train))).isfinite().all()


def test_fanouts_of_a_relation_hold_where_evaluation_has_the_same_fanouts_of_its_own() -> None:
    store = random_store(torch.randn(60, 8))
    apart = ("loader.eval_fanouts=[2, 2]", "loader.relation_fanouts={'node to node' = [1, 1]}")
    _, train, val = made(store, *apart)
    for loader, most in ((train, 1), (val, 2)):
        counts = torch.cat([block.edge_index[1].bincount() for batch in loader for block in batch.blocks])
        assert int(counts.max()) == most
