"""What `import hoploom` gives: names, completion, signatures."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.graphs import ring

import hoploom
from hoploom import ConfigError, train


@pytest.mark.parametrize("name", ["NodeClassification", "NodeRegression", "MultiLabel", "LinkPrediction"])
def test_tasks_learner_and_training_are_at_the_top(name: str) -> None:
    assert getattr(hoploom, name) is getattr(train, name)
    assert {"Learner", "Training", name} <= set(dir(hoploom))
    assert hoploom.Training(epochs=2).epochs == 2


def test_partition_is_a_function_and_its_package_still_imports(tmp_path: Path) -> None:
    hoploom.from_pyg(ring(12)).save(tmp_path / "whole")
    called: Any = hoploom.partition
    costs = called(tmp_path / "whole", tmp_path / "parts", 2, method="range")
    from hoploom.partition import PartitionReport, partition
    from hoploom.partition.assign import METHODS

    assert isinstance(costs, PartitionReport)
    assert "range" in METHODS
    assert inspect.signature(called) == inspect.signature(partition)
    assert called.partition is partition  # as written before


def test_dir_of_each_public_package_shows_its_public_names_and_nothing_else() -> None:
    packages = [value for name in dir(hoploom) if isinstance(value := getattr(hoploom, name), ModuleType)]
    assert {"load", "nn", "train"} <= {package.__name__.removeprefix("hoploom.") for package in packages}
    for package in packages:
        assert dir(package) == sorted(package.__all__), package.__name__
        assert not [name for name in dir(package) if isinstance(getattr(package, name), ModuleType)]
    assert not [name for name in dir(hoploom) if getattr(hoploom, name).__class__.__module__ == "typing"]


@pytest.mark.parametrize(("package", "hint"), [("load", "hoploom.open")])
def test_a_package_that_is_called_names_the_function_that_was_meant(package: str, hint: str) -> None:
    called: Any = getattr(hoploom, package)
    with pytest.raises(ConfigError, match=rf"hoploom.{package} is a package and cannot be called; {hint}"):
        called("graph.store", memory="4GB")


@pytest.mark.slow
@pytest.mark.timeout(600)  # mypy reads all of hoploom
def test_a_users_script_that_partitions_passes_mypy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hoploom\nfrom hoploom.partition import METHODS, PartitionReport, partition\n"
        'costs: PartitionReport = hoploom.partition(hoploom.open("whole"), "parts", 2, method=METHODS[0])\n'
        'again: PartitionReport = partition("whole", "others", 2)\n'
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stores_are_equal_only_to_themselves_and_can_be_keys(tmp_path: Path) -> None:
    store, other = hoploom.from_pyg(ring(12)), hoploom.from_pyg(ring(12))
    assert [store, other].index(other) == 1
    assert store != other
    assert {store: "mine", other: "yours"}[store] == "mine"
    saved = store.save(tmp_path / "saved")
    assert saved != hoploom.open(tmp_path / "saved")
    assert saved.identity == hoploom.open(tmp_path / "saved").identity
