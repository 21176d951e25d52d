"""A run on links that learns labels of nodes, too: one model, metrics of both, resumed and over processes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.learned_workers import shop

import hoploom
from hoploom import ConfigError
from hoploom.cli import main
from hoploom.train.checkpoint import read_state
from hoploom.train.runs.run import load_run, training_setup
from hoploom.train.runs.run_file import parse_run_file, read_run_file

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
Captured = pytest.CaptureFixture[str]

RUN = """
store = "shop.store"
seed = 3
[task]
kind = "link-prediction"
relation = "buys"
more = { y = "node-classification" }
weights = { y = 0.5 }
[model]
name = "rsage"
hidden = 8
[loader]
fanouts = [4, 3]
batch_size = 400
threads = 1
[train]
epochs = 3
[output]
loggers = []
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a run.toml, and a shop whose users have no features, and whose items have classes."""
    store = shop()
    data = {"user": {}, "item": {"x": store["item"].x[:], "y": store["item"].y[:]}}
    bought = torch.randint(0, 250, (2, 3000), generator=torch.Generator().manual_seed(2))
    edges = {("user", "buys", "item"): bought, ("item", "rev_buys", "user"): bought.flip(0)}
    splits = {"train": torch.arange(130), "val": torch.arange(130, 190), "test": torch.arange(190, 250)}
    made = hoploom.from_tensors(data, edges, num_nodes={"user": 403, "item": 250}, splits={"item": splits})
    made.save(tmp_path / "shop.store")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def train(here: Path, output: str, *options: str) -> dict[str, Any]:
    given = ["train", str(here / "run.toml"), "--quiet", f"--set=output.folder={here / output}", *options]
    assert main(given) == 0
    found: dict[str, Any] = json.loads((here / output / "result.json").read_text())
    return found


@pytest.mark.slow
def test_a_run_has_the_metrics_of_links_and_of_labels(here: Path, capsys: Captured) -> None:
    found = train(here, "run")
    names = {"auroc", "average_precision", "loss", "y_accuracy", "y_f1_macro", "nodes_loss"}
    assert names <= found["test"].keys()
    history = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(history) == 3
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert names - {"loss"} | {"val_loss"} <= history[-1].keys()
    capsys.readouterr()
    assert main(["evaluate", str(here / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(found["test"])


def test_labels_have_the_first_columns_and_the_decoder_the_others(here: Path, capsys: Captured) -> None:
    train(here, "run", "--set=model.decoder=distmult", "--set=train.epochs=1")
    loaded, count = load_run(here / "run"), int(hoploom.open(here / "shop.store")["item"].y[:].max()) + 1
    assert loaded.model.shape.out == count + 8
    capsys.readouterr()
    assert main(["infer", str(here / "run"), "--columns", "output,prediction", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["columns"], told["rows"]) == (["output", "y_prediction"], {"user": 403, "item": 250})
    items = pq.read_table(here / "run" / "nodes" / "item")
    outputs = torch.tensor(items["output"].to_pylist())
    assert items["y_prediction"].to_pylist() == outputs[:, :count].argmax(dim=1).tolist()
    assert pq.read_table(here / "run" / "nodes" / "user").column_names == ["id", "output"]
    capsys.readouterr()
    assert main(["infer", str(here / "run"), "-o", str(here / "best"), "--best", "3"]) == 2
    assert "--best scores whole outputs, and here some are of labels" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_stopped_within_an_epoch_resumes_both_loaders(here: Path) -> None:
    """The 130 labelled seeds are one batch, so their loader begins an epoch at every step of links."""
    train(here, "run", "--set=train.max_steps=9", "--set=loader.batch_size=100")
    train(here, "run", "--resume", "--set=loader.batch_size=100")
    train(here, "whole", "--set=loader.batch_size=100")
    one, other = (read_state(here / name / "last.safetensors")["parts"] for name in ("run", "whole"))
    assert one["loader of nodes"] == other["loader of nodes"]
    assert one["loader of nodes"]["epoch"] > one["loader"]["epoch"]
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


@pytest.mark.slow  # two processes import torch
def test_two_processes_learn_what_one_learns(here: Path) -> None:
    two, one = train(here, "two", "--processes", "2"), train(here, "one")
    assert two["test"] == pytest.approx(one["test"], rel=1e-2)
    states = [read_state(here / name / "last.safetensors")["parts"]["model"] for name in ("two", "one")]
    for name, value in states[0].items():
        assert float((value - states[1][name]).norm() / states[1][name].norm().clamp(min=0.1)) < 1e-3, name


def test_labels_that_are_not_there_are_named(here: Path) -> None:
    run_file = parse_run_file(RUN, ["task.more={z='node-classification'}", "task.weights={}"], folder=here)
    with pytest.raises(ConfigError, match=r"^--set task.more=.*: task.more.z names 'z', no field"):
        training_setup(run_file, hoploom.open(here / "shop.store"))
    run_file = parse_run_file(RUN, ["task.more={x='node-classification'}", "task.weights={}"], folder=here)
    with pytest.raises(ConfigError, match=r'not one class each; use task.more.x = "multi-label", or another'):
        training_setup(run_file, hoploom.open(here / "shop.store"))
    run_file = read_run_file(here / "run.toml", ["task.weights={other=1.0}"])
    with pytest.raises(ConfigError, match=r"weights has 'other', and the tasks are \['y'\]"):
        training_setup(run_file, hoploom.open(here / "shop.store"))


def test_the_nodes_of_labels_beside_links_are_chosen_as_those_of_labels_alone() -> None:
    """Both types have splits, and neither has validation nodes."""
    splits = {name: {"train": torch.arange(6), "rest": torch.arange(6, 9)} for name in ("user", "item")}
    data = {name: {"x": torch.randn(9, 2), "y": torch.arange(9) % 3} for name in splits}
    bought = torch.cartesian_prod(torch.arange(9), torch.arange(9)).t()
    store = hoploom.from_tensors(data, {("user", "buys", "item"): bought}, splits=splits)
    for given, message in (
        ([], r"the split 'train' is in \['user', 'item'\].*name one in task.node_type"),
        (["task.node_type=item"], r"task.val is 'val', 'item' has the splits .*task.val = \"\" does without"),
        (["task.node_type=item", "task.val=''", "task.test=last"], "task.test is 'last', 'item' has the splits"),
    ):
        with pytest.raises(ConfigError, match=message):
            training_setup(parse_run_file(RUN, given), store)
    run_file = parse_run_file(RUN, ["task.node_type=item", "task.val=''", "task.test=rest"])
    assert training_setup(run_file, store).sides["nodes"].seeds == {
        "train": ("item", "train"),
        "test": ("item", "rest"),
    }
    with pytest.raises(ConfigError, match=r'task.val is for .* and that is "link-prediction"; set task.more, or leave'):
        parse_run_file(RUN, ["task.more={}", "task.weights={}", "task.val=''"])
