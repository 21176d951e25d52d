"""Layer-wise inference: every layer once over the whole graph, all ranks together, out of core.

Rows between two layers are in files, so that a budget bounds memory; the price is disk space. Computes on the CPU.
Models that cannot run layer by layer run in batches, which compute inner rows again for every batch that needs them.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.inference.files import RESULT, SharedFolder, refuse_existing, shared_folder
from hoploom.inference.layerwise import Group, LayerWise, Progress, plan_of
from hoploom.load import NeighborLoader
from hoploom.load.loader import Loader
from hoploom.nn.models import GNN
from hoploom.nn.row_tables import Columns, ids_of_user, parquet_file
from hoploom.ranks import environment
from hoploom.ranks.context import DEADLINE, Context, unwrap
from hoploom.ranks.environment import RankInfo
from hoploom.schema import FEATURES
from hoploom.store import Store, open_store
from hoploom.store.budget import little_idle
from hoploom.store.format import node_file
from hoploom.train.batch_adapter import adapted
from hoploom.train.loop import evaluating, progress_bar
from hoploom.train.tasks import NodeTask, Task

Column = Literal["embedding", "output", "prediction"]
MakeLoader = Callable[[str | None], Loader]  # takes input_nodes: a node type; None if the store has one type
Predict = Callable[[Tensor], Tensor | Mapping[str, Tensor]]  # outputs become predictions, row by row

PREDICTION: Column = "prediction"
MEMORY = 256 << 20
LEAST_MEMORY = 1 << 10
BATCH_SIZE = 512  # seeds of a batch, for models that cannot run layer by layer


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Options of `infer`: the columns that it writes, and the memory and disk that it may use.

    Columns: "embedding" is the input of the last layer (of the linear head, if the model has one), "output" is what the
    model returns, and "prediction" is what `task.predictions` makes of it: a class, a bool per label, or numbers. The
    predictions of several tasks are the columns "topic_prediction", "year_prediction" and so on.
    """

    task: Task | None = None  # what the model has learned
    columns: Sequence[Column] | None = None  # None: embedding (in batches: output) and prediction
    node_types: Sequence[str] | None = None  # None: all that the model has outputs for
    memory: int = MEMORY  # bytes that a rank may use at once, besides the model
    scratch: str | Path | None = None  # a folder for the rows between layers; None: beside `out`
    loader: MakeLoader | None = None  # makes batches of `input_nodes`, for a model that cannot run layer by layer

    def __post_init__(self) -> None:
        known = get_args(Column)
        columns = ("output",) if self.columns is None else self.columns
        if isinstance(columns, str) or not columns or set(columns) - set(known) or len(set(columns)) != len(columns):
            raise ConfigError(f"columns is {self.columns!r}; give some of {list(known)} in a list, each once")
        if PREDICTION in columns and self.task is None:
            raise ConfigError(
                "columns has 'prediction', but Inference has no task, which says what the model predicts; give one, "
                "e.g. task=NodeClassification(4), or write 'output'"
            )
        if PREDICTION in columns and self.predict is None:
            raise ConfigError(f"{type(self.task).__name__} has no prediction for a node; write the column 'output'")
        if isinstance(self.node_types, str):
            raise ConfigError(f"node_types is {self.node_types!r}; give a list of names: [{self.node_types!r}]")
        as_int("memory", self.memory, LEAST_MEMORY, f"give bytes, at least {LEAST_MEMORY}, e.g. 256 << 20")

    @property
    def predict(self) -> Predict | None:
        """The function that makes predictions from outputs; None if the task has none."""
        return getattr(self.task, "predictions", None)

    def written_of(self, model: nn.Module) -> Sequence[Column]:
        """Return the columns to write for a model; by default, no embeddings if the model runs in batches."""
        if self.columns is not None:
            return self.columns
        if self.predict is None:
            return ("embedding", "output") if isinstance(unwrap(model), GNN) else ("output",)
        return ("embedding" if isinstance(unwrap(model), GNN) else "output", PREDICTION)


