"""Runs whose model reads fields of edges: what only edges tell is learned, alone and on two ranks, and inferred."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.edge_workers import trained
from support.graphs import marked, save_in_parts

import hoploom
from hoploom.cli import main
from hoploom.ranks.spawn import spawn
from hoploom.train.runs import built_in
from hoploom.train.runs.first_run_file import template_for
from hoploom.train.runs.run import complete_setup, load_run, make_model, open_graph, train_loader
from hoploom.train.runs.run_file import parse_run_file

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
Captured = pytest.CaptureFixture[str]
RUN = """
store = "marked.store"
seed = 1
[model]
name = "gatv2"
edges = ["edge_attr", "kind"]
hidden = 12
[loader]
fanouts = [-1, -1]
batch_size = 100
threads = 1
[optimizer]
lr = 0.02
[train]
epochs = 20
[output]
loggers = []
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    data = marked(400)
    data.edge_index = data.edge_index.flip(1)  # so that the store sorts the edges
    data.edge_attr, data.kind, data.weight = data.edge_attr.flip(0), data.kind.flip(0), data.weight.flip(0)
    nodes = torch.arange(1200)
    data.train_mask, data.val_mask, data.test_mask = (
        (nodes >= first) & (nodes < end) for first, end in ((800, 1000), (1000, 1100), (1100, 1200))
    )
    data.bad, data.negative, data.day = data.edge_attr.clone(), -data.edge_attr, data.kind * 10**9
    data.bad[1234] = torch.nan
    save_in_parts(hoploom.from_pyg(data), tmp_path / "marked.store", 2)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def _train(here: Path, *overrides: str, resume: bool = False) -> float:
    """Return the accuracy on the test split."""
    arguments = [f"--set={one}" for one in (f'output.folder="{here / "run"}"', *overrides)]
    arguments += ["--resume"] if resume else []
    assert main(["train", str(here / "run.toml"), "--quiet", *arguments]) == 0
    return float(json.loads((here / "run" / "result.json").read_text())["test"]["accuracy"])


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_a_run_learns_what_only_edges_tell(here: Path, mode: str) -> None:
    assert _train(here, f"loader.mode={mode}") > 0.95
    assert main(["infer", str(here / "run"), "--out", str(here / "out")]) == 0
    loaded = load_run(here / "run")
    assert loaded.model.shape.categories == {"kind": 2}
    rows = hoploom.from_pyg(marked(400))["node"].y[1100:]
    found = torch.tensor(_column(here / "out" / "node", "prediction"))[1100:]
    assert (found == rows).float().mean() > 0.95


def test_a_run_is_loaded_on_a_graph_with_other_categories(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(here, "train.epochs=1")
    assert _train(here, "train.epochs=2", resume=True) > 0
    monkeypatch.setattr(built_in, "scan_rows", None)  # only training reads all edges
    for largest in (0, 2):
        data = marked(400)
        data.kind[:] = largest
        data.train_mask = data.val_mask = data.test_mask = torch.ones(1200, dtype=torch.bool)
        hoploom.from_pyg(data).save(here / f"{largest}.store")
        run = load_run(here / "run", overrides=[f"store={here / f'{largest}.store'}"])
        assert run.model.shape.categories == {"kind": 2}
        if largest == 0:
            assert run.model(data).shape == (1200, 2)
        else:
            with pytest.raises(hoploom.ConfigError, match=r"'kind' .* has a category outside 0 to 1; .* train again"):
                hoploom.infer(run.model, run.store, here / "out")


def _column(folder: Path, name: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(folder)[name].to_pylist()


def test_without_edges_it_stays_at_chance(here: Path) -> None:
    (here / "run.toml").write_text(RUN.replace("edges =", "# edges ="))
    assert _train(here, "train.epochs=3") < 0.7


def test_a_batch_has_the_fields_that_model_and_task_read(here: Path) -> None:
    with hoploom.init(device="cpu") as context:
        run_file = parse_run_file(RUN, folder=here)
        setup = complete_setup(run_file, open_graph(run_file, context), context, trains=True)
        batch = next(iter(train_loader(run_file, setup, context, make_model(run_file, setup))))
    assert {"x", "y", "n_id"} <= set(batch.keys())
    assert not {"train_mask", "weight", "kind", "edge_attr"} & set(batch.keys())
    assert [sorted(block.data) for block in batch.blocks] == [["edge_attr", "kind"]] * 2


def test_two_ranks_train_as_one(here: Path) -> None:
    short = (
        RUN.replace("epochs = 20", "epochs = 2")
        .replace("gatv2", "sage")
        .replace("hidden", 'weights = "weight"\nhidden')
    )
    (here / "run.toml").write_text(short)
    states: list[Any] = []
    for world_size in (1, 2):
        spawn(trained, world_size, [str(here)], device="cpu", timeout=100)
        run = load_run(here / f"of-{world_size}", checkpoint="last")
        states.append(run.model.state_dict())
    assert any(name.startswith("edge_fields") for name in states[0])
    for name, ours in states[0].items():
        torch.testing.assert_close(ours, states[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.edges=edge_atr"], r"model.edges names 'edge_atr', no field of edges; .*did you mean 'edge_attr'"),
        (
            ["model.edges=bad"],
            r"'bad' of edge 1234 of \('node', 'to', 'node'\) is nan; give every edge a finite number",
        ),
        (["model.edges=day"], r"'day' .* holds integers from 0 to 1,000,000,000, .*store numbers as floats"),
        (["model.categories={kind=1}"], r"'kind' of .* holds integers from 0 to 1, .*at most 1; number categories"),
        (["model.name=sage", "model.weights=bad"], r"'bad' of edge 1234 .* is nan"),
        (
            ["model.name=gcn", "model.weights=negative", "loader.mode=subgraph"],
            r"'negative' of edge \d+ .* is -1.0; give every edge a number of at least 0",
        ),
        (["model.name=gcn", "model.weights=weight"], 'model.weights of "gcn" needs loader.mode = "subgraph"'),
        (["model.name=gcn", "model.edges=edge_attr"], 'model.edges is for model.name = "sage" or "gat"'),
        (["model.weights=weight"], 'model.weights is for model.name = "sage" or "gcn"'),
    ],
)
def test_fields_that_do_not_fit_are_one_error_before_the_first_step(
    here: Path, capsys: Captured, overrides: list[str], message: str
) -> None:
    import re

    text = RUN.replace("edges =", "# edges =") if "model.name" in overrides[0] else RUN
    (here / "run.toml").write_text(text)
    assert main(["train", str(here / "run.toml"), *(f"--set={one}" for one in overrides)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert "epoch" not in said


def test_init_names_the_fields_with_numbers(here: Path) -> None:
    text, _ = template_for(here / "marked.store", beside=here)
    line = next(line for line in text.splitlines() if "model reads as features" in line)
    assert "numbers are in edge_attr, weight, bad, negative" in line
    assert parse_run_file(text, folder=here).model.edges is None
