"""`hoploom init` and `hoploom train`: what a run leaves behind, how it goes on after faults, and what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import hoploom
from hoploom.cli import main
from hoploom.ingest.synthetic import generate
from hoploom.nn.models import KINDS
from hoploom.ranks.context import init
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.loop import evaluate
from hoploom.train.runs.first_run_file import template_for
from hoploom.train.runs.run import eval_loader, make_model, run, training_setup
from hoploom.train.runs.run_file import parse_run_file, read_run_file

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

LIMIT = 110  # seconds that a command may take
LABELS, TRAIN = torch.zeros(3).long(), {"train": torch.arange(3)}
RUN = """
store = "graph.store"
seed = 3

[model]
factory = "trapped:make"

[loader]
fanouts = [4, 3]
batch_size = 256
threads = 1

[optimizer]
lr = 0.01

[train]
epochs = 3

[output]
loggers = []
"""
# A model that can be told to send a signal at a batch: the file `trap` holds "rank batch whom signal".
MODEL = """
import os, signal
from pathlib import Path
from hoploom.nn import GNN, Shape

TRAP = Path(__file__).parent / "trap"

class Trapped(GNN):
    num_batches = 0

    def forward(self, batch):
        if self.training:
            self.num_batches += 1
            if TRAP.exists():
                self.spring(*TRAP.read_text().split())
        return super().forward(batch)

    def spring(self, rank, batch, whom, name):
        if (os.environ.get("RANK", "0"), self.num_batches) == (rank, int(batch)):
            TRAP.unlink()
            os.kill({"self": os.getpid(), "parent": os.getppid()}[whom], getattr(signal, name))

def make(store, num_outputs, hidden=16):
    return Trapped("sage", store.schema, Shape(hidden, 2, num_outputs, dropout=0.1))
"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small homogeneous and a small heterogeneous graph."""
    folder = tmp_path_factory.mktemp("graphs")
    given: dict[str, Any] = {"num_features": 8, "num_classes": 4}
    generate(folder / "graph.store", num_nodes=2000, avg_degree=8, num_parts=2, weights=True, **given)
    generate(folder / "papers.store", num_nodes=600, avg_degree=6, num_features=8, num_classes=4, heterogeneous=True)
    return folder


@pytest.fixture
def here(tmp_path: Path, graphs: Path) -> Iterator[Path]:
    """A folder with a run.toml, its model, and the graphs."""
    for name in ("graph.store", "papers.store"):
        (tmp_path / name).symlink_to(graphs / name)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "trapped.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("trapped", None)
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


def train(here: Path, *arguments: str, output: str = "run") -> int:
    """The command in this process."""
    return main(["train", str(here / "run.toml"), "--set", f"output.folder={here / output}", *arguments])


