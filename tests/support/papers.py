"""Tables in the proportions of ogbn-papers100M at any scale: nodes with 128 features, 14.5 edges each, few labels."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_NODES, NUM_EDGES, NUM_FEATURES, NUM_CLASSES = 111_059_956, 1_615_685_872, 128, 172
LABELLED = 0.014
ROWS = 1 << 16  # written at once
RECIPE = """
[nodes.node]
files = "papers/*.parquet"
id = "paper"
features = ["embedding"]
label = "venue"
num_classes = 172
split = "fold"

[edges."node to node"]
files = "cites/*.parquet"
source = "citing"
destination = "cited"
"""


def write_papers(folder: Path, scale: float, files: int = 4) -> int:
    """Write the tables and graph.toml; returns how many bytes of values they hold."""
    num_nodes, num_edges = int(NUM_NODES * scale), int(NUM_EDGES * scale)
    for name, count, chunk in (("papers", num_nodes, paper_chunk), ("cites", num_edges, cite_chunk)):
        (folder / name).mkdir(parents=True)
        bounds = [count * number // files for number in range(files + 1)]
        for number in range(files):
            path = folder / name / f"{number:03d}.parquet"
            spans = range(bounds[number], bounds[number + 1], ROWS)
            with pq.ParquetWriter(
                path, chunk(0, 1, num_nodes).schema, compression="none", use_dictionary=False
            ) as file:
                for begin in spans:
                    file.write_table(chunk(begin, min(begin + ROWS, bounds[number + 1]), num_nodes))
    (folder / "graph.toml").write_text(RECIPE)
    return num_nodes * (8 + 4 * NUM_FEATURES + 8) + num_edges * 16


def paper_id(place: np.ndarray) -> np.ndarray:
    """Scattered ids, one for each place: multiplying by an odd number is a bijection on 62 bits."""
    return (place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) & np.uint64(2**62 - 1)).astype(np.int64)


def paper_chunk(begin: int, end: int, num_nodes: int) -> pa.Table:
    """Papers by place. Feature f of paper p is (p * 31 + f) mod 1009, so that every row can be recomputed."""
    places = np.arange(begin, end)
    features = ((places[:, None] * 31 + np.arange(NUM_FEATURES)) % 1009).astype(np.float32)
    labelled = places % 1000 < 1000 * LABELLED
    venue = pa.array(places % NUM_CLASSES, mask=~labelled)
    fold = np.array(["train", "val", "test"])[places % 3]
    return pa.table(
        {
            "paper": paper_id(places),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), NUM_FEATURES),
            "venue": venue,
            "fold": pa.array(fold, mask=~labelled),
        }
    )


def cite_chunk(begin: int, end: int, num_nodes: int) -> pa.Table:
    """Edges by number: paper e mod n cites a paper nearby, or one of a few hubs."""
    edges = np.arange(begin, end)
    cited = np.where(
        edges % 8 == 0, edges // 8 % max(1, num_nodes // 1000), (edges * 7919 + edges // num_nodes) % num_nodes
    )
    return pa.table({"citing": paper_id(edges % num_nodes), "cited": paper_id(cited)})
