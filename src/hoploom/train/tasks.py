"""Tasks: the outputs of a model that are compared with targets, the loss of every seed, and torchmetrics' metrics.

Labels are checked in every batch. On a GPU, this would wait for the device, so labels that are known in advance are
checked once, before the first batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

from hoploom.config.values import as_number, nearest
from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.schema import ORIGINAL_ID, Schema, holds_text
from hoploom.store import Store, Wanted

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

Mode = Literal["max", "min"]
VAL_LOSS = "val_loss"  # the name of evaluate()'s `loss` in the history of epochs, which also has `train_loss`
SMALLER_IS_BETTER = frozenset((VAL_LOSS, "mae", "mse", "rmse", "mean_rank"))
LABELS_AT_ONCE = 1 << 20  # labels that are read at a time


class Task(Protocol):
    """The protocol of the tasks that `fit` and `evaluate` accept."""

    @property
    def monitor(self) -> tuple[str, Mode]:
        """The metric that decides which model is best, and "max" or "min": the better direction of the metric."""
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the outputs of the model for a batch, one row per target."""
        ...

    def targets(self, batch: Batch) -> Tensor:
        """Return the values that the outputs should have."""
        ...

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row: [n]."""
        ...

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the values that the metrics compare with the targets."""
        ...

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        """Return a new collection of metrics without values."""
        ...


class MonitoredTask:
    """Base class of tasks whose best model is chosen by one of their metrics, or by the loss."""

    best: str

    def __post_init__(self) -> None:
        if self.best in ("loss", VAL_LOSS, type(self).best):  # so that torchmetrics is not imported for its names
            return
        known = [VAL_LOSS, *self.metric_names]
        if self.best not in known:
            same = "f1_micro equals accuracy where a node has one class; " if self.best == "f1_micro" else ""
            alike = nearest(str(self.best), known)
            hint = f"; did you mean {alike!r}?" if alike else ""
            raise ConfigError(
                f"best is {self.best!r}, no metric of {type(self).__name__}; {same}give one of {known}{hint}"
            )

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics."""
        return list(map(str, self.new_metrics(torch.device("cpu"))))

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        """Return a new collection of metrics by name, without values."""
        raise NotImplementedError

    @property
    def monitor(self) -> tuple[str, Mode]:
        best = VAL_LOSS if self.best == "loss" else self.best
        return best, "min" if best in SMALLER_IS_BETTER else "max"


def collection(device: torch.device, **metrics: Any) -> "MetricCollection":
    """Return metrics that sum in float64, without torchmetrics' compute groups, which may differ from rank to rank."""
    from torchmetrics import MetricCollection

    collection = MetricCollection(metrics, compute_groups=False).to(device)
    return collection.set_dtype(torch.float64)


def update_with_nothing(metric: "Metric", update: Callable[..., None], scores: Tensor, targets: Tensor) -> None:
    """Give a metric without rows empty states, of the dtypes and shapes that a gather over ranks needs."""
    update(scores, targets)
    filled = {name: list(s) if isinstance(s, list) else s for name, s in metric.metric_state.items()}
    metric.reset()  # empties the lists themselves
    for name, state in filled.items():
        if isinstance(state, list):
            setattr(metric, name, [rows[:0] for rows in state])
        else:
            setattr(metric, name, getattr(metric, name).to(state.dtype).expand_as(state).clone())


def full_precision(outputs: Tensor) -> Tensor:
    """Return outputs with float16 and bfloat16 converted to float32, because losses need that precision."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def binary_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    full = full_precision(outputs)
    return functional.binary_cross_entropy_with_logits(full, targets.to(full.dtype), reduction="none")


def _class_metrics(kind: str, count: int) -> dict[str, Any]:
    """Return metrics by name; `kind` is torchmetrics' "Multiclass" or "Multilabel", `count` their number of classes."""
    from torchmetrics import classification

    def metric(name: str, **options: Any) -> Any:
        return getattr(classification, kind + name)(count, validate_args=False, **options)

    return {
        "accuracy": metric("Accuracy", average="micro"),
        "f1_macro": metric("F1Score", average="macro"),
        "f1_micro": metric("F1Score", average="micro"),
        "auroc": metric("AUROC"),
    }


