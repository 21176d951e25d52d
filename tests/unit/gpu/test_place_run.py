"""`hoploom train` over a placed store: [placement] is done, and changes nothing of what is learned."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.place_workers import own_folder

import hoploom
from hoploom import ConfigError
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place import request as placement
from hoploom.ranks.context import init
from hoploom.train.runs.read_run_file import parse_recipe
from hoploom.train.runs.run import Result, run
from hoploom.train.runs.run_file import to_toml

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


def test_a_share_of_the_features_is_text_or_a_number() -> None:
    section = RECIPE + "[placement]\nfeatures = "
    for text, share in {"0.2": 0.2, "0.0": 0.0, "'20%'": "20%", "'4GB'": "4GB"}.items():
        recipe = parse_recipe(section + text)
        assert recipe.placement.features == share
        assert parse_recipe(to_toml(recipe)) == recipe
    for override, share in {"0.3": 0.3, "30%": "30%", "3MB": "3MB", " host": "host"}.items():
        assert parse_recipe(section + "'auto'", [f"placement.features={override}"]).placement.features == share


def test_a_recipe_that_cannot_be_placed_says_where_it_is_wrong(here: Path) -> None:
    said = (
        r"--set placement.features=7B: the store cannot be placed: features is 7 bytes, .* or leave \[placement\] out"
    )
    with pytest.raises(ConfigError, match=said):
        _run(here, "refused", "placement.features=7B")


def no_triton() -> bool:
    raise ConfigError("placing needs Triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "interprets", [lambda: True, lambda: False, no_triton], ids=["interpreted", "not", "no triton"]
)
@pytest.mark.parametrize("given", ["topology=cuda", "topology=auto", "features=20%", "features=cuda"])
def test_a_run_without_a_gpu_is_told_to_leave_placement_out(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str, interprets: Callable[[], bool]
) -> None:
    monkeypatch.setattr(placement, "kernels_are_interpreted", interprets)
    key = "placement." + given.partition("=")[0]
    if not given.endswith("cuda") and interprets is not no_triton and interprets():
        return  # kernels run
    for why, overrides in {"there is no GPU here": (), 'train.device is "cpu"': ("train.device=cpu",)}.items():
        said = f"--set placement.{given}: {key} has no effect: this run is on cpu ({why}); leave [placement] out"
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
            _run(here, "refused", f"placement.{given}", *overrides)
