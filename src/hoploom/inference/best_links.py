"""Write the best destinations of every source, such as ten items for each user, from outputs that `infer` has written.

A score is the dot product of two outputs. Each rank reads the outputs of both node types into its memory, and writes
the sources of its share.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.inference.files import parquet_file
from hoploom.inference.infer import folder_of, ids_of_user
from hoploom.ranking import best
from hoploom.ranks.context import Context
from hoploom.schema import RelationName
from hoploom.store import Store
from hoploom.system import needs

AT_ONCE = 1 << 20  # sources; the edges of the graph are read once for each so many


def write_best(store: Store, outputs: Path, relation: RelationName, k: int, context: Context) -> Path:
    """Write the `k` best destinations of every source of a relation; return the folder. All ranks call.

    The Parquet files have a row for each source and rank: `id` (of the source), `rank` from 1, `destination` and
    `score`. What a source has already is left out: `store` decides what this is.
    """
    source, _, of = relation
    rows = {name: read_outputs(outputs, store, name) for name in {source, of}}
    num_sources, folder = store.schema.node_type(source).num_nodes, outputs / f"best-{k}"
    first, last = (num_sources * rank // context.world_size for rank in (context.rank, context.rank + 1))
    path = folder / f"part-{context.rank:05d}.parquet"
    unfinished = path.with_suffix(".unfinished")

    def columns(sources: Tensor) -> dict[str, Tensor]:
        found = best(rows, store, sources if store.schema.homogeneous else (source, sources), of=of, k=k)
        is_there = found.ids >= 0
        places = torch.arange(1, k + 1, dtype=torch.int32).expand_as(found.ids)
        return {
            "id": ids_of_user(store, source, sources[:, None].expand_as(found.ids)[is_there]),
            "rank": places[is_there],
            "destination": ids_of_user(store, of, found.ids[is_there]),
            "score": found.scores[is_there],
        }

    with parquet_file(unfinished, columns(torch.arange(first, first))) as write:
        for sources in torch.split(torch.arange(first, last), AT_ONCE):
            if sources.numel():
                write(columns(sources))
    unfinished.rename(path)
    context.barrier()
    return folder


def read_outputs(outputs: Path, store: Store, name: str) -> Tensor:
    """Return the column `output` that `infer` has written for a node type: [num_nodes, width] float32, by store id."""
    with needs("tables"):
        import pyarrow.parquet as parquet
    table = parquet.read_table(outputs / folder_of(name), columns=["id", "output"])
    values = table["output"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    found = torch.from_numpy(np.array(values, np.float32)).view(len(table), -1)
    rows = torch.empty(store.schema.node_type(name).num_nodes, found.shape[1])
    rows[store.ids(name).stored(table["id"].to_numpy())] = found
    return rows
