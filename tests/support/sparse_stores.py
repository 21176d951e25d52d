"""Stores that are large and empty, and how much of a mapped one is in memory."""

from pathlib import Path

import numpy as np

from hoploom import Store
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, Field, NodeType, Relation, Schema
from hoploom.store import format as layout


def save_sparse(path: Path, num_nodes: int, width: int) -> Path:
    """A store whose values are all zero and take no disk space."""
    node_type = NodeType("node", num_nodes, {"x": Field("float32", (width,))})
    relation = Relation(*HOMOGENEOUS_RELATION, 0)
    files = {
        layout.node_file(0, "node", "x"): ("float32", (num_nodes, width)),
        layout.topology_file(0, relation, "indptr"): ("int64", (num_nodes + 1,)),
        layout.topology_file(0, relation, "indices"): ("int32", (0,)),
    }
    entries = {}
    for name, (dtype, shape) in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            header = layout.write_npy_header(out, dtype, shape)
            size = header + int(np.prod(shape)) * DTYPES[dtype].itemsize
            out.truncate(size)
        entries[name] = layout.FileEntry(size, 0)
    part = layout.PartRange((0,), (num_nodes,), (0,), (0,), {"node": {}})
    manifest = layout.Manifest(Schema((node_type,), (relation,), homogeneous=True), (part,), entries)
    (path / layout.STORE_FILE).write_text(layout.manifest_to_json(manifest))
    return path


def mapped_kilobytes(folder: Path | str) -> dict[str, int]:
    """This process's maps of a folder's files: their size, and what of it is in memory, by kind."""
    totals = dict.fromkeys(("Size", "Rss", "Private_Dirty", "Private_Clean", "Shared_Clean"), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            inside = str(folder) in line
        elif inside and word[:-1] in totals:
            totals[word[:-1]] += int(rest[0])
    return totals


def touch_every_page(store: Store) -> float:
    return float(store.parts[0].tables["node", "x"].rows.view(-1)[:: 4096 // 4].sum())