# --- nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeTask(MonitoredTask):
    """A task on nodes, whose labels are in the field `label` of the seeds' node type."""

    label: str = "y"
    node_type: str | None = None  # of the seeds; None: the only type with seeds
    is_first: bool = False  # whether the model has outputs of side tasks, too, in columns after those of this one

    @property
    def labels(self) -> list[str]:
        """The fields of the seeds' node type that the task reads."""
        return [self.label]

    @property
    def columns(self) -> tuple[int, str]:
        """The number of outputs per seed, and the word for outputs in messages, such as "classes"."""
        raise NotImplementedError

    def own(self, outputs: Tensor) -> Tensor:
        """Return the columns of a model's outputs that are this task's."""
        return outputs[:, : self.columns[0]] if self.is_first else outputs

    def judge(self, labels: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return labels as targets, a mask of the invalid ones, and a text that says which labels are valid."""
        raise NotImplementedError

    def read(self, labels: Tensor, nodes: Tensor) -> Tensor:
        """Return the `labels` of `nodes` as targets; on the CPU, raise DataError for an invalid label."""
        targets, bad, wanted = self.judge(labels)
        if not bad.is_cuda and bad.any():
            row = int(_bad_rows(bad)[0])
            raise self._bad_label(str(int(nodes[row])), labels[row], wanted)
        return targets

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        _, node_type, num_seeds = _seeds(batch, self.node_type)
        (count, what), found = self.columns, model(batch)
        if isinstance(found, Mapping):
            if node_type not in found:
                raise ConfigError(f"the model has outputs for {list(found)}, the seeds are of {node_type!r}")
            found = found[node_type]
        check_tensor(found, "a row for every seed")
        if found.shape[0] < num_seeds:
            raise ConfigError(
                f"the model returned {found.shape[0]} rows for {num_seeds} seeds; return one for each, seeds first"
            )
        rows: Tensor = found[:num_seeds].view(-1, 1) if found.dim() == count == 1 else self.own(found[:num_seeds])
        if rows.shape[1:] != (count,):
            shape = tuple(rows.shape[1:])
            raise ConfigError(f"the model returns rows of shape {shape} for {count} {what}; give it {count} outputs")
        return rows

    def targets(self, batch: Batch) -> Tensor:
        storage, node_type, num_seeds = _seeds(batch, self.node_type)
        if self.label not in storage:
            raise self._no_label(node_type, sorted(storage.keys()))
        return self.read(storage[self.label][:num_seeds], storage["n_id"][:num_seeds])

    def _matrix(self, labels: Tensor, width: int, way_out: str) -> Tensor:
        """Return labels as a matrix with `width` columns. For another width, raise ConfigError with `way_out`."""
        rows = labels.view(-1, 1) if labels.dim() == 1 else labels
        if rows.shape[1:] != (width,):
            raise ConfigError(f"{self.label!r} has rows of shape {tuple(rows.shape[1:])}{way_out}")
        return rows

    def check(self, store: Store, nodes: Tensor, node_type: str | None = None) -> None:
        """Raise an error if the label of one of these nodes is invalid or missing."""
        node_type, found, count = self._type_with_labels(store.schema, node_type), None, 0
        for some in torch.split(nodes, LABELS_AT_ONCE):
            labels = store.features.gather([Wanted(node_type, self.label, some)])[0]
            _, bad, wanted = self.judge(labels)
            rows = _bad_rows(bad)
            count += len(rows)
            if found is None and len(rows):
                found = some[rows[0]], labels[rows[0]], wanted
        if found is not None:
            node, label, wanted = found
            more = f", the first of {count:,} such labels" if count > 1 else ""
            raise self._bad_label(f"{int(node)}{_original_id(store, node_type, node)}", label, wanted, more)

    def _type_with_labels(self, schema: Schema, node_type: str | None) -> str:
        """Return the seeds' node type: the one given, else the only one with the labels; raise ConfigError if none."""
        having = [one.name for one in schema.node_types if {*self.labels} <= one.fields.keys()]
        node_type = node_type or self.node_type or (schema.node_types[0].name if schema.homogeneous else None)
        if node_type is None and len(having) == 1:
            node_type = having[0]
        if node_type is None:
            what = f"the label {self.labels[0]!r} is" if len(self.labels) == 1 else f"the labels {self.labels} are"
            raise ConfigError(f"{what} in {having or 'no node type'}; name the seeds' node_type")
        if node_type not in having:
            raise self._no_label(node_type, sorted(schema.node_type(node_type).fields))
        return node_type

    def _bad_label(self, node: str, label: Tensor, wanted: str, more: str = "") -> DataError:
        what = f"node {node} is a seed with the label {self.label}={label.squeeze().tolist()!r:.80}{more}"
        is_null = bool((label.eq(-1) | label.isnan()).all())
        null = f" (a null label in a table becomes {label.flatten()[0].item()})" if is_null else ""
        return DataError(f"{what}; {wanted}{null}, or leave it out of the split")

    def _no_label(self, node_type: str, fields: list[str]) -> ConfigError:
        label = next(label for label in self.labels if label not in fields)
        return ConfigError(f"the seeds' type {node_type!r} has no field {label!r} to learn; it has {fields}")


def _bad_rows(bad: Tensor) -> Tensor:
    """Return the indices of the rows that have an invalid label: [k] int64."""
    return (bad if bad.dim() == 1 else bad.flatten(1).any(1)).nonzero()[:, 0]


def _original_id(store: Store, node_type: str, node: Tensor) -> str:
    """Return a text with the user's id of a node, for messages; empty if the store has no ids of the user."""
    field = store.schema.node_type(node_type).fields.get(ORIGINAL_ID)
    if field is None:
        return ""
    row = store.features.gather([Wanted(node_type, ORIGINAL_ID, node.view(1))])[0][0]
    own = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") if holds_text(field) else int(row)
    return f" (your id {own!r})"


def check_tensor(found: Any, wanted: str) -> None:
    if not isinstance(found, Tensor):
        raise ConfigError(f"the model returned a {type(found).__name__}; return a tensor with {wanted}")


def _seeds(batch: Batch, node_type: str | None) -> tuple[Any, str, int]:
    """Return the storage of the seeds' node type, the type's name, and the number of seeds, which come first."""
    if not isinstance(batch, HeteroData):
        return batch, "node", int(batch.batch_size)
    having = [storage for storage in batch.node_stores if "batch_size" in storage]
    named = [storage for storage in having if node_type in (None, storage._key)]
    if len(named) != 1:
        raise ConfigError(f"node_type is {node_type!r}, but the batch has seeds of {[s._key for s in having]}; name it")
    return named[0], named[0]._key, int(named[0]["batch_size"])


@dataclass(frozen=True)
class NodeClassification(NodeTask):
    """One class per node. Metrics: accuracy (equal to micro F1), macro F1, and AUROC if there are two classes."""

    num_classes: int
    best: str = "accuracy"
    confusion: bool = False

    @property
    def columns(self) -> tuple[int, str]:
        return self.num_classes, "classes"

    def judge(self, labels: Tensor) -> tuple[Tensor, Tensor, str]:
        classes = self._matrix(labels, 1, ", not one class each; use MultiLabel")[:, 0]
        bad = (classes != classes.long()) | (classes < 0) | (classes >= self.num_classes)
        return classes.long(), bad, f"classes are 0 to {self.num_classes - 1}: give it one"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(full_precision(outputs), targets, reduction="none")

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predicted class of every node: [n] int64."""
        return self.own(outputs).argmax(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().softmax(dim=-1)

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        metrics = _class_metrics("Multiclass", self.num_classes)
        del metrics["f1_micro"]
        if self.num_classes != 2:
            del metrics["auroc"]
        if self.confusion:
            from torchmetrics.classification import MulticlassConfusionMatrix

            metrics["confusion"] = MulticlassConfusionMatrix(self.num_classes, validate_args=False)
        return collection(device, **metrics)


@dataclass(frozen=True)
class MultiLabel(NodeTask):
    """Any number of labels per node, each 0 or 1. Metrics: AUROC (mean over labels), accuracy, micro and macro F1."""

    num_labels: int
    best: str = "auroc"

    @property
    def columns(self) -> tuple[int, str]:
        return self.num_labels, "labels"

    def judge(self, labels: Tensor) -> tuple[Tensor, Tensor, str]:
        rows = self._matrix(labels, self.num_labels, f" for {self.num_labels} labels; set num_labels")
        return rows.long(), (rows != 0) & (rows != 1), "labels are 0 or 1: give it all of them"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_losses(outputs, targets).mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return whether each label is predicted for a node: [n, num_labels] bool."""
        return self.own(outputs) > 0

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        return collection(device, **_class_metrics("Multilabel", self.num_labels))


@dataclass(frozen=True)
class NodeRegression(NodeTask):
    """One number per node, or several, learned with squared or absolute error. Metrics: MAE, MSE, RMSE and R2."""

    num_targets: int = 1
    loss: Literal["mse", "mae"] = "mse"
    best: str = "rmse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in ("mse", "mae"):
            raise ConfigError(f"loss is {self.loss!r}; give 'mse' or 'mae'")

    @property
    def columns(self) -> tuple[int, str]:
        return self.num_targets, "targets"

    def judge(self, labels: Tensor) -> tuple[Tensor, Tensor, str]:
        rows = self._matrix(labels, self.num_targets, f" for {self.num_targets} targets; set num_targets")
        if rows.is_floating_point():
            return rows.double(), ~rows.isfinite(), "give it a finite number"
        return rows.double(), rows == -1, "-1 is no number to learn unless labels are floats: give it another"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = full_precision(outputs) - targets.to(full_precision(outputs).dtype)
        return (errors.square() if self.loss == "mse" else errors.abs()).mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predicted number of every node, [n], or its predicted numbers, [n, num_targets]."""
        return outputs[:, 0] if self.num_targets == 1 else self.own(outputs)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double()

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        from torchmetrics import regression as kinds

        return collection(
            device,
            mae=kinds.MeanAbsoluteError(),
            mse=kinds.MeanSquaredError(),
            rmse=kinds.MeanSquaredError(squared=False),
            r2=kinds.R2Score(),
        )


LabelTask = NodeClassification | MultiLabel | NodeRegression


@dataclass(frozen=True)
class SeveralTasks(NodeTask):
    """Several tasks on the same nodes, by name. A model has the outputs of all side by side: a head for each task.

    The loss of a node is the sum of the tasks' losses times their weights, 1 by default. A null label (NaN, or -1 if
    labels are no fractions) leaves the node out of its task. The metrics are "topic_accuracy", "year_rmse" and so on.

    >>> tasks = {"topic": NodeClassification(16), "year": NodeRegression(label="year")}
    >>> SeveralTasks(tasks, weights={"year": 0.1}, best="topic_accuracy")
    """

    tasks: Mapping[str, LabelTask]
    weights: Mapping[str, float] = field(default_factory=dict)
    best: str = "loss"

    def __post_init__(self) -> None:
        for name, given in (("tasks", self.tasks), ("weights", self.weights)):
            if not isinstance(given, Mapping):
                raise ConfigError(f"{name} is {given!r:.80}; give a dict by task")
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one task by name")
        for task_name, task in self.tasks.items():
            if not (isinstance(task_name, str) and isinstance(task, LabelTask)):
                kinds = ", ".join(kind.__name__ for kind in get_args(LabelTask))
                raise ConfigError(f"tasks has {task_name!r}: {task!r:.80}; give a name and one of {kinds}")
        for label, name in zip(self.labels, self.tasks, strict=True):
            if self.labels.count(label) > 1:
                raise ConfigError(f"task {name!r} reads the label {label!r}, as another does; give each its own label=")
        for name, weight in self.weights.items():
            if name not in self.tasks:
                raise ConfigError(f"weights has {name!r}, and the tasks are {list(self.tasks)}")
            as_number(f"weights[{name!r}]", weight, "give a number of at least 0")
        super().__post_init__()

    @property
    def labels(self) -> list[str]:
        return [task.label for task in self.tasks.values()]

    @property
    def columns(self) -> tuple[int, str]:
        return sum(task.columns[0] for task in self.tasks.values()), "outputs of all tasks"

    @property
    def monitor(self) -> tuple[str, Mode]:
        best, _ = super().monitor
        name = max((name for name in self.tasks if best.startswith(f"{name}_")), key=len, default="")
        return best, "min" if best.removeprefix(f"{name}_") in SMALLER_IS_BETTER else "max"

    def targets(self, batch: Batch) -> Tensor:
        storage, node_type, num_seeds = _seeds(batch, self.node_type)
        found = []
        for task in self.tasks.values():
            if task.label not in storage:
                raise self._no_label(node_type, sorted(storage.keys()))
            labels = storage[task.label][:num_seeds]
            there = _are_there(task, labels)
            if not labels.is_cuda:
                task.read(labels[there], storage["n_id"][:num_seeds][there])
            found.append(labels.double().unsqueeze(1).flatten(1).masked_fill(~there.unsqueeze(1), torch.nan))
        return torch.cat(found, dim=1)

    def check(self, store: Store, nodes: Tensor, node_type: str | None = None) -> None:
        node_type = self._type_with_labels(store.schema, node_type)
        for task in self.tasks.values():
            count = 0
            for some in torch.split(nodes, LABELS_AT_ONCE):
                labelled = some[_are_there(task, store.features.gather([Wanted(node_type, task.label, some)])[0])]
                task.check(store, labelled, node_type)
                count += len(labelled)
            if not count:
                raise ConfigError(f"none of the {len(nodes):,} nodes has a label {task.label!r}; leave its task out")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        total = outputs.new_zeros(len(outputs), dtype=torch.float32)
        for name, (task, scores, labels) in self._parts(outputs, targets).items():
            there = ~labels.isnan().all(dim=1)
            wanted, _, _ = task.judge(labels.masked_fill(~there.unsqueeze(1), 0))
            losses = task.losses(scores, wanted)
            total = total + self.weights.get(name, 1.0) * losses.masked_fill(~there, 0)
        return total

    def _outputs_of(self, outputs: Tensor) -> Sequence[tuple[str, LabelTask, Tensor]]:
        """Return, for each task, its name, the task and its columns of the outputs."""
        parts = torch.split(outputs, [task.columns[0] for task in self.tasks.values()], dim=1)
        return list(zip(self.tasks.keys(), self.tasks.values(), parts, strict=True))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the predictions of each task, by its name."""
        return {name: task.predictions(own) for name, task, own in self._outputs_of(self.own(outputs))}

    def scores(self, outputs: Tensor) -> Tensor:
        return torch.cat([task.scores(own) for _, task, own in self._outputs_of(outputs)], dim=1)

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        found = dict[str, Any]()
        for name, task in self.tasks.items():
            for key, metric in task.new_metrics(device).items():
                metric.update = partial(self._update, name, metric, metric.update)  # type: ignore[method-assign]
                found[f"{name}_{key}"] = metric
        return collection(device, **found)

    def _update(
        self, name: str, metric: "Metric", update: Callable[..., None], outputs: Tensor, targets: Tensor
    ) -> None:
        """Update a metric of the task `name` with the rows that have a label."""
        task, scores, labels = self._parts(outputs, targets)[name]
        there = ~labels.isnan().all(dim=1)
        if there.any():
            update(scores[there], task.judge(labels[there])[0])
        elif not metric.update_called:
            update_with_nothing(metric, update, scores, task.judge(labels.nan_to_num(0))[0])

    def _parts(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[LabelTask, Tensor, Tensor]]:
        """Return, by task, the task and its columns of the outputs and of the targets."""
        widths = [1 if isinstance(task, NodeClassification) else task.columns[0] for task in self.tasks.values()]
        of_tasks = zip(self._outputs_of(outputs), torch.split(targets, widths, dim=1), strict=True)
        return {name: (task, own, labels) for (name, task, own), labels in of_tasks}


def _are_there(task: NodeTask, labels: Tensor) -> Tensor:
    """Return which labels are not null, as they are in the graph: [n] bool. Fractions to learn may be -1."""
    may_be_less = isinstance(task, NodeRegression) and labels.is_floating_point()
    nulls = labels.isnan() if may_be_less else labels.isnan() | labels.eq(-1)
    return ~nulls.unsqueeze(1).flatten(1).all(dim=1)