def infer(
    model: nn.Module,
    store: Store | str | Path,
    out: str | Path,
    context: Context | None = None,
    *,
    inference: Inference | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compute embeddings and predictions of all nodes and write them as Parquet, with a column `id`.

    >>> infer(model, store, "papers.out", context, inference=Inference(task=NodeClassification(16)))

    The files are `out/<node type>/part-<rank>.parquet`. All ranks must call infer and see the same folder `out`.
    `progress(done, total)` gets the number of rows that this rank has computed, or of batches if the model runs in
    batches; by default, rank 0 shows a bar on a terminal.
    """
    inference = inference or Inference()
    context = context or alone()
    store = open_store(store) if isinstance(store, str | Path) else store
    if not isinstance(store, Store):
        raise ConfigError(f"store is a {type(store).__name__}; give a store or its path, or hoploom.from_pyg(data)")
    target, scratch = Path(out), None if inference.scratch is None else Path(inference.scratch)
    refuse_existing(target)
    module = unwrap(model)
    if any(held.device.type != "cpu" for held in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).cpu()  # a copy: DDP fails if its model is moved
    columns = inference.written_of(module)
    with ExitStack() as stack:
        stack.enter_context(evaluating(module))
        if not isinstance(module, GNN):
            loaders = _loaders(module, store, inference, columns)
        else:
            plan = plan_of(module, store.schema, inference.node_types, embeds_only=set(columns) == {"embedding"})
            task = inference.task if PREDICTION in columns else None
            for name, width in plan.outputs.items():
                if isinstance(task, NodeTask) and width != task.columns[0] and not task.is_first:
                    wanted = f"{task.columns[0]} {task.columns[1]}"
                    raise ConfigError(
                        f"the model has outputs [{width}] for {name!r}, the task {wanted}; give the model's task"
                    )
        context.sync_buffers(module)
        folder = stack.enter_context(folder_for(store, target, scratch, context))
        shown = progress or stack.enter_context(bar_of(context, "rows" if isinstance(module, GNN) else "batches"))
        if not isinstance(module, GNN):
            results = _in_batches(module, loaders, inference.task, folder, shown)
        else:
            work = LayerWise(module, plan, store, inference.memory, folder, shown)
            work.run()
            results = work.results()
        _write(folder, store, results, inference, columns)
        folder.publish()
    return target


def alone() -> Context:
    """Return the context of a process that is no rank of a job; raise ConfigError if it is one."""
    here = environment.read_rank()
    if here.world_size > 1:
        raise ConfigError(f"this is rank {here.rank} of {here.world_size}; pass the context of hoploom.init()")
    return Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE)


@contextmanager
def folder_for(store: Store, target: Path, scratch: Path | None, context: Context) -> Iterator[SharedFolder]:
    """Yield the folder that ranks share. Until its end, all learned rows are in its files."""
    with ExitStack() as stack:
        stack.enter_context(little_idle(0 if store.budget is None else store.budget.window))
        folder = stack.enter_context(shared_folder(target, scratch, context))
        for number, learned in enumerate(store.learned):
            stack.enter_context(learned.all_rows(partial(folder.rows_of_all, f"learned-{number}"), context.world_size))
        yield folder


def _write(
    folder: SharedFolder, store: Store, results: Iterable[Group], inference: Inference, columns: Sequence[Column]
) -> None:
    """Write this rank's Parquet file for each node type, with one row group for each (type, ids, rows) in `results`."""
    files: dict[str, Callable[[Columns], None]] = {}
    with folder.together("writing"), ExitStack() as opened:
        (folder.path / RESULT).mkdir(exist_ok=True)
        for name, nodes, found in results:
            rows: dict[str, Any] = {"id": ids_of_user(store, name, nodes)}
            for column in columns:
                if column != PREDICTION or inference.predict is None:
                    rows[column] = found[column]
                elif getattr(inference.task, "node_type", None) in (None, name):
                    made: Any = inference.predict(found["output"])
                    is_one = isinstance(made, Tensor)
                    rows |= {column: made} if is_one else {f"{task}_{column}": own for task, own in made.items()}
            if name not in files:
                path = folder.path / RESULT / folder_of(name) / f"part-{folder.context.rank:05d}.parquet"
                files[name] = opened.enter_context(parquet_file(path, rows))
            if len(nodes):
                files[name](rows)


def folder_of(node_type: str) -> str:
    """Return the folder name for a node type's results, which is also its folder name in a store."""
    return Path(node_file(0, node_type, FEATURES)).parent.name


@contextmanager
def bar_of(context: Context, unit: str) -> Iterator[Progress]:
    """Yield a function that shows the progress of rank 0's share as a bar."""
    with progress_bar(sys.stderr, 0, shown=context.is_main) as drawn:
        drawn.bar_format = f"[{{bar:20}}]  {{n:,}} of {{total:,}} {unit}  {{remaining}} left"

        def show(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)
            if done == total:
                drawn.refresh()

        yield show


# --- models that cannot run layer by layer: every batch samples what its nodes need ------------


def _loaders(model: nn.Module, store: Store, inference: Inference, columns: Sequence[Column]) -> dict[str, Loader]:
    """Return, by node type, a loader of all its nodes; raise ConfigError if a loader would leave nodes out."""
    if "embedding" in columns:
        raise ConfigError(
            f"columns has 'embedding', but {type(model).__name__} cannot run layer by layer, so there is only what it "
            "returns; leave it out, or return embeddings and write the column 'output'"
        )
    task, schema = inference.task, store.schema
    own = [task.node_type] if isinstance(task, NodeTask) and task.node_type is not None else None
    names = inference.node_types or own or list(schema.type_index)
    hops = getattr(model, "num_layers", None)
    if inference.loader is None and (not isinstance(hops, int) or hops < 1):
        raise ConfigError(
            f"{type(model).__name__} cannot run layer by layer and has no num_layers, so the neighbourhood that it "
            "needs is not known; set model.num_layers, or give Inference(loader=lambda nodes: NeighborLoader(store, "
            "[-1, -1], nodes, batch_size=512))"
        )
    make = inference.loader or (lambda nodes: NeighborLoader(store, [-1] * (hops or 0), nodes, batch_size=BATCH_SIZE))
    loaders: dict[str, Loader] = {}
    for name in names:
        if not (num_nodes := schema.node_type(name).num_nodes):
            continue
        loader = loaders[name] = make(None if schema.homogeneous else name)
        if loader.drop_last or getattr(adapted(model), "takes_links", False):
            why = "the loader has drop_last=True" if loader.drop_last else f"{type(model).__name__} scores links"
            raise ConfigError(f"{why}, so not every node of {name!r} would get a row; give one that has a row each")
        if (num_seeds := loader.state_dict()["num_seeds"]) != num_nodes:
            raise ConfigError(
                f"the loader has {num_seeds:,} seeds for the {num_nodes:,} nodes of {name!r}; give "
                "Inference(loader=...) the nodes that it is called with as input_nodes"
            )
    return loaders


def _in_batches(
    model: nn.Module, loaders: Mapping[str, Loader], task: Task | None, folder: SharedFolder, progress: Progress
) -> Iterator[Group]:
    """Yield node type, node ids and outputs of this rank's batches, which are a consecutive share of all batches."""
    rank, world_size = folder.context.rank, folder.context.world_size
    fanouts = "; ".join(dict.fromkeys(loader.shown()["fanouts"] for loader in loaders.values()))
    if folder.context.is_main:
        print(
            f"hoploom: {type(model).__name__} cannot run layer by layer, so its outputs are computed in batches, with "
            f"fanouts {fanouts} (-1: all neighbours)",
            file=sys.stderr,
            flush=True,
        )
    shares = {
        name: range(*(loader.num_whole_steps * end // world_size for end in (rank, rank + 1)))
        for name, loader in loaders.items()
    }
    takes, done, total = adapted(model), 0, sum(map(len, shares.values()))
    for name, loader in loaders.items():
        for batch in loader.steps(shares[name], dealt=False):
            storage = batch[name] if isinstance(batch, HeteroData) else batch
            count = int(storage.batch_size)
            found: Any = task.outputs(takes, batch) if isinstance(task, NodeTask) else takes(batch)
            outputs = found.get(name) if isinstance(found, Mapping) else found
            if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[0] < count:
                shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
                raise ConfigError(
                    f"the model returned {shown} for {count} nodes of {name!r}; return a row for each, seeds first, or "
                    "choose node_types"
                )
            folder.check_peers()
            yield name, storage.n_id[:count], {"output": outputs[:count]}
            done += 1
            progress(done, total)
