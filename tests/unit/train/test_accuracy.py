"""Models of hoploom.nn, trained by `fit` on sampled batches in one and in two processes, are as accurate as published.

Tolokers: ROC-AUC within one point. Coauthor-Physics: accuracy within half a point. The runs are those of
examples/real_graphs.py, which anybody can repeat.
"""

import json
from pathlib import Path

import pytest
from support.real_graphs import file_of, real_graphs

import hoploom

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN = {"auroc": 0.01, "accuracy": 0.005}


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
