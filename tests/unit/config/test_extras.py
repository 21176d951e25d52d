"""Loading and training need no extra; what needs one says which line to type."""

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from support import ROOT

PLAIN = """
import json, sys
for name in ("pyarrow", "ibis", "duckdb", "pandas", "yaml", "cryptography", "prometheus_client", "pyspark"):
    sys.modules[name] = None  # as if it were not installed
from importlib import import_module
from pathlib import Path
import gc, threading, torch_geometric
threads = threading.active_count()
import hoploom
hoploom.NeighborLoader
started = threading.active_count() - threads, gc.isenabled()
from hoploom.cli import main

store = hoploom.generate("graph.store", num_nodes=200, num_features=4, num_classes=2)
batches = len(list(hoploom.NeighborLoader("graph.store", [2, 2], input_nodes="train", batch_size=50)))
Path("run.toml").write_text('store = "graph.store"\\n[loader]\\nfanouts = [2]\\n[train]\\nepochs = 1\\nmax_steps = 1')
trained = main(["train", "run.toml"])

def refusal(call):
    try:
        call()
    except hoploom.ConfigError as error:
        return str(error)

Path("cluster.yaml").write_text("hosts: [a]")
from hoploom.deploy.resolve import read_cluster
from hoploom.nn.row_tables import parquet_file
import torch
told = [
    refusal(lambda: import_module("hoploom.ingest.tables.build")),
    refusal(lambda: parquet_file(Path("x.parquet"), {"id": torch.arange(2)}).__enter__()),
    refusal(lambda: import_module("hoploom.cli.serving")),
    refusal(lambda: read_cluster(Path("cluster.yaml"))),
]
found = {"batches": batches, "trained": trained, "told": told, "connects": callable(hoploom.connect)}
print(json.dumps({**found, "started": started}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a process found that has no extra."""
    folder = tmp_path_factory.mktemp("plain")
    run = subprocess.run([sys.executable, "-c", PLAIN], cwd=folder, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_importing_hoploom_starts_no_thread_and_gives_collections_back(found: Any) -> None:
    assert found["started"] == [0, True]


def test_loading_and_training_need_no_extra_and_what_does_says_so(found: Any) -> None:
    assert found["batches"] > 0
    assert found["trained"] == 0
    assert found["connects"]
    extras = ["tables", "tables", "cluster", "cluster"]
    assert len(found["told"]) == len(extras)
    for message, extra in zip(found["told"], extras, strict=True):
        assert re.fullmatch(rf"[\w.]+ is not installed; type: pip install 'hoploom\[{extra}\]'", message), message


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'with needs\("(\w+)"\)', sources))
    assert named == extras.keys() - {"all"}
    assert set(re.findall(r"\w+", extras["all"][0])) == {"hoploom", *named}
