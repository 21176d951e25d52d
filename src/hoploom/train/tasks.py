"""What is learned: which outputs meet which targets, the loss of every seed, and torchmetrics' metrics.

Labels are checked on every batch; on a GPU, where each look waits for the device, once before all of them if they are
known then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

from hoploom.config.values import nearest
from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.load.maker import LinkMaker, NodeMaker
from hoploom.ranks.context import unwrap
from hoploom.store import Store
from hoploom.train.labels import check_all, targets_of

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Mode = Literal["max", "min"]
VAL_LOSS = "val_loss"  # what the `loss` of evaluate() is called beside the `train_loss` of an epoch
SMALLER_IS_BETTER = frozenset((VAL_LOSS, "mae", "mse", "rmse"))


class Task(Protocol):
    """What `fit` and `evaluate` need from a task."""

    @property
    def monitor(self) -> tuple[str, Mode]:
        """The metric that decides which model is best."""
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The outputs of the model, one row per target."""
        ...

    def targets(self, batch: Batch) -> Tensor:
        """What the outputs should be."""
        ...

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every row [n]."""
        ...

    def scores(self, outputs: Tensor) -> Tensor:
        """The values that the metrics compare with the targets."""
        ...

    def metrics(self, device: torch.device) -> "MetricCollection":
        """Fresh metrics."""
        ...


class Judged:
    """A task whose best model is the best in one metric."""

    best: str

    def __post_init__(self) -> None:
        if self.best in ("loss", VAL_LOSS, type(self).best):  # so that torchmetrics is not imported for its names
            return
        known = [VAL_LOSS, *map(str, self.metrics(torch.device("cpu")))]
        if self.best not in known:
            same = "f1_micro equals accuracy where a node has one class; " if self.best == "f1_micro" else ""
            alike = nearest(self.best, known)
            hint = f"; did you mean {alike!r}?" if alike else ""
            raise ConfigError(
                f"best is {self.best!r}, no metric of {type(self).__name__}; {same}give one of {known}{hint}"
            )

    def metrics(self, device: torch.device) -> "MetricCollection":
        """Fresh metrics, by name."""
        raise NotImplementedError

    @property
    def monitor(self) -> tuple[str, Mode]:
        best = VAL_LOSS if self.best == "loss" else self.best
        return best, "min" if best in SMALLER_IS_BETTER else "max"


def _collection(device: torch.device, **metrics: Any) -> "MetricCollection":
    """Sums are kept in float64. No groups: they form by comparing states, which may differ between ranks."""
    from torchmetrics import MetricCollection

    collection = MetricCollection(metrics, compute_groups=False).to(device)
    return collection.set_dtype(torch.float64)


def _full(outputs: Tensor) -> Tensor:
    """Losses are never computed in half precision."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _binary_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    full = _full(outputs)
    return functional.binary_cross_entropy_with_logits(full, targets.to(full.dtype), reduction="none")


def _class_metrics(kind: str, count: int) -> dict[str, Any]:
    """Those of Multiclass or Multilabel."""
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
class NodeTask(Judged):
    """What the tasks on nodes share: where the labels of the seeds are."""

    label: str = "y"
    node_type: str | None = None  # of the seeds; None: the only type that has seeds

    @property
    def columns(self) -> tuple[int, str]:
        """How many outputs a seed has, and what they are."""
        raise NotImplementedError

    def judge(self, labels: Tensor) -> tuple[Tensor, Tensor, str]:
        """The labels as targets, where they cannot be one, and what can be one."""
        raise NotImplementedError

    def read(self, labels: Tensor, nodes: Tensor) -> Tensor:
        """The labels of these nodes as targets; an error names the first that cannot be one."""
        return targets_of(self.judge, self.label, labels, nodes)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        _, node_type, num_seeds = _seeds(batch, self.node_type)
        (count, what), found = self.columns, model(batch)
        if isinstance(found, Mapping):
            if node_type not in found:
                raise ConfigError(f"the model has outputs for {list(found)}, the seeds are of {node_type!r}")
            found = found[node_type]
        _check_tensor(found, "a row for every seed")
        if found.shape[0] < num_seeds:
            raise ConfigError(
                f"the model returned {found.shape[0]} rows for {num_seeds} seeds; return one for each, seeds first"
            )
        rows: Tensor = found[:num_seeds].view(-1, 1) if found.dim() == count == 1 else found[:num_seeds]
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
        """The labels with this many columns."""
        rows = labels.view(-1, 1) if labels.dim() == 1 else labels
        if rows.shape[1:] != (width,):
            raise ConfigError(f"{self.label!r} has rows of shape {tuple(rows.shape[1:])}{way_out}")
        return rows

    def check(self, store: Store, nodes: Tensor, node_type: str | None = None) -> None:
        """Raise if one of these nodes has no label that can be learned: once, before training."""
        schema = store.schema
        having = [node_type.name for node_type in schema.node_types if self.label in node_type.fields]
        node_type = node_type or self.node_type or (schema.node_types[0].name if schema.homogeneous else None)
        if node_type is None and len(having) == 1:
            node_type = having[0]
        if node_type is None:
            raise ConfigError(f"the label {self.label!r} is in {having or 'no node type'}; name the seeds' node_type")
        if node_type not in having:
            raise self._no_label(node_type, sorted(schema.node_type(node_type).fields))
        check_all(self.judge, store, node_type, self.label, nodes)

    def _no_label(self, node_type: str, fields: list[str]) -> ConfigError:
        return ConfigError(f"the seeds' type {node_type!r} has no field {self.label!r} to learn; it has {fields}")


def _check_tensor(found: Any, wanted: str) -> None:
    if not isinstance(found, Tensor):
        raise ConfigError(f"the model returned a {type(found).__name__}; return a tensor with {wanted}")


