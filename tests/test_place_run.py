"""`hoploom train` over a placed store: [placement] is done, and changes nothing of what is learned."""

import os
from pathlib import Path

import pytest
import torch
from place_workers import own_folder

import hoploom
from hoploom import ConfigError
from hoploom.store import hostmemory, placement
from hoploom.train.context import init
from hoploom.train.recipes.reader import parse_recipe
from hoploom.train.runs.run import Result, run

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 64
threads = 1
[train]
epochs = 1
[output]
tensorboard = false
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    hoploom.generate(folder / "graph.store", num_nodes=200, avg_degree=4, num_features=8, num_classes=3, num_parts=2)
    return folder


def _run(here: Path, name: str, *overrides: str) -> Result:
    recipe = parse_recipe(RECIPE, [f"output.folder={here / name}", *overrides], folder=here)
    with init(device=DEVICE) as context:
        return run(recipe, context, progress=False)


def test_a_placed_store_trains_to_the_same_numbers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _run(here, "plain")
    with own_folder() as folder:
        monkeypatch.setattr(hostmemory, "FOLDER", folder)
        placed = _run(here, "placed", "placement.topology=" + DEVICE, "placement.features=30%")
        assert os.listdir(folder) == []
    assert placed.outcome.steps == plain.outcome.steps
    assert placed.test["loss"] == pytest.approx(plain.test["loss"], rel=1e-4)


def test_a_recipe_that_cannot_be_placed_says_where_it_is_wrong(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "kernels_are_interpreted", lambda: False)
    if not torch.cuda.is_available():
        said = r"--set placement.features=20%: the store cannot be placed: .* give 'cuda', or leave the store as it is"
        with pytest.raises(ConfigError, match=said):
            _run(here, "refused", "placement.features=20%")
