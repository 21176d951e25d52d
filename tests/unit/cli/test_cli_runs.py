"""Commands on runs: what train prints for programs, and what evaluate and infer make of a finished run."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import hoploom
from hoploom.cli import main
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic import generate

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 100
[train]
epochs = 2
[output]
loggers = []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    generate(folder / "graph.store", num_nodes=400, avg_degree=6, num_features=8, num_classes=4)
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        printed: list[str] = []
        patched.setattr("builtins.print", lambda *words, file=None, **_: file or printed.append(words[0]))
        assert main(["train", str(folder / "run.toml"), "--json", "--quiet"]) == 0
    assert len(printed) == 1
    found: dict[str, Any] = json.loads(printed[0])
    return found


def test_train_prints_its_result_as_one_object(folder: Path, told: dict[str, Any]) -> None:
    assert told == {"folder": str(folder / "run"), **json.loads((folder / "run" / "result.json").read_text())}
    epochs = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[told["best_epoch"] - 1]["accuracy"] == told["best"] == max(epoch["accuracy"] for epoch in epochs)
    assert {"train_loss", "val_loss"} <= set(epochs[0])


def test_evaluate_gives_the_numbers_of_the_run(
    folder: Path, told: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # a run is found from anywhere
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["metrics"]) == ("test", told["test"])
    assert main(["evaluate", "run", "--split", "val"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("val: accuracy ")
    assert f"accuracy {told['best']:.4f}" in out


def test_infer_writes_a_row_for_every_node(
    folder: Path, told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(told["folder"])
    assert main(["infer", str(run), "-o", str(folder / "out")]) == 0
    assert capsys.readouterr().out == f"written to {folder / 'out'}\n"
    assert main(["infer", str(run), "-o", str(folder / "again"), "--columns", "embedding", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        **{"checkpoint": str(run / "best.safetensors"), "out": str(folder / "again")},
        **{"columns": ["embedding"], "rows": {"node": 400}},
    }
    rows = pq.read_table(folder / "out" / "node")
    assert sorted(rows.column_names) == ["embedding", "id", "prediction"]
    assert rows.num_rows == hoploom.open(folder / "graph.store").schema.node_types[0].num_nodes


def test_a_run_is_loaded_in_one_call_with_its_best_weights(folder: Path, told: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    run = hoploom.load_run(told["folder"])
    assert torch.equal(before, torch.get_rng_state())
    assert (run.checkpoint, run.run_file.model.hidden) == (folder / "run" / "best.safetensors", 8)
    assert not run.model.training
    loader = hoploom.NeighborLoader(run.store, [-1, -1], input_nodes="test", batch_size=1000)
    batch = next(iter(loader))
    with torch.no_grad():
        correct = run.model(batch)[: batch.batch_size].argmax(dim=1) == batch.y[: batch.batch_size]
    assert float(correct.double().mean()) == pytest.approx(told["test"]["accuracy"])
    moved = hoploom.load_run(told["folder"], checkpoint="last", overrides=[f"store={folder / 'graph.store'}"])
    assert moved.checkpoint.name == "last.safetensors"
    with pytest.raises(ConfigError, match=r"is a store, not a run; give the output folder"):
        hoploom.load_run(folder / "graph.store")
    with pytest.raises(ConfigError, match="checkpoint is 'bst'; give 'best' or 'last'"):
        hoploom.load_run(told["folder"], checkpoint="bst")


def test_a_run_on_given_links_is_evaluated_inferred_loaded_and_resumed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own run.toml must be read again by each of them."""
    store = hoploom.open(folder / "graph.store")
    ends = torch.stack([store.neighbors(node)[:1] for node in range(60, 100)]).view(-1)
    lines = "".join(f"{source},{node}\n" for source, node in zip(ends.tolist(), range(60, 100), strict=True))
    for split in ("val", "test"):
        (tmp_path / f"{split}.csv").write_text(f"source,destination\n{lines}")
    text = f'[task]\nkind = "link-prediction"\nlinks = "{tmp_path}"\n'
    run = tmp_path / "run"
    (folder / "links.toml").write_text(f'{RUN}folder = "{run}"\n'.replace("[model]", f"{text}[model]"))
    command = ["train", str(folder / "links.toml"), "--quiet"]
    assert main([*command, "--set", "train.max_steps=3"]) == 0
    assert main([*command, "--resume"]) == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 2
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"] == json.loads((run / "result.json").read_text())["test"]
    assert main(["infer", str(run)]) == 0
    assert pq.read_table(run / "nodes" / "node").num_rows == 400
    assert hoploom.load_run(run).store.num_edges < store.num_edges


@pytest.mark.parametrize("command", ["evaluate", "infer"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "is no run: it has no run.toml; give the output folder of `hoploom train`" in capsys.readouterr().err
    assert main([command, str(tmp_path / "nope")]) == 2
    assert "nope does not exist; give the output folder of `hoploom train`" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text('store = "graph.store"')
    assert main([command, str(tmp_path)]) == 2
    assert "has no best.safetensors; train first" in capsys.readouterr().err
