"""The example that reads and learns real graphs, and where their files are for the tests."""

import os
import sys
from pathlib import Path

import pytest

from support import ROOT

if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))  # spawned ranks import the example, too
import real_graphs

FOLDER = Path(os.environ.get("HOPLOOM_DATA") or ROOT.parent / "shared" / "data")

__all__ = ["FOLDER", "file_of", "real_graphs"]


def file_of(graph: str) -> Path:
    path = real_graphs.find(FOLDER, graph)
    if path is None:
        pytest.skip(f"no {real_graphs.FILES[graph]} in {FOLDER}; set HOPLOOM_DATA to the folder that holds it")
    return path
