"""Ways to damage a saved store, and every way to sample from it afterwards."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hoploom
from hoploom import NeighborLoader

# The ring's second part holds nodes 6 to 11 and edges 12 to 23.
RELATION = "part-00001/relations/node~to~node"
INDPTR, INDICES, EDGE_IDS = f"{RELATION}/csc.indptr.npy", f"{RELATION}/csc.indices.npy", f"{RELATION}/edge_id.npy"
X = "part-00001/nodes/node/x.npy"
TRAIN = "part-00000/nodes/node/split.train.npy"

MODES: dict[str, dict[str, Any]] = {
    "directional": {},
    "all neighbours": {"num_neighbors": [-1, -1]},
    "large fanout": {"num_neighbors": [100, 100]},
    "replace": {"replace": True},
    "labor": {"labor": True},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "blocks": {"mode": "blocks"},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def array_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.npy"))


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    contents = json.loads((folder / "store.json").read_text())
    change(contents)
    (folder / "store.json").write_text(json.dumps(contents))


def rewrite(folder: Path, name: str, raw: bytes) -> None:
    (folder / name).write_bytes(raw)
    entry = {"bytes": len(raw), "crc32": zlib.crc32(raw)}
    edit(folder, lambda contents: contents["files"].update({name: entry}))


def set_value(folder: Path, name: str, position: int, value: float) -> None:
    """Change one value of an array; the checksum is made right, so that only its meaning is wrong."""
    raw, values = (folder / name).read_bytes(), np.load(folder / name)
    values[position] = value
    rewrite(folder, name, raw[: -values.nbytes] + values.tobytes())


def flip(folder: Path, name: str, position: int) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[position] ^= 1 << position % 8
    (folder / name).write_bytes(raw)


def sample_all(folder: Path, num_neighbors: Any = (2, 2), **options: Any) -> int:
    loader = NeighborLoader(hoploom.open(folder), list(num_neighbors), batch_size=3, **options)
    return sum(1 for _ in loader)
