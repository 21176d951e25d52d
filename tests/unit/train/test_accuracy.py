"""Models of hoploom.nn, trained by `fit` on sampled batches in one and in two processes, are as accurate as published.

Tolokers: ROC-AUC within one point. Coauthor-Physics: accuracy within half a point. The runs are those of
examples/real_graphs.py, which anybody can repeat.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from support import ROOT

import hoploom

if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))  # spawned ranks import the example, too
import real_graphs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FOLDER = Path(os.environ.get("HOPLOOM_DATA") or ROOT.parent / "shared" / "data")
WITHIN = {"auroc": 0.01, "accuracy": 0.005}


def file_of(graph: str) -> Path:
    path = real_graphs.find(FOLDER, graph)
    if path is None:
        pytest.skip(f"no {real_graphs.FILES[graph]} in {FOLDER}; set HOPLOOM_DATA to the folder that holds it")
    return path


@pytest.fixture(scope="session")
def tolokers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tolokers") / "graph.store"
    hoploom.from_pyg(real_graphs.read_tolokers(file_of("tolokers"))).save(path)
    return path


@pytest.fixture(scope="session")
def physics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("physics") / "graph.store"
    hoploom.from_pyg(real_graphs.read_physics(file_of("physics"))).save(path)
    return path


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("name", real_graphs.CASES)
def test_a_sampled_model_is_as_accurate_as_published(
    name: str, num_processes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = real_graphs.CASES[name]
    store: Path = request.getfixturevalue(name.split("-")[0])
    hoploom.spawn(real_graphs.train, num_processes, (case, store, tmp_path / "result.json"))
    found = json.loads((tmp_path / "result.json").read_text())
    assert found[case.metric] >= case.published - WITHIN[case.metric], found
