"""`hoploom train` with W&B for real, without a network: their own readers find what the run's folder has."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hoploom.ingest.synthetic import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BLOCK, FULL, LAST = 32768, 1, 4  # of the files of W&B
LIMIT = 170  # seconds that a command may take
RUN = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 128
[output]
loggers = ["tensorboard", "wandb"]
"""


def written_in(run: Path) -> dict[str, dict[int, float]]:
    """Return the numbers in the run's folder, by metric and step."""
    found: dict[str, dict[int, float]] = {}
    for file, group in (("steps-rank0", "step"), ("metrics", "epoch")):
        for line in (run / f"{file}.jsonl").read_text().splitlines():
            read = json.loads(line)
            for name in ("loss", "learning_rate") if group == "step" else read.keys() - {"step"}:
                found.setdefault(f"{group}/{name}", {})[read["step"]] = read[name]
    result = json.loads((run / "result.json").read_text())
    return found | {f"test/{name}": {result["steps"]: value} for name, value in result["test"].items()}


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of a W&B run: LevelDB's log format, behind 7 bytes; a record may go over several blocks."""
    file, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(file):
        if BLOCK - at % BLOCK < 7:  # too short for a header: padding
            at += BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", file, at)
        record, at = record + file[at + 7 : at + 7 + size], at + 7 + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The history of such a run."""
    from wandb.proto import wandb_internal_pb2

    for read in records_of(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(read)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def test_wandb_has_one_run_with_the_numbers_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    graph = {"num_nodes": 1500, "avg_degree": 6, "num_features": 8, "num_classes": 3, "homophily": 0.8, "seed": 3}
    generate(tmp_path / "graph.store", **graph)
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "hoploom", "train", "run.toml", "--quiet", "--resume", "--set"]
    offline = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    for epochs in (1, 3):  # ends after one epoch, and is continued
        subprocess.run([*command, f"train.epochs={epochs}"], cwd=tmp_path, env=offline, check=True, timeout=LIMIT)
    written, run_id = written_in(tmp_path / "run"), (tmp_path / "run" / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.stem for path in files] == [f"run-{run_id}"] * 2  # begun, and continued
    found: dict[str, dict[int, float]] = {}
    for row in (row for path in files for row in rows_of(path)):
        for name in row.keys() & written.keys():
            found.setdefault(name, {})[row["step"]] = row[name]
    for name, values in written.items():
        if not name.startswith("test/"):  # the run that stopped after an epoch was tested, too
            assert found[name] == pytest.approx(values), name
    assert found["test/accuracy"] == pytest.approx(written["test/accuracy"] | found["test/accuracy"])