def _seeds(batch: Batch, node_type: str | None) -> tuple[Any, str, int]:
    """Where a batch keeps its seeds, their type and number: they stand first in their type."""
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
        return functional.cross_entropy(_full(outputs), targets, reduction="none")

    def predictions(self, outputs: Tensor) -> Tensor:
        """The class of every node [n]."""
        return outputs.argmax(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().softmax(dim=-1)

    def metrics(self, device: torch.device) -> "MetricCollection":
        metrics = _class_metrics("Multiclass", self.num_classes)
        del metrics["f1_micro"]
        if self.num_classes != 2:
            del metrics["auroc"]
        if self.confusion:
            from torchmetrics.classification import MulticlassConfusionMatrix

            metrics["confusion"] = MulticlassConfusionMatrix(self.num_classes, validate_args=False)
        return _collection(device, **metrics)


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
        return _binary_losses(outputs, targets).mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Whether a node has each label [n, num_labels]."""
        return outputs > 0

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()

    def metrics(self, device: torch.device) -> "MetricCollection":
        return _collection(device, **_class_metrics("Multilabel", self.num_labels))


@dataclass(frozen=True)
class NodeRegression(NodeTask):
    """Numbers per node, with squared or absolute error. Metrics: MAE, MSE, RMSE and R2."""

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
        return rows.double(), ~rows.isfinite(), "give it a finite number"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = _full(outputs) - targets.to(_full(outputs).dtype)
        return (errors.square() if self.loss == "mse" else errors.abs()).mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The number of every node [n], or its numbers [n, num_targets]."""
        return outputs[:, 0] if self.num_targets == 1 else outputs

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double()

    def metrics(self, device: torch.device) -> "MetricCollection":
        from torchmetrics import regression as kinds

        return _collection(
            device,
            mae=kinds.MeanAbsoluteError(),
            mse=kinds.MeanSquaredError(),
            rmse=kinds.MeanSquaredError(squared=False),
            r2=kinds.R2Score(),
        )


# --- links ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkPrediction(Judged):
    """Whether there is a link: from the model's score(z, edge_label_index) if it has one, else from the dot product.

    A forward that takes `edge_label_index` returns the scores itself.

    For LinkNeighborLoader(neg_sampling="binary") or links with labels 0 and 1: AUROC, average precision.
    """

    best: str = "auroc"
    looks: bool = field(default=True, repr=False, kw_only=True)  # at the labels of batches on a GPU, too

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        storage, (source, destination) = _links(batch)
        z, ends = model(batch), storage["edge_label_index"]
        score = getattr(unwrap(model), "score", None)
        if not isinstance(z, Mapping):
            _check_tensor(z, "a row for every node, or a score for every link")
        if getattr(model, "takes_links", False):
            found: Tensor = z.reshape(-1)
        elif score is not None:
            found = score(z, ends).reshape(-1)
        else:
            of_source, of_destination = (z[source], z[destination]) if isinstance(z, Mapping) else (z, z)
            found = (of_source.index_select(0, ends[0]) * of_destination.index_select(0, ends[1])).sum(dim=-1)
        if found.shape[0] != ends.shape[1]:
            raise ConfigError(f"the model returned {found.shape[0]} scores for {ends.shape[1]} links")
        return found

    def targets(self, batch: Batch) -> Tensor:
        storage, _ = _links(batch)
        labels: Tensor = storage["edge_label"].reshape(-1)
        if self.looks or not labels.is_cuda:
            self.check(labels, storage["edge_label_index"], " (local ids)")
        return labels.long()

    def check(self, labels: Tensor, ends: Tensor, ids: str = "") -> None:
        """Raise an error for the first label that is neither 0 nor 1."""
        bad = ((labels != 0) & (labels != 1)).reshape(-1)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise DataError(
                f"link {ends[:, row].tolist()}{ids} has the label {labels.reshape(-1)[row].item()}; links are 1, or 0 "
                "where there is none"
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _binary_losses(outputs, targets)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()

    def metrics(self, device: torch.device) -> "MetricCollection":
        from torchmetrics import classification as kinds

        return _collection(
            device,
            auroc=kinds.BinaryAUROC(validate_args=False),
            average_precision=kinds.BinaryAveragePrecision(validate_args=False),
        )


def _links(batch: Batch) -> tuple[Any, tuple[str, str]]:
    """Where a batch keeps its links and their labels, and the types of their ends."""
    stores = batch.edge_stores if isinstance(batch, HeteroData) else [batch]
    found = [storage for storage in stores if "edge_label_index" in storage and "edge_label" in storage]
    if len(found) != 1:
        raise ConfigError("the batch has no labelled links; use LinkNeighborLoader with neg_sampling='binary'")
    key = found[0]._key if isinstance(batch, HeteroData) else ("node", "to", "node")
    return found[0], (key[0], key[2])


# --- before all batches ---------------------------------------------------------------------


def check_labels(task: Task, loader: Loader, device: torch.device) -> Task:
    """The task to take for these batches, which looks at labels no more where all have been looked at here.

    Raises for a label that cannot be learned. Nobody knows beforehand what a transform or a server makes of links.
    """
    maker = None if device.type == "cpu" else getattr(loader, "maker", None)
    if isinstance(task, NodeTask) and isinstance(maker, NodeMaker):
        task.check(maker.assembler.store, maker.seeds.nodes, maker.seeds.node_type)
    if not isinstance(task, LinkPrediction):
        return task
    if not isinstance(maker, LinkMaker) or maker.transform is not None:
        return replace(task, looks=True)
    if maker.links.labels is not None:
        task.check(maker.links.labels, maker.links.ends)
    return replace(task, looks=False)
