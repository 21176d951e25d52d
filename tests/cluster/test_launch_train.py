"""Whole launches of `hoploom train` on loopback: servers, trainers, and the result that one process has, too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hoploom.ingest.synthetic import generate

RUN = """
store = "graph.store"
seed = 3

[loader]
fanouts = [4, 3]
batch_size = 256
threads = 1

[train]
epochs = 1

[output]
loggers = []
"""
WORKER = """
store = "graph.store"
hosts = ["127.0.0.1", "127.0.0.2"]
"""
APART = """
store = "graph.store"
mode = "server-client"
[hosts.data1]
address = "127.0.0.1"
parts = [0]
[hosts.data2]
address = "127.0.0.2"
parts = [1]
[hosts.gpu1]
address = "127.0.0.1"
processes = 2
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    generate(folder / "graph.store", num_nodes=2000, avg_degree=8, num_features=8, num_classes=4, num_parts=2)
    (folder / "run.toml").write_text(RUN)
    hoploom(folder, "train", "run.toml", "--set", "output.folder=alone")
    return folder


def hoploom(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    given = [sys.executable, "-m", "hoploom", *words]
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=110, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.slow  # tests/pages/test_examples.py launches both deployments, too
@pytest.mark.parametrize(("cluster", "num_servers"), [(WORKER, 2), (APART, 2)], ids=["worker", "apart"])
def test_a_launch_trains_as_one_process_does(here: Path, tmp_path: Path, cluster: str, num_servers: int) -> None:
    (here / "cluster.toml").write_text(cluster)
    done = hoploom(here, "launch", "cluster.toml", "--", "train", "run.toml", "--set", f"output.folder={tmp_path}/run")
    assert (done.stdout + done.stderr).count("serving parts") == num_servers
    alone, launched = result(here / "alone"), result(tmp_path / "run")
    assert launched["steps"] == alone["steps"]
    assert launched["test"]["loss"] == pytest.approx(alone["test"]["loss"], rel=1e-3)
