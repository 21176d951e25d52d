"""Fixtures that several files share: small graphs as stores. Their makers are in graphs.py."""

import os
import shutil
from pathlib import Path

import pytest
from graphs import library, random_graph, ring, save_in_parts

import hoploom
from hoploom import Store


@pytest.fixture
def ring_store() -> Store:
    """The ring of 12 nodes in memory."""
    return hoploom.from_pyg(ring(12))


@pytest.fixture
def library_store() -> Store:
    """Authors, papers and venues in memory, with edge weights."""
    return hoploom.from_pyg(library(), weight_attr="weight")


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written without waiting for the disk: what a test reads back is in memory anyway."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def sound_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sound stores, each in two parts: ring, library (weights), events (weights and edge times)."""
    folder = tmp_path_factory.mktemp("sound")
    save_in_parts(hoploom.from_pyg(ring(12)), folder / "ring", 2)
    save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), folder / "library", 2)
    events = hoploom.from_pyg(random_graph(20, 90, 1), weight_attr="weight", time_attr="edge_time")
    save_in_parts(events, folder / "events", 2)
    return folder


@pytest.fixture
def ring_folder(sound_stores: Path, tmp_path: Path) -> Path:
    """A copy of the ring to damage."""
    return Path(shutil.copytree(sound_stores / "ring", tmp_path / "ring"))


@pytest.fixture
def events_folder(sound_stores: Path, tmp_path: Path) -> Path:
    """A copy of the graph with weights and times to damage."""
    return Path(shutil.copytree(sound_stores / "events", tmp_path / "events"))
