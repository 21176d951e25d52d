"""Layer-wise inference: every layer once over the whole graph, all ranks together, out of core.

Rows between two layers are in files, so that a budget bounds memory; the price is disk space. Computes on the CPU.
"""

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, StoreError
from hoploom.inference.files import SharedFolder
from hoploom.inference.in_batches import InBatches, MakeLoader, all_neighbors
from hoploom.inference.layered import ModelPlan, as_layered, plan_of
from hoploom.inference.layerwise import LayerWise, Predict, Progress
from hoploom.inference.slices import Costs, Slices
from hoploom.load.assemble import FEATURES
from hoploom.ranks import environment
from hoploom.ranks.context import DEADLINE, Context, unwrap
from hoploom.ranks.environment import RankInfo
from hoploom.schema import ORIGINAL_ID, Schema, holds_text
from hoploom.store import Store
from hoploom.store.budget import little_idle
from hoploom.store.format import sync_folder
from hoploom.train.evaluation import evaluating
from hoploom.train.journal import progress_bar
from hoploom.train.tasks import NodeTask, Task

Column = Literal["embedding", "output", "prediction"]
PREDICTION: Column = "prediction"
RESULT = "result"
INTEGERS = frozenset(("uint8", "int8", "int16", "int32", "int64"))
MEMORY = 256 << 20
LEAST_MEMORY = 1 << 10
PLAIN_EDGE_BYTES, WEIGHED_EDGE_BYTES = 16, 256  # while convolutions take rows as they are, or weigh them


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Options of `infer`: the columns that it writes, and the memory and disk that it may use.

    Columns: "embedding" is the input of the last layer (of the linear head, if the model has one), "output" is what the
    model returns, and "prediction" is what `task.predictions` makes of it: a class, a bool per label, or numbers.
    """

    task: Task | None = None  # what the model has learned
    columns: Sequence[Column] | None = None  # None: embedding (in batches: output) and prediction
    node_types: Sequence[str] | None = None  # None: all that the model has outputs for
    id_field: str = ORIGINAL_ID  # the node field to write as `id`; types without it are written by their store ids
    memory: int = MEMORY  # bytes that a rank may use at once, besides the model
    scratch: str | Path | None = None  # a folder for the rows between layers; None: beside `out`
    loader: MakeLoader | None = None  # makes batches of `input_nodes`, for a model that cannot run layer by layer

    def __post_init__(self) -> None:
        known, columns = get_args(Column), list(self.written)
        wrong = [name for name in columns if name not in known]
        if wrong or isinstance(self.columns, str) or not columns or len(set(columns)) != len(columns):
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

    @property
    def written(self) -> Sequence[Column]:
        """The columns to write, with defaults if none are named."""
        if self.columns is not None:
            return self.columns
        return ("embedding", "output" if self.predict is None else PREDICTION)

    def written_of(self, model: nn.Module) -> Sequence[Column]:
        """Return the columns to write for a model; computed in batches, it has no embeddings by default."""
        if as_layered(unwrap(model)) is not None or self.columns is not None:
            return self.written
        return ("output",) if self.predict is None else ("output", PREDICTION)


def infer(
    model: nn.Module,
    store: Store,
    out: str | Path,
    context: Context | None = None,
    *,
    inference: Inference | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compute embeddings and predictions of all nodes and write them as Parquet, with a column `id`.

    >>> infer(model, store, "papers.out", context, inference=Inference(task=NodeClassification(16)))

    The files are `out/<node type>/part-<rank>.parquet`. All ranks call, and `out` is a folder that all of them can see.
    `progress(done, total)` gets the number of rows that this rank has computed, or of batches where it computes in
    batches; by default, rank 0 shows a bar on a terminal.
    """
    inference, context = inference or Inference(), context or _alone()
    target, scratch = Path(out), None if inference.scratch is None else Path(inference.scratch) / Path(out).name
    _refuse_existing(target)
    module = unwrap(model)
    if any(held.device.type != "cpu" for held in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).cpu()  # DDP does not bear being moved
    layered = as_layered(module)
    if layered is None:
        _in_batches(module, store, target, context, inference, progress)
        return target
    embeds_only = set(inference.written) == {"embedding"}
    with ExitStack() as stack:
        stack.enter_context(evaluating(module))
        stack.enter_context(little_idle(0 if store.budget is None else store.budget.window))
        plan = plan_of(layered, store.schema, inference.node_types, embeds_only=embeds_only)
        _check(plan, store.schema, inference)
        context.sync_buffers(module)
        folder = stack.enter_context(SharedFolder(target, context))
        rows = folder if scratch is None else stack.enter_context(SharedFolder(scratch, context))
        progress = progress or stack.enter_context(_bar(shown=context.is_main))
        work = LayerWise(layered, plan, _slices(store, plan, inference.memory), folder, rows.path, progress)
        predict = inference.predict if PREDICTION in inference.written else None
        stack.enter_context(work).write(folder.path / RESULT, inference.written, inference.id_field, predict)
        with folder.together(f"naming {target}"):
            if context.is_main:
                _publish(folder.path / RESULT, target)
    return target


