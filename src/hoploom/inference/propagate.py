"""Features propagated over a whole graph, out of core: the rows that SGC and SIGN learn from, without the graph.

Each hop is a layer of layer-wise inference, which has no parameters. Its rows are in a .npy file, which the next hop
reads.
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.inference.files import RESULT, RowFile, refuse_existing
from hoploom.inference.infer import LEAST_MEMORY, MEMORY, alone, bar_of, folder_for, folder_of
from hoploom.inference.layerwise import LayerWise, plan_of
from hoploom.nn.models import GNN, Shape, width_of
from hoploom.ranks.context import Context, gather_json
from hoploom.schema import Schema
from hoploom.store import Store
from hoploom.store.format import write_npy_header

MatrixNorm = Literal["gcn", "symmetric", "mean"]


def propagate(
    store: Store,
    out: str | Path,
    hops: int,
    context: Context | None = None,
    *,
    norm: MatrixNorm = "gcn",
    memory: int = MEMORY,
) -> Path:
    """Write A x, A^2 x, ... of the features x of all nodes, in float32, to out/<node type>/x_1.npy, x_2.npy, ...

    >>> propagate(store, "papers.hops", 3, context)
    >>> rows = torch.from_numpy(numpy.load("papers.hops/node/x_3.npy", mmap_mode="r"))

    Rows are in the order of the store's ids. With `norm="gcn"`, A has a self-loop at every node and is divided by the
    square roots of both ends' degrees; with "symmetric", no node has a self-loop; with "mean", A x is the mean over
    in-edges. The graph has one node type and one relation. All ranks must call and see the same folder; each uses
    `memory` bytes at most besides the store.
    """
    as_int("hops", hops, 1, "give the number of hops, at least 1")
    as_int("memory", memory, LEAST_MEMORY, f"give bytes, at least {LEAST_MEMORY}, e.g. 256 << 20")
    if norm not in get_args(MatrixNorm):
        raise ConfigError(f"norm is {norm!r}; give 'gcn', 'symmetric' or 'mean'")
    if not isinstance(store, Store):
        raise ConfigError(f"store is {store!r:.80}; give hoploom.open(path) or hoploom.from_pyg(graph)")
    model, context, target = _without_parameters(store.schema, hops, norm), context or alone(), Path(out)
    plan = plan_of(model, store.schema, None, embeds_only=False)
    refuse_existing(target)
    asked = {"hops": hops, "norm": norm}
    for rank, other in enumerate(gather_json(context, asked)):
        if other != asked:
            raise ConfigError(f"rank {context.rank} gives {asked}, rank {rank} {other}; give the same on all ranks")
    with folder_for(store, target, None, context) as folder, bar_of(context, "rows") as shown:
        node_type = store.schema.node_types[0]
        with folder.together("making files"):
            path = folder.path / RESULT / folder_of(node_type.name)
            path.mkdir(parents=True, exist_ok=True)
        work = _Hops(model, plan, store, memory, folder, shown)
        work.paths = {f"rows-{hop}-0": path / f"x_{hop + 1}.npy" for hop in range(hops - 1)}
        work.run()
        shape = node_type.num_nodes, plan.outputs[node_type.name]
        with folder.together("writing"), _npy_file(path / f"x_{hops}.npy", shape) as file:
            for _, ids, rows in work.results():
                if len(ids):
                    file.write(int(ids[0]), rows["output"])
            file.sync()
        folder.publish()
    return target


class _Hops(LayerWise):
    """Layer-wise inference that leaves the rows of its layers in .npy files."""

    paths: Mapping[str, Path]  # by the name of the pass that computes a hop

    def new_file(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowFile:
        return _npy_file(self.paths[name], shape) if name in self.paths else super().new_file(name, shape, dtype)


def _npy_file(path: Path, shape: tuple[int, ...]) -> RowFile:
    header = BytesIO()
    write_npy_header(header, "float32", shape)
    return RowFile(path, shape, torch.float32, header.getvalue())


def _without_parameters(schema: Schema, hops: int, norm: MatrixNorm) -> GNN:
    """Return a model whose layers only aggregate."""
    if len(schema.node_types) != 1 or len(schema.relations) != 1:
        found = f"{len(schema.node_types)} node types and {len(schema.relations)} relations"
        raise ConfigError(f"features are propagated over one node type and one relation, and the store has {found}")
    width = width_of(schema.node_types[0], 128)
    model = GNN("sage" if norm == "mean" else "gcn", schema, Shape(width, hops, width, act=None)).eval()
    for depth in range(hops):
        conv: Any = model.stage(depth).conv(schema.relations[0].key)
        if norm == "mean":
            conv.lin_l, conv.lin_r = nn.Identity(), None
        else:
            conv.lin, conv.bias, conv.add_self_loops = nn.Identity(), None, norm == "gcn"
    model.dtype_of_rows = nn.Parameter(torch.empty(0), requires_grad=False)  # models compute in that of parameters
    return model