def result(here: Path, output: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here / output / "result.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_learns_and_leaves_all_it_did(here: Path, capsys: Captured) -> None:
    assert train(here) == 0
    out, err = capsys.readouterr()
    found, num_train = result(here), hoploom.open(here / "graph.store").split("train").numel()
    assert found["test"]["accuracy"] > 0.5  # of four classes
    assert (found["stopped"], found["epochs"], found["monitor"]) == ("done", 3, "accuracy")
    assert f"test: accuracy {found['test']['accuracy']:.4f}" in out
    assert f"written to {here / 'run'}" in out
    assert "  3/3  " in err
    steps = lines(here / "run" / "steps-rank0.jsonl")
    assert len(steps) == found["steps"] == 3 * -(-num_train // 256)
    assert sum(step["seeds"] for step in steps) == 3 * num_train
    names = {"best.safetensors", "last.safetensors", "metrics.jsonl", "result.json", "run.toml", "steps-rank0.jsonl"}
    names |= {"events.jsonl", "times-rank0.jsonl"}
    assert {path.name for path in (here / "run").iterdir()} == names
    assert "run holds a run already; continue it with --resume" in refusal(capsys, train(here))
    shutil.move(here / "run", here / "first")
    assert main(["train", str(here / "first" / "run.toml"), "--quiet"]) == 0  # the resolved run_file says it all
    assert capsys.readouterr().err == ""
    assert result(here) == found


def test_the_test_split_is_evaluated_with_the_best_checkpoint(here: Path) -> None:
    counted = "self.num_batches += 1"
    forgetful = f"{counted}\n            if self.num_batches > 9: [p.data.neg_() for p in self.layers[-1].parameters()]"
    (here / "trapped.py").write_text(MODEL.replace(counted, forgetful))
    run_file = read_run_file(here / "run.toml", [f"output.folder={here / 'run'}", "train.epochs=2"])
    with init() as context:
        found = run(run_file, context, progress=False)
        assert (found.outcome.steps, found.outcome.best_epoch) == (10, 1)
        setup = training_setup(run_file, hoploom.open(here / "graph.store"))
        model = make_model(run_file, setup)
        assert Checkpoint(here / "run", context).restore("best", {"model": model}) is not None
        assert found.test == evaluate(model, eval_loader(run_file, setup, context, model, "test"), setup.task, context)
        val = evaluate(model, eval_loader(run_file, setup, context, model, "val"), setup.task, context)
    assert found.outcome.best == val["accuracy"] == max(epoch["accuracy"] for epoch in found.outcome.history)


def test_a_best_checkpoint_that_is_gone_is_not_replaced_by_the_last_model(here: Path, capsys: Captured) -> None:
    assert train(here, "--set", "train.epochs=1") == 0
    (here / "run" / "best.safetensors").unlink()
    capsys.readouterr()
    message = refusal(capsys, train(here, "--resume", "--set", "train.epochs=1", "--quiet"))
    assert f"{here}/run/best.safetensors is gone, so the best model cannot be tested; put it back" in message
    assert not (here / "run" / "result.json").exists()


def refusal(capsys: Captured, code: int, expected: int = 2) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err.splitlines()
    assert (code, len(err)) == (expected, 1), err
    return str(err[0])


def test_without_validation_and_test_a_run_only_trains(here: Path, capsys: Captured) -> None:
    assert train(here, "--set", "task.val=", "--set", "task.test=", "--set", "train.max_steps=2") == 0
    assert result(here)["test"] == {}
    assert result(here)["best"] is None
    assert re.fullmatch("trained for less than an epoch, 2 steps, .*\nwritten to .*\n", capsys.readouterr().out)


def test_ctrl_c_is_a_clean_end_and_resume_gives_the_same_numbers(here: Path, capsys: Captured) -> None:
    (here / "trap").write_text("0 7 self SIGINT")
    assert train(here, "--set", "model.options.hidden=8") == 130
    out, err = capsys.readouterr()
    assert out.startswith("interrupted after 1 epoch, 7 steps")
    way_on = f"hoploom train {here}/run.toml --set output.folder={here}/run --set model.options.hidden=8 --resume"
    saved = f"the last good checkpoint is {here}/run/last.safetensors, of epoch 2, step 7"
    assert err.splitlines()[-1] == f"hoploom: interrupted; {saved}; continue with: {way_on}"
    assert not (here / "run" / "result.json").exists()
    assert main(way_on.split()[1:]) == 0
    shown = [line.strip().split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown[-4:] == ["hoploom: loader threads 1", "epoch", "2/3", "3/3"]  # it did not begin anew
    assert train(here, "--set", "model.options.hidden=8", output="other") == 0
    assert result(here) == result(here, "other")
    assert [step["loss"] for step in lines(here / "run" / "steps-rank0.jsonl")] == [
        step["loss"] for step in lines(here / "other" / "steps-rank0.jsonl")
    ]


def test_ranks_that_were_asked_to_stop_are_no_complete_run(here: Path, capsys: Captured, monkeypatch: Patch) -> None:
    """Ranks return as if all were well; here the first one runs in this process."""

    def spawn(fn: Any, num_processes: int, work: Any, *, device: str | None) -> None:
        with init(device=device) as context:
            fn(context, *work)

    monkeypatch.setattr("hoploom.ranks.spawn.spawn", spawn)
    assert train(here, "--processes", "2", "--set", "train.epochs=1") == 0
    (here / "trap").write_text("0 2 self SIGTERM")
    assert train(here, "--processes", "2", "--resume") == 130  # the result of the shorter run is not its own
    way_on = f"hoploom train {here}/run.toml --set output.folder={here}/run --processes 2 --resume"
    assert capsys.readouterr().err.endswith(f"; continue with: {way_on}\n")
    assert train(here, "--processes", "2", "--resume") == 0
    assert result(here)["epochs"] == 3


@pytest.mark.slow  # test_fit_ranks.py has a signal for one of two ranks, test_spawn.py one for their parent
@pytest.mark.parametrize("told", ["parent SIGINT", "self SIGTERM"])
def test_two_ranks_end_when_told_and_one_goes_on_as_if_nothing_had_been(told: str, here: Path, capfd: Captured) -> None:
    (here / "run.toml").write_text(RUN.replace("[model]", "[model]\noptions = { hidden = 12 }"))
    (here / "trapped.py").write_text(MODEL.replace("dropout=0.1", "dropout=0.0"))  # ranks drop for themselves
    (here / "trap").write_text(f"1 7 {told}")
    assert train(here, "--processes", "2") == 130
    assert re.search(r"\nhoploom: interrupted; .*, of epoch 2, step .; continue with: h.*\n$", capfd.readouterr().err)
    assert len(lines(here / "run" / "steps-rank1.jsonl")) in (7, 8)
    assert train(here, "--resume") == 0
    assert train(here, output="other") == 0
    mine, other = result(here), result(here, "other")
    assert mine["test"] == pytest.approx(other["test"], abs=2e-3)
    assert (mine["steps"], mine["epochs"]) == (other["steps"], other["epochs"])


def test_a_run_may_be_made_longer(here: Path, capsys: Captured) -> None:
    assert train(here, "--set", "train.epochs=1") == 0
    assert train(here, "--set", "train.epochs=2", "--resume") == 0
    assert train(here, "--set", "train.epochs=2", output="other") == 0
    assert result(here) == result(here, "other")
    capsys.readouterr()
    message = refusal(capsys, train(here, "--resume", "--set", "optimizer.lr=0.02"))
    assert "--set optimizer.lr=0.02: optimizer.lr is 0.02, but was 0.01 when the run in " in message


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun_from_the_last_checkpoint(here: Path) -> None:
    (here / "trapped.py").write_text(MODEL.replace("dropout=0.1", "dropout=0.0"))
    (here / "trap").write_text("1 7 self SIGKILL")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [sys.executable, "-m", *torchrun, "-m", "hoploom", "train", str(here / "run.toml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert not (here / "trap").exists()
    assert train(here, output="other") == 0
    assert result(here)["test"] == pytest.approx(result(here, "other")["test"], abs=2e-3)
    steps = [step["step"] for step in lines(here / "run" / "steps-rank1.jsonl")]
    assert steps == [*range(1, result(here)["steps"] + 1)]


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_command_that_it_names_goes_on(here: Path, capfd: Captured) -> None:
    (here / "trapped.py").write_text(MODEL.replace("dropout=0.1", "dropout=0.0"))
    (here / "trap").write_text("1 3 self SIGKILL")
    assert train(here, "--processes", "2") == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("hoploom: rank 1 was killed by SIGKILL")
    assert (
        f"; the last good checkpoint is {here}/run/last.safetensors, of epoch 1, step 1; continue with: hoploom "
        in said
    )
    assert main(said.partition("continue with: hoploom ")[2].split()) == 0
    assert train(here, output="other") == 0
    assert result(here)["test"] == pytest.approx(result(here, "other")["test"], abs=2e-3)
    steps = [step["step"] for step in lines(here / "run" / "steps-rank1.jsonl")]
    assert steps == [*range(1, result(here)["steps"] + 1)]


def test_a_loss_that_is_not_finite_ends_with_its_step_and_rank(here: Path, capsys: Captured) -> None:
    assert train(here, "--set", "optimizer.lr=1e30", "--set", "optimizer.name=sgd") == 1
    assert re.match("hoploom: the loss is .*step .*on rank 0", capsys.readouterr().err.splitlines()[-1])


QUICK = ("gcn", "gin", "rgat")  # the others differ from these in one layer, which tests/unit/nn compares with PyG's
MODELS = [  # one relation is no special case
    pytest.param(
        "papers" if KINDS[kind].any_relations else "graph", kind, marks=[] if kind in QUICK else pytest.mark.slow
    )
    for kind in KINDS
    if not KINDS[kind].needs_features
]
SHORT = ("train.epochs=4", "loader.batch_size=64", "model.hidden=16", "output.loggers=[]")


def learned(here: Path, run_file: str, *overrides: str) -> dict[str, float]:
    """The metrics of the test split after a short run, in which the loss has fallen."""
    (here / "short.toml").write_text(run_file)
    assert main(["train", str(here / "short.toml"), *(f"--set={key}" for key in (*SHORT, *overrides)), "--quiet"]) == 0
    losses = [epoch["train_loss"] for epoch in lines(here / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.9 * losses[0]
    found: dict[str, float] = result(here)["test"]
    return found


@pytest.mark.parametrize(("graph", "kind"), MODELS)
def test_every_model_finds_the_communities_of_a_graph(here: Path, graph: str, kind: str) -> None:
    run_file = template_for(here / f"{graph}.store", beside=here)[0].replace("node_type =", "# node_type =")
    epochs = ["train.epochs=16"] if kind == "hgt" else []  # it learns slowest
    found = learned(here, run_file, f"model.name={kind}", "model.norm=true", "optimizer.lr=0.01", *epochs)
    assert found["accuracy"] > (0.45 if kind == "gin" else 0.65)  # of four classes; sums of neighbours learn slowest


def test_links_between_types_are_learned(here: Path) -> None:
    run_file = 'store = "papers.store"\n[task]\nkind = "link-prediction"\nrelation = "writes"\n[model]\nname = "rsage"'
    assert learned(here, run_file, "optimizer.lr=0.02")["auroc"] > 0.6


def test_init_writes_what_trains(here: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.chdir(here)
    assert main(["init", "new.toml", "--store", "graph.store"]) == 0
    assert "then: hoploom train new.toml" in capsys.readouterr().out
    text = (here / "new.toml").read_text()
    assert main(["train", "new.toml", "--quiet", "--set", "train.epochs=1", "--set", "model.hidden=8"]) == 0
    if find_spec("tensorboard") is not None:
        assert list((here / "run" / "tensorboard").iterdir())
    capsys.readouterr()
    assert "new.toml exists; give another path" in refusal(capsys, main(["init", "new.toml"]))
    assert (here / "new.toml").read_text() == text
    assert read_run_file("new.toml").store == here / "graph.store"


def test_init_fills_in_what_the_store_knows(here: Path) -> None:
    run_file = parse_run_file(template_for(here / "papers.store", beside=here)[0], folder=here)
    assert (run_file.model.name, run_file.task.node_type, run_file.task.label) == ("rsage", "paper", "y")
    fields, splits = {"x": torch.randn(10, 3), "y": torch.zeros(10, 5)}, {"training": [0, 1], "valid": [2]}
    store = hoploom.from_tensors(
        fields, torch.zeros(2, 4).long(), splits={name: torch.tensor(ids) for name, ids in splits.items()}
    )
    store.save(here / "y.store")
    task = parse_run_file(template_for(here / "y.store", beside=here)[0]).task
    assert (task.kind, task.train, task.val, task.test) == ("multi-label", "training", "valid", "")


@pytest.mark.parametrize(
    ("fields", "splits", "said"),
    [
        ({"y": LABELS}, TRAIN, "node-classification, because 'node' has splits"),
        ({"y": LABELS}, {}, "link-prediction, because 'node' has the label 'y', but no split; .*add split"),
        ({"original_id": torch.zeros(3, 4).byte()}, TRAIN, "link-prediction, .*has no label field"),
    ],
)
def test_init_says_which_task_it_chose_and_why(
    tmp_path: Path, capsys: Captured, fields: Any, splits: Any, said: str
) -> None:
    edges = torch.zeros(2, 4, dtype=torch.int64)
    hoploom.from_tensors({"x": torch.randn(3, 3), **fields}, edges, splits=splits).save(tmp_path / "a.store")
    assert main(["init", str(tmp_path / "run.toml"), "--store", str(tmp_path / "a.store")]) == 0
    assert re.search(f"^task: {said}", capsys.readouterr().err, re.MULTILINE)
    assert read_run_file(tmp_path / "run.toml").task.kind == said.partition(",")[0]


def test_init_leaves_no_relation_out_that_may_hold_the_links_turned_round(tmp_path: Path) -> None:
    writes = torch.tensor([[0, 1, 1], [2, 0, 3]])
    edges = {("author", "writes", "paper"): writes, ("paper", "by", "author"): writes.flip(0)}
    store = hoploom.from_tensors({"author": {}, "paper": {}}, edges, num_nodes={"author": 2, "paper": 4})
    store.save(tmp_path / "a.store")
    assert main(["init", str(tmp_path / "run.toml"), "--store", str(tmp_path / "a.store")]) == 0
    task = read_run_file(tmp_path / "run.toml").task
    assert task.relation == "author writes paper"
