"""The layers of PyG with pyg-lib, or of DGL, driven by a benchmark: a line of JSON in, a line out.

Runs in a venv of its own: `python edge_layers_peer.py DGL`.
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
from layer_steps import EDGE_DIM, HEADS, LAYERS, WIDTH, Step  # noqa: E402
from torch import Tensor  # noqa: E402

Call = Callable[[Tensor], Tensor]


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to the other side
    torch.set_num_threads(2)
    versions, calls = dgl_calls() if sys.argv[1] == "DGL" else pyg_calls()
    print(json.dumps({"versions": f"{versions}, torch {torch.__version__}"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, float] = {}
        if request["ask"] == "read":
            num_sources, num_destinations = request["num_sources"], request["num_destinations"]
            edges = (
                torch.from_numpy(np.load(Path(request["folder"], f"{name}.npy")))
                for name in ("edge_index", "edge_attr")
            )
            call_of = calls(*edges, num_sources, num_destinations)
        elif request["ask"] == "make":
            step = Step(call_of(request["layer"]), num_sources)
        elif request["ask"] == "peak":
            answer = {"bytes": step.peak()}
        else:
            answer = {"seconds": step.seconds()}
        print(json.dumps(answer), file=answers, flush=True)


def pyg_calls() -> tuple[str, Callable[..., Callable[[str], Call]]]:
    """The version of PyG, and a function that makes PyG's layers on given edges."""
    import torch_geometric

    if not torch_geometric.typing.WITH_PYG_LIB:
        raise SystemExit("PyG cannot import pyg-lib")

    def on(edge_index: Tensor, edge_attr: Tensor, _: int, num_destinations: int) -> Callable[[str], Call]:
        def call_of(name: str) -> Call:
            conv = LAYERS[name](torch_geometric.nn)
            return lambda x: conv((x, x[:num_destinations]), edge_index, edge_attr)  # type: ignore[no-any-return]

        return call_of

    return f"PyG {torch_geometric.__version__} with pyg-lib", on


def dgl_calls() -> tuple[str, Callable[..., Callable[[str], Call]]]:
    """The version of DGL, and a function that makes DGL's layers. Its GATv2 reads no edge features, so it does less."""
    import dgl
    from dgl.nn import pytorch as of

    def on(edge_index: Tensor, edge_attr: Tensor, num_sources: int, num_destinations: int) -> Callable[[str], Call]:
        ends = tuple(edge_index)

        def graph() -> dgl.DGLGraph:
            return dgl.create_block(ends, num_src_nodes=num_sources, num_dst_nodes=num_destinations)

        def call_of(name: str) -> Call:
            share, any_degree = WIDTH // HEADS, {"allow_zero_in_degree": True}
            if name == "GAT":
                gat = of.EdgeGATConv(WIDTH, EDGE_DIM, share, HEADS, residual=False, **any_degree)
                return lambda x: gat(graph(), (x, x[:num_destinations]), edge_attr).flatten(1)  # type: ignore[no-any-return]
            if name == "GATv2":
                gatv2 = of.GATv2Conv(WIDTH, share, HEADS, **any_degree)
                return lambda x: gatv2(graph(), (x, x[:num_destinations])).flatten(1)  # type: ignore[no-any-return]
            gine, of_edges = of.GINEConv(torch.nn.Linear(WIDTH, WIDTH)), torch.nn.Linear(EDGE_DIM, WIDTH)
            return lambda x: gine(graph(), (x, x[:num_destinations]), of_edges(edge_attr))  # type: ignore[no-any-return]

        return call_of

    return f"DGL {dgl.__version__}", on


if __name__ == "__main__":
    main()
