"""`hoploom init` chooses a task that the store can be trained on, and says why."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hoploom
from hoploom.cli import main
from hoploom.train.runs.run_file import read_run_file


@pytest.mark.parametrize(
    ("fields", "splits", "said"),
    [
        ({"y": torch.zeros(3).long()}, {"train": torch.arange(3)}, "node-classification, because 'node' has splits"),
        (
            {"y": torch.zeros(3).long()},
            {},
            "link-prediction, because 'node' has the label 'y', but no split; .*add split",
        ),
        (
            {"original_id": torch.zeros(3, 4).byte()},
            {"train": torch.arange(3)},
            "link-prediction, .*has no label field",
        ),
    ],
)
def test_init_says_which_task_it_chose_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: Any, splits: Any, said: str
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
