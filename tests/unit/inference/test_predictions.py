"""The task says what a prediction is: in Python and in `hoploom infer`, for every kind of task."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.graphs import ring

import hoploom
from hoploom import ConfigError, LinkPrediction, MultiLabel, NodeClassification, NodeRegression, SeveralTasks
from hoploom.cli import main
from hoploom.inference import Inference, infer
from hoploom.nn import GNN, Shape

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")

LABELS = {"node-classification": "y", "multi-label": "labels", "node-regression": "number"}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (NodeClassification(3), [0, 2]),
        (MultiLabel(3), [[True, False, True], [False, False, True]]),
        (NodeRegression(3), [[2.0, -1.0, 0.5], [-1.0, -2.0, 0.25]]),
    ],
)
def test_a_task_says_what_outputs_predict(task: Any, expected: Any) -> None:
    assert task.predictions(torch.tensor([[2.0, -1.0, 0.5], [-1.0, -2.0, 0.25]])).tolist() == expected


def test_several_tasks_have_a_column_of_predictions_each(tmp_path: Path) -> None:
    store = hoploom.from_pyg(ring(12))
    task = SeveralTasks(
        {"topic": NodeClassification(3), "year": NodeRegression(label="year"), "tags": MultiLabel(2, label="tags")}
    )
    model = GNN("sage", store.schema, Shape(8, 2, 6))
    inference = Inference(task=task, columns=["output", "prediction"])
    table = pq.read_table(infer(model, store, tmp_path / "out", inference=inference))
    assert table.column_names == ["id", "output", "topic_prediction", "year_prediction", "tags_prediction"]
    outputs = torch.tensor(table["output"].to_pylist())
    assert table["topic_prediction"].to_pylist() == outputs[:, :3].argmax(dim=1).tolist()
    assert table["year_prediction"].to_pylist() == outputs[:, 3].tolist()
    assert table["tags_prediction"].to_pylist() == (outputs[:, 4:] > 0).tolist()


def test_one_target_is_a_number_and_no_list() -> None:
    assert NodeRegression().predictions(torch.tensor([[2.0], [-1.0]])).tolist() == [2.0, -1.0]


def test_no_prediction_is_written_of_which_nobody_knows_what_it_means(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Inference has no task, .*; give one, e\.g\. task=NodeClassification\(4\)"):
        Inference(columns=["prediction"])
    with pytest.raises(ConfigError, match="LinkPrediction has no prediction for a node; write the column 'output'"):
        Inference(columns=["prediction"], task=LinkPrediction())
    store = hoploom.from_pyg(ring(12))
    model = GNN("sage", store.schema, Shape(8, 2, 4))
    with pytest.raises(ConfigError, match=r"outputs \[4\] for 'node', the task 3 labels; give the model's task"):
        infer(model, store, tmp_path / "out", inference=Inference(task=MultiLabel(3)))
    for task in (None, LinkPrediction()):
        table = pq.read_table(infer(model, store, tmp_path / str(task), inference=Inference(task=task)))
        assert table.column_names == ["id", "embedding", "output"]


@pytest.fixture(scope="module")
def graph_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring whose nodes have a label for every kind of task."""
    graph, nodes = ring(120), torch.arange(120)
    graph.labels = torch.stack([nodes % 2, nodes % 3 == 0, nodes % 5 < 2], dim=1).float()
    graph.number = nodes / 120
    graph.y = nodes % 4
    for number, name in enumerate(("train_mask", "val_mask", "test_mask")):
        graph[name] = nodes // 40 == number
    path = tmp_path_factory.mktemp("predictions") / "graph.store"
    hoploom.from_pyg(graph).save(path)
    return path


def trained(store: Path, kind: str) -> Path:
    sections = {"task": {"kind": kind}, "model": {"hidden": 8}, "loader": {"fanouts": [3, 2], "batch_size": 32}}
    if kind in LABELS:
        sections["task"]["label"] = LABELS[kind]
    settings = [f"{name}.{key}={json.dumps(value)}" for name, keys in sections.items() for key, value in keys.items()]
    run_file = store.parent / f"{kind}.toml"
    run_file.write_text('store = "graph.store"\n[train]\nepochs = 1\n[output]\nloggers = []\n')
    folder = store.parent / kind
    settings.append(f"output.folder={folder}")
    assert main(["train", str(run_file), "--quiet", *(word for text in settings for word in ("--set", text))]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LABELS, "link-prediction"])
def test_the_command_and_python_write_what_the_task_of_the_run_predicts(
    kind: str, graph_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(graph_store, kind)
    assert main(["infer", str(folder)]) == 0
    by_command, run = pq.read_table(folder / "nodes" / "node"), hoploom.load_run(folder)
    assert pq.read_table(infer(run.model, run.store, folder / "again", inference=Inference(task=run.task))).equals(
        by_command
    )
    assert main(["infer", str(folder), "-o", str(folder / "outputs"), "--columns", "output"]) == 0
    outputs = torch.tensor(pq.read_table(folder / "outputs" / "node")["output"].to_pylist())
    if kind == "link-prediction":
        assert by_command.column_names == ["id", "embedding", "output"]
        capsys.readouterr()
        assert main(["infer", str(folder), "-o", str(folder / "none"), "--columns", "prediction"]) == 2
        assert "LinkPrediction has no prediction for a node; write the column 'output'" in capsys.readouterr().err
        return
    expected = {
        "node-classification": outputs.argmax(dim=1),
        "multi-label": outputs.sigmoid() > 0.5,
        "node-regression": outputs[:, 0],
    }
    assert by_command.column_names == ["id", "embedding", "prediction"]
    assert by_command["prediction"].to_pylist() == expected[kind].tolist()
