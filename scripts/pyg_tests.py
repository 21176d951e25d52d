"""PyG's own loader tests, with Hoploom's loaders in place of PyG's.

    git clone --branch 2.8.0 https://github.com/pyg-team/pytorch_geometric
    python scripts/pyg_tests.py pytorch_geometric [pytest's options]

pyg-lib is not needed: its tests run, too. Those that compare it with torch-sparse are skipped.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch_geometric.loader
import torch_geometric.testing
import torch_geometric.typing

import hoploom

TESTS = (
    *(f"loader/test_{name}.py" for name in ("neighbor_loader", "link_neighbor_loader", "zip_loader", "cache")),
    *(f"loader/test_{name}.py" for name in ("imbalanced_sampler", "dynamic_batch_sampler", "prefetch", "mixin")),
    "nn/conv/test_pna_conv.py",
    "utils/test_trim_to_layer.py",
)
OPTIONS = ("-c", "/dev/null", "-q", "-rfsx", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore")
# What PyG says it can do with pyg-lib: asked for when tests are collected, and wrong when they run.
NEEDED = ("WITH_PYG_LIB", "WITH_TORCH_SPARSE", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")


class Collecting:
    """Tests of pyg-lib are collected as if it were there."""

    def __init__(self) -> None:
        self._was = {name: getattr(torch_geometric.typing, name) for name in NEEDED}
        for name in NEEDED:
            setattr(torch_geometric.typing, name, True)

    def pytest_collection_finish(self) -> None:
        for name, was in self._was.items():
            setattr(torch_geometric.typing, name, was)


def main(checkout: str, *options: str) -> int:
    testing: Any = torch_geometric.testing
    with_package = testing.withPackage
    testing.onlyNeighborSampler = lambda test: test
    testing.withPackage = lambda *names: with_package(*(name for name in names if not name.startswith("pyg_lib")))
    for name in ("NeighborLoader", "LinkNeighborLoader"):
        setattr(torch_geometric.loader, name, getattr(hoploom, name))
    folder = Path(checkout) / "test"
    given = [*(str(folder / name) for name in TESTS), "--rootdir", str(folder), "--confcutdir", str(folder)]
    return pytest.main([*given, *OPTIONS, *options], plugins=[Collecting()])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