def _in_batches(
    module: nn.Module, store: Store, target: Path, context: Context, inference: Inference, progress: Progress | None
) -> None:
    """Write the outputs of a model that cannot run layer by layer."""
    columns = inference.written_of(module)
    if "embedding" in columns:
        raise ConfigError(
            f"columns has 'embedding', but {type(module).__name__} cannot run layer by layer, so there is only what it "
            "returns; leave it out, or return embeddings and write the column 'output'"
        )
    task = inference.task
    own = [task.node_type] if isinstance(task, NodeTask) and task.node_type is not None else None
    names = inference.node_types or own or list(store.schema.type_index)
    _check_ids(names, store.schema, inference)
    make = inference.loader or all_neighbors(module, store)
    having = [name for name in names if store.schema.node_type(name).num_nodes]
    loaders = {name: make(None if store.schema.homogeneous else name) for name in having}
    work = InBatches(module, store, loaders, task)
    predict = inference.predict if PREDICTION in columns else None
    with ExitStack() as stack:
        stack.enter_context(evaluating(module))
        context.sync_buffers(module)
        folder = stack.enter_context(SharedFolder(target, context))
        progress = progress or stack.enter_context(_bar(shown=context.is_main, unit="batches"))
        if context.is_main:
            print(f"hoploom: {work}", file=sys.stderr, flush=True)
        result = work.write(folder, columns, inference.id_field, predict, progress)
        with folder.together(f"naming {target}"):
            if context.is_main:
                _publish(result, target)


def _alone() -> Context:
    place = environment.read_rank()
    if place.world_size > 1:
        raise ConfigError(f"this is rank {place.rank} of {place.world_size}; give infer the context of hoploom.init()")
    return Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise StoreError(f"{target} exists; give another path, or remove it first")


def _check(plan: ModelPlan, schema: Schema, inference: Inference) -> None:
    """Raise ConfigError for a result that cannot be written, before anything is computed."""
    task = inference.task if PREDICTION in inference.written else None
    for name, width in plan.outputs.items():
        if isinstance(task, NodeTask) and width != task.columns[0]:
            wanted = f"{task.columns[0]} {task.columns[1]}"
            raise ConfigError(f"the model has outputs [{width}] for {name!r}, the task {wanted}; give the model's task")
    _check_ids(plan.ends, schema, inference)


def _check_ids(names: Iterable[str], schema: Schema, inference: Inference) -> None:
    having = [name for name in names if inference.id_field in schema.node_type(name).fields]
    if not having and inference.id_field != ORIGINAL_ID:
        raise ConfigError(f"no node type has the id_field {inference.id_field!r}; leave it out for the store's own ids")
    for name in having:
        field = schema.node_type(name).fields[inference.id_field]
        if not holds_text(field) and (field.dtype not in INTEGERS or field.shape):
            found = f"{inference.id_field!r} of {name!r} is {field.dtype} {list(field.shape)}"
            raise ConfigError(f"{found}; ids are one integer each, or UTF-8 in uint8 [bytes]")


def _slices(store: Store, plan: ModelPlan, memory: int) -> Slices:
    """Return the slices of all nodes, each of which fits the memory."""
    relations = [key for key in store.schema.relation_index if any(key in layer.relations for layer in plan.layers)]
    weighed = any(layer.projected for layer in plan.layers)
    costs = Costs(memory, _row_bytes(plan, store.schema), WEIGHED_EDGE_BYTES if weighed else PLAIN_EDGE_BYTES)
    slices = Slices(store, relations, costs)
    widths = [plan.inputs[name] for name in plan.as_stored if slices.are_far(name)]
    for layer in plan.layers:
        if slices.exceed_memory(layer.num_sent_bytes(store.schema, plan.dtype)):
            widths += layer.sent.values()
    widest = max(widths, default=0)
    costs = replace(costs, edge_bytes=costs.edge_bytes + widest * plan.dtype.itemsize)  # a source each, at most
    return Slices(store, relations, costs)


def _row_bytes(plan: ModelPlan, schema: Schema) -> dict[str, int]:
    """Return, by node type, the most bytes of a node's rows before, within and after a layer."""
    found = {}
    for name, width in plan.inputs.items():
        fields = schema.node_type(name).fields
        most, stored = width, fields[FEATURES].row_bytes if FEATURES in fields else 0
        for layer in plan.layers:
            projected = {key: layer.projected.get(key, layer.widths[key[0]]) for key in layer.relations}
            sent = sum(count for key, count in projected.items() if key[0] == name and key in layer.projected)
            brought = sum(count for key, count in projected.items() if key[2] == name)
            after = max(layer.computed.get(name, 0), plan.outputs.get(name, 0))
            most = max(most, 2 * layer.widths.get(name, 0) + max(sent, brought + 3 * after))
        found[name] = max(width * plan.dtype.itemsize + stored, most * plan.dtype.itemsize)
    return found


def _publish(folder: Path, target: Path) -> None:
    """Give the folder its name, once all of it is on the disk."""
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)
    _refuse_existing(target)  # rename would take the place of an empty directory
    os.rename(folder, target)
    sync_folder(target.absolute().parent)


@contextmanager
def _bar(*, shown: bool, unit: str = "rows") -> Iterator[Progress]:
    """Show a progress bar of this rank's share."""
    with progress_bar(sys.stderr, 0, shown=shown) as drawn:
        drawn.bar_format = f"[{{bar:20}}]  {{n:,}} of {{total:,}} {unit}  {{remaining}} left"

        def show(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)
            if done == total:
                drawn.refresh()

        yield show
