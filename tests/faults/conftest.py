"""What several files of faults share."""

from pathlib import Path

import pytest
from support.graphs import ring

import hoploom


@pytest.fixture(scope="session")
def ring_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "store"
    hoploom.from_pyg(ring(12)).save(path)
    return path
