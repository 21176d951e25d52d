"""What the tests of cluster files share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a cluster file."""

    def at(text: str, name: str = "cluster.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return at
