"""Inference in batches, for models that cannot run one layer at a time: each batch samples what its nodes need.

Works for every model that takes a loader's batches. Inner rows are computed again for every batch that needs them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import HeteroData

from hoploom.errors import ConfigError
from hoploom.inference.files import ParquetFile, SharedFolder
from hoploom.inference.layerwise import Predict, Progress, folder_of, ids_of
from hoploom.load import NeighborLoader
from hoploom.load.loader import Loader
from hoploom.store import Store
from hoploom.train.batch_adapter import adapted
from hoploom.train.tasks import NodeTask, Task

MakeLoader = Callable[[str | None], Loader]  # of `input_nodes`: all nodes of a type; None: of a store with one type
BATCH_SIZE = 512


def all_neighbors(model: nn.Module, store: Store) -> MakeLoader:
    """Return a function that makes loaders of all neighbours, with as many hops as the model has layers."""
    hops = getattr(model, "num_layers", None)
    if not isinstance(hops, int) or hops < 1:
        raise ConfigError(
            f"{type(model).__name__} cannot run layer by layer and has no num_layers, so the neighbourhood that it "
            "needs is not known; set model.num_layers, or give Inference(loader=lambda nodes: NeighborLoader(store, "
            "[-1, -1], nodes, batch_size=512))"
        )
    return lambda nodes: NeighborLoader(store, [-1] * hops, nodes, batch_size=BATCH_SIZE)


@dataclass(frozen=True)
class InBatches:
    """A model, and the loaders of all nodes of some types; each rank takes a consecutive share of the batches."""

    model: nn.Module
    store: Store
    loaders: Mapping[str, Loader]
    task: Task | None

    def __post_init__(self) -> None:
        for name, loader in self.loaders.items():
            if loader.drop_last or getattr(adapted(self.model, loader), "takes_links", False):
                why = (
                    "the loader has drop_last=True" if loader.drop_last else f"{type(self.model).__name__} scores links"
                )
                raise ConfigError(f"{why}, so not every node of {name!r} would get a row; give one that has a row each")
            num_seeds, num_nodes = loader.state_dict()["num_seeds"], self.store.schema.node_type(name).num_nodes
            if num_seeds != num_nodes:
                raise ConfigError(
                    f"the loader has {num_seeds:,} seeds for the {num_nodes:,} nodes of {name!r}; give "
                    "Inference(loader=...) the nodes that it is called with as input_nodes"
                )

    def __str__(self) -> str:
        fanouts = "; ".join(dict.fromkeys(loader.shown()["fanouts"] for loader in self.loaders.values()))
        return (
            f"{type(self.model).__name__} cannot run layer by layer, so its outputs are computed in batches, with "
            f"fanouts {fanouts} (-1: all neighbours)"
        )

    def write(
        self, folder: SharedFolder, columns: Sequence[str], id_field: str, predict: Predict | None, progress: Progress
    ) -> Path:
        """Write a file of this rank per node type, in folders below the folder that is returned."""
        rank, world_size, result = folder.context.rank, folder.context.world_size, folder.path / "result"
        bounds = {
            name: [loader.num_whole_steps * end // world_size for end in (rank, rank + 1)]
            for name, loader in self.loaders.items()
        }
        done, total = 0, sum(end - begin for begin, end in bounds.values())
        with folder.together("computing"), ExitStack() as opened:
            for name, (begin, end) in bounds.items():
                (result / folder_of(name)).mkdir(parents=True, exist_ok=True)
                file: ParquetFile | None = None
                for nodes, outputs in self._rows(name, range(begin, end)):
                    folder.check_peers()
                    found = {"id": ids_of(self.store, name, nodes, id_field), "output": outputs}
                    if predict is not None:
                        found["prediction"] = predict(outputs)
                    rows = {column: found[column] for column in ("id", *columns)}
                    if file is None:
                        path, like = result / folder_of(name) / f"part-{rank:05d}.parquet", rows
                        file = opened.enter_context(ParquetFile(path, {key: of[:0] for key, of in like.items()}))
                    file.append(rows)
                    done += 1
                    progress(done, total)
                if file is not None:
                    file.finish()
        return result

    def _rows(self, name: str, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nodes [n] and the model's rows of them [n, channels], batch by batch."""
        loader = self.loaders[name]
        model = adapted(self.model, loader)
        for batch in loader.steps(steps, dealt=False):
            storage = batch[name] if isinstance(batch, HeteroData) else batch
            count = int(storage.batch_size)
            if isinstance(self.task, NodeTask):
                found: Any = self.task.outputs(model, batch)
            else:
                found = model(batch)
                found = found.get(name) if isinstance(found, Mapping) else found
            if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] < count:
                shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ConfigError(
                    f"the model returned {shown} for {count} nodes of {name!r}; return a row for each, seeds first, or "
                    "choose node_types"
                )
            yield storage.n_id[:count], found[:count]
