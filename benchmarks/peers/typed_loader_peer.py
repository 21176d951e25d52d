"""PyG's loaders with pyg-lib over a graph of several types, driven by a benchmark: a line of JSON in, a line out.

Runs in a venv of its own: `python typed_loader_peer.py`.
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch_geometric  # noqa: E402
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader  # noqa: E402
from typed_graph import make_graph, options_of, seconds_per_batch  # noqa: E402


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to the other side
    torch.set_num_threads(2)
    if not torch_geometric.typing.WITH_PYG_LIB:
        raise SystemExit("PyG cannot import pyg-lib")
    versions = f"PyG {torch_geometric.__version__} with pyg-lib, torch {torch.__version__}"
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    data, loaders = None, {}
    for line in sys.stdin:
        request = json.loads(line)
        kind, counts = request["kind"], (request["warm"], request["count"])
        if data is None:
            data = make_graph(request["tiny"])
        if kind not in loaders:
            cls = LinkNeighborLoader if kind == "links" else NeighborLoader
            loaders[kind] = cls(data, persistent_workers=True, **options_of(kind, data, sum(counts)))
        seconds = seconds_per_batch(loaders[kind], *counts)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
