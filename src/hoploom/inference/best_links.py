"""Write the best destinations of every source, such as ten items for each user, from outputs that `infer` has written.

A score is that of the run's decoder. The ranks copy the outputs into files of rows that they map, because Parquet
cannot be read at any place; then each rank finds and writes the best of its share of the sources. Memory holds a block
of scores, and the results and known destinations of some sources, whatever the number of nodes.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoploom.inference.files import RESULT, RowFile, SharedFolder, shared_folder
from hoploom.inference.infer import Inference, folder_of, infer
from hoploom.nn.decoders import Decoder
from hoploom.nn.row_tables import ids_of_user, parquet_file
from hoploom.ranking import Best, best_of_rows
from hoploom.ranking.scored_links import decoder_of
from hoploom.ranks.context import DEADLINE, Context, unwrap
from hoploom.ranks.environment import RankInfo
from hoploom.schema import RelationName
from hoploom.store import Store
from hoploom.store.views import OriginalIds
from hoploom.system import needs

AT_ONCE = 1 << 18  # nodes; the edges of the graph are read once for each so many sources
ROWS = 1 << 12  # outputs that are copied at once


def best(
    model_or_rows: nn.Module | Mapping[str, Tensor] | Tensor,
    store: Store,
    sources: Any = None,
    *,
    of: str | None = None,
    **options: Any,
) -> Best:
    """Return the best destinations of each source by a model, or by rows; `options` are those of `best_of_rows`.

    A model's outputs of all nodes are computed by `infer`, on this rank alone, into files of the temporary folder of
    the system (the variable TMPDIR names another). If the model has a `decoder`, it scores the links.

    >>> best(model, store, ("user", ids), of="item", k=10, exclude="known").ids
    """
    if not isinstance(model_or_rows, nn.Module):
        return best_of_rows(model_or_rows, store, sources, of=of, **options)
    own = unwrap(model_or_rows)
    options = {"decoder": decoder_of(own), **options}
    with (
        Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE) as alone,
        TemporaryDirectory() as scratch,
        shared_folder(Path(scratch, "rows"), None, alone) as folder,
    ):

        def rows(names: list[str]) -> Mapping[str, Tensor]:
            inference = Inference(columns=["output"], node_types=names)
            return output_rows(
                infer(own, store, Path(scratch, "outputs"), alone, inference=inference), store, names, folder
            )

        return best_of_rows(rows, store, sources, of=of, **options)


def write_best(
    store: Store, outputs: Path, relation: RelationName, k: int, context: Context, decoder: Decoder | None = None
) -> Path:
    """Write the `k` best destinations of every source of a relation; return the folder. All ranks call.

    The Parquet files have a row for each source and rank: `id` (of the source), `rank` from 1, `destination` and
    `score`. What a source has already is left out: `store` decides what this is.
    """
    source, _, of = relation
    num_sources, target = store.schema.node_type(source).num_nodes, outputs / f"best-{k}"
    first, last = (num_sources * rank // context.world_size for rank in (context.rank, context.rank + 1))
    with shared_folder(target, None, context) as folder:
        rows = output_rows(outputs, store, sorted({source, of}), folder)

        def columns(sources: Tensor) -> dict[str, Tensor]:
            given = sources if store.schema.homogeneous else (source, sources)
            found = best_of_rows(rows, store, given, of=of, k=k, decoder=decoder)
            is_there = found.ids >= 0
            places = torch.arange(1, k + 1, dtype=torch.int32).expand_as(found.ids)
            return {
                "id": ids_of_user(store, source, sources[:, None].expand_as(found.ids)[is_there]),
                "rank": places[is_there],
                "destination": ids_of_user(store, of, found.ids[is_there]),
                "score": found.scores[is_there],
            }

        path = folder.path / RESULT / f"part-{context.rank:05d}.parquet"
        with folder.together("writing"), parquet_file(path, columns(torch.arange(first, first))) as write:
            for sources in torch.split(torch.arange(first, last), AT_ONCE):
                folder.check_peers()
                if sources.numel():
                    write(columns(sources))
        folder.publish()
    return target


def output_rows(outputs: Path, store: Store, names: list[str], folder: SharedFolder) -> dict[str, Tensor]:
    """Return the column `output` that `infer` has written for some node types: [num_nodes, width], by the store's ids.

    Each rank copies some Parquet files into files of `folder`, which all of them map.
    """
    with needs("tables"):
        import pyarrow.parquet as parquet
    files, context = dict[str, RowFile](), folder.context
    with folder.together("reading outputs"), ExitStack() as opened:
        for kind, name in enumerate(names):
            first, num_nodes = 0, store.schema.node_type(name).num_nodes
            for number, path in enumerate(sorted((outputs / folder_of(name)).glob("*.parquet"))):
                table = opened.enter_context(parquet.ParquetFile(path, memory_map=True))
                shape = (num_nodes, table.schema_arrow.field("output").type.list_size)
                if number == 0:
                    scratch = RowFile(folder.scratch / f"{kind}.rows", shape, torch.float32)
                    files[name] = opened.enter_context(scratch)
                if number % context.world_size == context.rank:
                    _copy(table.iter_batches(ROWS, columns=["id", "output"]), first, store.ids(name), files[name])
                first += table.metadata.num_rows
            files[name].sync()
    return {name: file.read() for name, file in files.items()}


def _copy(batches: Iterable[Any], first: int, known: OriginalIds, file: RowFile) -> None:
    """Write the rows of a Parquet file's batches to `file`. The user's ids are looked up only if they are in no order.

    `infer` writes nodes in the store's order, so the first batch begins with node `first`.
    """
    for batch in batches:
        ids, values = batch["id"].to_numpy(zero_copy_only=False), np.array(batch["output"].flatten(), np.float32)
        nodes, rows = torch.arange(first, first + len(ids)), torch.from_numpy(values).view(len(ids), -1)
        if not np.array_equal(known.original(nodes), ids):
            nodes = known.stored(ids)
        ends = [*((nodes.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(nodes)]
        for begin, end in zip([0, *ends], ends, strict=False):  # of consecutive nodes
            file.write(int(nodes[begin]), rows[begin:end])
        first += len(ids)
