"""An importer keeps to its memory, as the system counts it, whatever the size of the input."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.raw_layouts import column, write_csv

NUM_NODES, NUM_EDGES, WIDTH = 1_110_000, 16_000_000, 128  # ogbn-papers100M's proportions at a hundredth
BEYOND = 230 << 20  # bytes that an import gets beyond Python, torch and pyarrow; PyG and pandas take 200 MB more
SCRIPT = """
import re, sys
from hoploom.ingest.formats import import_ogb
import pyarrow.parquet, pyarrow.csv
def peak():  # not ru_maxrss, which begins with that of the parent
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
limit = peak() + int(sys.argv[4])
import_ogb(*sys.argv[1:4], memory=limit)
print(limit, peak())
"""


def papers(root: Path) -> Path:
    (root / "raw").mkdir(parents=True)
    edge = np.arange(NUM_EDGES)
    np.savez(
        root / "raw" / "data.npz",
        edge_index=np.stack([edge * 7919 % NUM_NODES, edge * 104729 % NUM_NODES]),
        num_nodes_list=np.array([NUM_NODES]),
        num_edges_list=np.array([NUM_EDGES]),
        node_feat=np.zeros((NUM_NODES, WIDTH), np.float32),
        node_year=np.zeros((NUM_NODES, 1), np.int64),
    )
    np.savez(root / "raw" / "node-label.npz", node_label=np.zeros((NUM_NODES, 1), np.float32))
    for number, name in enumerate(("train", "valid", "test")):
        write_csv(root / "split" / "time" / f"{name}.csv.gz", column([number]))
    return root


@pytest.mark.parametrize("imported", ["hoploom.ingest.formats", "hoploom.cli.serving"])
def test_importers_and_servers_of_parts_do_without_pyg(imported: str) -> None:
    """It takes 200 MB, and seconds."""
    script = f"import sys, {imported}; print({{'torch_geometric', 'pandas'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_papers_at_a_hundredth_keep_to_less_memory_than_their_size(tmp_path: Path) -> None:
    folder = papers(tmp_path / "papers")
    given = ["ogbn-papers100M", str(folder), str(tmp_path / "out"), str(BEYOND)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, check=True)
    limit, peak = map(int, done.stdout.split()[-2:])
    assert (folder / "raw" / "data.npz").stat().st_size > limit * 1.4
    assert peak <= limit
