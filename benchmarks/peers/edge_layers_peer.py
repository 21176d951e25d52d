"""PyG's layers with pyg-lib, driven by a benchmark: a line of JSON in, a line out.

Runs in a venv of its own: `python edge_layers_peer.py`.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch_geometric  # noqa: E402
from layer_steps import LAYERS, Step  # noqa: E402


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to the other side
    torch.set_num_threads(2)
    if not torch_geometric.typing.WITH_PYG_LIB:
        raise SystemExit("PyG cannot import pyg-lib")
    versions = f"PyG {torch_geometric.__version__} with pyg-lib, torch {torch.__version__}"
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, float] = {}
        if request["ask"] == "read":
            step_of = steps(**{name: value for name, value in request.items() if name != "ask"})
        elif request["ask"] == "make":
            step = step_of(request["layer"])
        elif request["ask"] == "peak":
            answer = {"bytes": step.peak()}
        else:
            answer = {"seconds": step.seconds()}
        print(json.dumps(answer), file=answers, flush=True)


def steps(folder: str, num_sources: int, num_destinations: int) -> Callable[[str], Step]:
    """A function that makes a step of a layer on the edges in these files."""
    edge_index, edge_attr = (
        torch.from_numpy(np.load(Path(folder, f"{name}.npy"))) for name in ("edge_index", "edge_attr")
    )

    def step_of(name: str) -> Step:
        conv = LAYERS[name](torch_geometric.nn)
        return Step(lambda x: conv((x, x[:num_destinations]), edge_index, edge_attr), num_sources)

    return step_of


if __name__ == "__main__":
    main()
