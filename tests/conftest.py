"""Fixtures that several files share: small graphs as stores. Their makers are in graphs.py."""

import pytest
from graphs import library, ring

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
