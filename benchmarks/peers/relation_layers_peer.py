"""One layer of hoploom.nn or of PyG, driven by a benchmark: a line of JSON in, one out. PyG's has a venv of its own.

Both have the same names, arguments and inputs. R-GAT is PyG's HeteroConv of either library's GATConv.
"""

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch_geometric.nn import HeteroConv  # noqa: E402

WIDTH, HEADS, TYPES, EDGE_DIM = 64, 4, 8, 16
PNA: dict[str, Any] = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification", "attenuation"],
}
Given = dict[str, Any]  # the saved tensors of a batch
LAYERS: dict[str, Callable[[Any, Given], torch.nn.Module]] = {  # from the library's module `nn`
    "HGTConv": lambda of, given: of.HGTConv(WIDTH, WIDTH, (list(given["x"]), list(given["edges"])), heads=HEADS),
    "R-GAT": lambda of, given: HeteroConv({key: _gat(of) for key in given["edges"]}),
    "RGCNConv": lambda of, given: of.RGCNConv(WIDTH, WIDTH, TYPES),
    "RGCNConv, 4 bases": lambda of, given: of.RGCNConv(WIDTH, WIDTH, TYPES, num_bases=4),
    "PNAConv": lambda of, given: of.PNAConv(WIDTH, WIDTH, deg=given["deg"], **PNA),
    "PNAConv, edge features": lambda of, given: of.PNAConv(WIDTH, WIDTH, deg=given["deg"], edge_dim=EDGE_DIM, **PNA),
}
OTHER_INPUT = {  # the argument of forward after x and the edges, if there is one
    "RGCNConv": "edge_type",
    "RGCNConv, 4 bases": "edge_type",
    "PNAConv, edge features": "edge_attr",
}


def _gat(of: Any) -> torch.nn.Module:
    conv: torch.nn.Module = of.GATConv(WIDTH, WIDTH // HEADS, HEADS, add_self_loops=False)
    return conv


class Side:
    """A layer and its inputs."""

    def make(self, layer: str, path: str) -> dict[str, Any]:
        """Make the layer that is named, for the tensors of a file."""
        self.given = torch.load(path)
        torch.manual_seed(0)
        self.layer = LAYERS[layer](importlib.import_module(sys.argv[1]), self.given)
        name = OTHER_INPUT.get(layer)
        self.others = {} if name is None else {name: self.given[name]}
        return {}

    def step(self, count: int) -> dict[str, Any]:
        """Seconds of a forward and backward pass, the mean of some; bytes that they took at most."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before, begin = _bytes("VmRSS"), time.perf_counter()
        for _ in range(count):
            self.layer.zero_grad(set_to_none=True)
            out = self.layer(self._leaves(), self.given["edges"], **self.others)
            rows = list(out.values()) if isinstance(out, dict) else [out]
            torch.autograd.backward(rows, [torch.ones_like(one) for one in rows])
        seconds = (time.perf_counter() - begin) / count
        return {"seconds": seconds, "bytes": _bytes("VmHWM") - before}

    def _leaves(self) -> Any:
        x = self.given["x"]
        if isinstance(x, dict):
            return {name: rows.detach().requires_grad_() for name, rows in x.items()}
        return x.detach().requires_grad_()


def _bytes(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    torch.set_num_threads(2)
    importlib.import_module(sys.argv[1])
    import torch_geometric

    if sys.argv[1] == "torch_geometric.nn" and not torch_geometric.typing.WITH_PYG_LIB:
        raise SystemExit("PyG cannot import pyg-lib")
    versions = f"PyG {torch_geometric.__version__} with pyg-lib, torch {torch.__version__}"
    if not hasattr(torch.ops.pyg, "segment_matmul"):  # pyg-lib may be built without it; a loop does the same on CPUs
        torch_geometric.backend.use_segment_matmul = False
        versions += ", segment_matmul as a loop"
    print(json.dumps({"versions": versions, "present": ["pyg-lib"]}), flush=True)
    side = Side()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(side, request.pop("ask"))(**request)), flush=True)


if __name__ == "__main__":
    main()
