"""Tasks: the outputs of a model that are compared with targets, the loss of every seed, and torchmetrics' metrics.

Labels are checked in every batch. On a GPU, this would wait for the device, so labels that are known in advance are
checked once, before the first batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

from hoploom.config.values import nearest
from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.load.maker import LinkMaker, NodeMaker
from hoploom.nn.decoders import Decoder
from hoploom.ranking.losses import binary_loss, in_batch, read_loss
from hoploom.ranking.scored_links import (
    ScoredLinks,
    decoded_scores,
    decoder_of,
    links_of_batch,
    no_candidates,
    weights_of_links,
)
from hoploom.ranks.context import Context, rows_of_all_ranks, unwrap
from hoploom.schema import ORIGINAL_ID, check_ids, holds_text
from hoploom.store import Store, Wanted

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

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
            alike = nearest(self.best, known)
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


def _collection(device: torch.device, **metrics: Any) -> "MetricCollection":
    """Return metrics that sum in float64, without torchmetrics' compute groups, which may differ from rank to rank."""
    from torchmetrics import MetricCollection

    collection = MetricCollection(metrics, compute_groups=False).to(device)
    return collection.set_dtype(torch.float64)


def _full(outputs: Tensor) -> Tensor:
    """Return outputs with float16 and bfloat16 converted to float32, because losses need that precision."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _binary_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    full = _full(outputs)
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

    @property
    def columns(self) -> tuple[int, str]:
        """The number of outputs per seed, and the word for outputs in messages, such as "classes"."""
        raise NotImplementedError

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
        """Return labels as a matrix with `width` columns. For another width, raise ConfigError with `way_out`."""
        rows = labels.view(-1, 1) if labels.dim() == 1 else labels
        if rows.shape[1:] != (width,):
            raise ConfigError(f"{self.label!r} has rows of shape {tuple(rows.shape[1:])}{way_out}")
        return rows

    def check(self, store: Store, nodes: Tensor, node_type: str | None = None) -> None:
        """Raise an error if the label of one of these nodes is invalid or missing."""
        schema = store.schema
        having = [node_type.name for node_type in schema.node_types if self.label in node_type.fields]
        node_type = node_type or self.node_type or (schema.node_types[0].name if schema.homogeneous else None)
        if node_type is None and len(having) == 1:
            node_type = having[0]
        if node_type is None:
            raise ConfigError(f"the label {self.label!r} is in {having or 'no node type'}; name the seeds' node_type")
        if node_type not in having:
            raise self._no_label(node_type, sorted(schema.node_type(node_type).fields))
        found, count = None, 0
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

    def _bad_label(self, node: str, label: Tensor, wanted: str, more: str = "") -> DataError:
        what = f"node {node} is a seed with the label {self.label}={label.squeeze().tolist()!r:.80}{more}"
        is_null = bool((label.eq(-1) | label.isnan()).all())
        null = f" (a null label in a table becomes {label.flatten()[0].item()})" if is_null else ""
        return DataError(f"{what}; {wanted}{null}, or leave it out of the split")

    def _no_label(self, node_type: str, fields: list[str]) -> ConfigError:
        return ConfigError(f"the seeds' type {node_type!r} has no field {self.label!r} to learn; it has {fields}")


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


def _check_tensor(found: Any, wanted: str) -> None:
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
        return functional.cross_entropy(_full(outputs), targets, reduction="none")

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predicted class of every node: [n] int64."""
        return outputs.argmax(dim=1)

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
        """Return whether each label is predicted for a node: [n, num_labels] bool."""
        return outputs > 0

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        return _collection(device, **_class_metrics("Multilabel", self.num_labels))


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
        return rows.double(), ~rows.isfinite(), "give it a finite number"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = _full(outputs) - targets.to(_full(outputs).dtype)
        return (errors.square() if self.loss == "mse" else errors.abs()).mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predicted number of every node, [n], or its predicted numbers, [n, num_targets]."""
        return outputs[:, 0] if self.num_targets == 1 else outputs

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double()

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        from torchmetrics import regression as kinds

        return _collection(
            device,
            mae=kinds.MeanAbsoluteError(),
            mse=kinds.MeanSquaredError(),
            rmse=kinds.MeanSquaredError(squared=False),
            r2=kinds.R2Score(),
        )


# --- links ----------------------------------------------------------------------------------

LABELLED = ("auroc", "average_precision")  # metrics that need no candidates


class Running(NamedTuple):
    """The ranks that train together, and the weights of the loader's links: [n] float32."""

    context: Context
    weights: Tensor | None


@dataclass(frozen=True)
class LinkPrediction(MonitoredTask):
    """Prediction of links, by the model's `decoder` if it has one, else by dot products.

    A forward that takes `edge_label_index` returns the scores itself. The loader decides what a true link is compared
    with: labels 0 and 1, such as neg_sampling="binary" makes; candidates, by neg_sampling="triplet"; or, if it has no
    negatives, all other destinations of the batch. Losses are "binary", and for candidates also "focal", "bpr",
    "margin" and "softmax" (InfoNCE). Metrics are auroc and average_precision, and for candidates mrr, hits@k and
    mean_rank. `log_q` has the logarithm of each destination's share of the links; in training, it corrects scores of
    the destinations of a batch. A decoder of several relations gets the `edge_label` of a batch with candidates. With
    `num_relations`, these are the numbers of relations, and evaluation has metrics of each, such as relations/7/mrr.

    With loss="binary", `weight` weighs the true links in training: a field of their edges, or a number for each link of
    the loader. With `across_ranks`, the other destinations are those of all ranks, as if one rank had the whole step.
    In your own loop, use `task = task.bound(loader, context)` for both; `fit` does so.

    >>> task = LinkPrediction(loss="bpr", metrics=["mrr", "hits@10"])
    """

    best: str = ""  # by default, the first metric
    loss: str = "binary"
    metrics: Sequence[str] = LABELLED
    gamma: float | None = field(default=None, kw_only=True)  # of the focal loss
    margin: float | None = field(default=None, kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)  # of the softmax
    log_q: Tensor | None = field(default=None, kw_only=True, compare=False)  # [destinations] float
    weight: str | Tensor | None = field(default=None, kw_only=True, compare=False)
    across_ranks: bool = field(default=False, kw_only=True)
    num_relations: int | None = field(default=None, kw_only=True)
    running: Running | None = field(default=None, repr=False, kw_only=True, compare=False)  # in training, see `bound`
    checks_on_gpu: bool = field(default=True, repr=False, kw_only=True)  # labels batch by batch

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str) or not self.metrics:
            raise ConfigError(f"metrics is {self.metrics!r}; give a list of names, such as ['mrr', 'hits@10']")
        object.__setattr__(self, "metrics", tuple(self.metrics))
        object.__setattr__(self, "best", self.best or self.metrics[0])
        self._loss_of_rows()
        if self.log_q is not None and not (self.log_q.dim() == 1 and self.log_q.isfinite().all()):
            raise ConfigError("log_q needs a finite number for each destination; count every node once more, say")
        if self.weight is not None and self.loss != "binary":
            raise ConfigError(f"weight belongs to loss='binary', and loss is {self.loss!r}; leave it out")
        if self.across_ranks and not self.needs_candidates:
            raise ConfigError("across_ranks is for losses of candidates; give loss='softmax', or leave it out")
        if self.metrics != LABELLED:
            self.new_metrics(torch.device("cpu"))
        super().__post_init__()

    @property
    def metric_names(self) -> list[str]:
        return [name for name in self.metrics if name != "ranks"]

    @property
    def needs_candidates(self) -> str:
        """The name of the loss or the metric that needs candidates for each true link; empty if none does."""
        names = [self.loss] if self.loss != "binary" else [one for one in self.metrics if one not in LABELLED]
        return names[0] if names else ""

    def bound(self, loader: Loader, context: Context) -> "LinkPrediction":
        """Return the task for training on the batches of this loader, which all ranks call together."""
        maker = getattr(loader, "maker", None)
        if isinstance(maker, LinkMaker):
            for name, given in (("across_ranks", self.across_ranks), ("log_q", self.log_q is not None)):
                if given and maker.task.negatives is not None:
                    raise ConfigError(f"{name} is for candidates from the batch; give it or the loader's neg_sampling")
            count = maker.assembler.store.schema.node_type(maker.task.key[2]).num_nodes
            if self.log_q is not None and self.log_q.numel() != count:
                raise ConfigError(f"log_q has {self.log_q.numel()} numbers for {count} {maker.task.key[2]!r} nodes")
        weights = None if self.weight is None else weights_of_links(self.weight, maker).to(context.device)
        log_q = None if self.log_q is None else self.log_q.to(context.device)
        return replace(self, log_q=log_q, running=Running(context, weights))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        links, takes_links = links_of_batch(batch, self.needs_candidates), getattr(model, "takes_links", False)
        links = links.spread() if takes_links else links
        is_there = links.ends[1] >= 0  # a candidate of -1 is none
        links = links._replace(ends=links.ends.clamp(min=0))
        (source, destination), ends, width = links.types, links.ends, links.width
        if width == 0 and takes_links:  # every source with every destination
            width = ends.shape[1]
            ends = torch.stack([ends[0].repeat_interleave(width), ends[1].repeat(width)])
        if width is not None and takes_links:
            batch = copy.copy(batch)
            (batch[links.key] if isinstance(batch, HeteroData) else batch)["edge_label_index"] = ends
        z = model(batch)
        if not isinstance(z, Mapping):
            _check_tensor(z, "a row for every node, or a score for every link")
        of_source, of_destination = (z[source], z[destination]) if isinstance(z, Mapping) else (z, z)
        if takes_links:
            found: Tensor = z.reshape(-1)
        else:
            decoder = decoder_of(model)
            if width == 0:
                left, right = of_source.index_select(0, ends[0]), of_destination.index_select(0, ends[1])
                return self._in_batch(decoder.against(left, self._of_all_ranks(right, model)), links, batch, model)
            found = decoded_scores(decoder, links, of_source, of_destination)
        if links.shared is not None:
            return found.view(-1, links.width or 1)
        if found.shape[0] != ends.shape[1]:
            raise ConfigError(f"the model returned {found.shape[0]} scores for {ends.shape[1]} links")
        if width is None:
            return found
        rows = found.view(-1, width)
        if links.width == 0:
            return self._in_batch(rows, links, batch, model)
        return rows.masked_fill(~is_there.view(-1, width), -torch.inf)

    def _of_all_ranks(self, rows: Tensor, model: nn.Module) -> Tensor:
        """Return the rows of this rank's links, then those of the other ranks if all are candidates in training."""
        if self.running is None or not (self.across_ranks and model.training):
            return rows
        return rows_of_all_ranks(rows, self.running.context)

    def _in_batch(self, scores: Tensor, links: ScoredLinks, batch: Batch, model: nn.Module) -> Tensor:
        """Return scores of true links, [n, 1], and of all destinations in the batch, without accidental hits."""
        nodes = [batch[name]["n_id"] if isinstance(batch, HeteroData) else batch.n_id for name in links.types]
        pairs = torch.stack([own[ends] for own, ends in zip(nodes, links.ends, strict=True)], dim=1)
        sources, destinations = self._of_all_ranks(pairs, model).unbind(1)
        if scores.shape[1] != sources.numel():
            raise ConfigError(
                "across_ranks needs scores by dot products or a decoder; return node rows, or leave it out"
            )
        log_q = None
        if self.log_q is not None and model.training:  # metrics judge the scores themselves
            log_q = self.log_q.to(scores.device)[destinations] * (self.temperature or 1.0)
        return in_batch(scores, sources, destinations, log_q)

    def targets(self, batch: Batch) -> Tensor:
        links = links_of_batch(batch, self.needs_candidates)
        if links.labels is None:  # 1 for the true link of each row
            count = links.ends.shape[1]
            width = links.width or count + 1
            rows = count // width if links.width and links.shared is None else count
            true = (torch.arange(width, device=links.ends.device) == 0).long().expand(rows, width)
            if self.num_relations and links.relations is not None:  # the metrics tell relations apart
                return true * (1 + links.relations.long()[:, None])
            return self._weighed(true, links)
        labels = links.labels.reshape(-1)
        if self.checks_on_gpu or not labels.is_cuda:
            self.check(labels, links.ends, " (local ids)")
        return self._weighed(labels.long(), links)

    def _weighed(self, targets: Tensor, links: ScoredLinks) -> Tensor:
        """Return targets with the weights of true links, [..., 2] float32; without weights, return the targets."""
        if self.running is None or self.running.weights is None:
            return targets
        found = torch.stack([targets.float(), torch.ones(targets.shape, device=targets.device)], dim=-1)
        of_links = found[:, 0] if targets.dim() == 2 else found[: links.numbers.numel()]
        of_links[:, 1] = torch.where(of_links[:, 0] == 1, self.running.weights[links.numbers], 1)
        return found

    def check(self, labels: Tensor, ends: Tensor, ids: str = "") -> None:
        """Raise DataError for the first label that is neither 0 nor 1. The message shows the link's `ends`."""
        bad = ((labels != 0) & (labels != 1)).reshape(-1)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise DataError(
                f"link {ends[:, row].tolist()}{ids} has the label {labels.reshape(-1)[row].item()}; links are 1, or 0 "
                "where there is none"
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.running is not None and self.running.weights is not None:
            targets, weights = targets.unbind(-1)
            if outputs.dim() == 2:
                return binary_loss(_full(outputs), weights[:, :1])
            return _binary_losses(outputs, targets) * weights
        if outputs.dim() == 2:
            return self._loss_of_rows()(_full(outputs))
        if self.needs_candidates:
            raise no_candidates(self.needs_candidates)
        return _binary_losses(outputs, targets)

    def _loss_of_rows(self) -> Callable[[Tensor], Tensor]:
        options = {"gamma": self.gamma, "margin": self.margin, "temperature": self.temperature}
        return read_loss(self.loss, options)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double() if outputs.dim() == 2 else outputs.double().sigmoid()

    def new_metrics(self, device: torch.device) -> "MetricCollection":
        from hoploom.ranking.rank_metrics import LinkAUROC, LinkAveragePrecision, RankMetrics

        kinds = {"auroc": LinkAUROC, "average_precision": LinkAveragePrecision}
        chosen: dict[str, Any] = {name: kinds[name](validate_args=False) for name in self.metrics if name in kinds}
        if ranks := [name for name in self.metrics if name not in kinds]:
            chosen["ranks"] = RankMetrics(ranks, self.num_relations or 0)  # computes all of them by name
        return _collection(device, **chosen)


def check_labels(task: Task, loader: Loader, model: nn.Module, device: torch.device) -> Task:
    """Check the labels before the first batch if the device is a GPU; raise an error for an invalid label.

    Numbers of relations are checked on any device. Return the task. A task on links checks labels batch by batch on a
    CPU. On a GPU, it does so only if a transform or a server makes the links, because these are not known in advance.
    """
    maker, decoder = getattr(loader, "maker", None), getattr(unwrap(model), "decoder", None)
    is_triplet = isinstance(maker, LinkMaker) and maker.task.negatives is not None and maker.task.negatives.is_triplet()
    if isinstance(maker, LinkMaker) and maker.transform is None:
        relations = maker.labels if is_triplet else None
        if isinstance(decoder, Decoder):
            decoder.check(relations)
        if isinstance(task, LinkPrediction) and task.num_relations:
            if relations is None:
                raise ConfigError("num_relations needs the number of each link's; give the loader edge_label, triplets")
            check_ids("edge_label", relations, task.num_relations, ConfigError)
    if isinstance(task, NodeTask) and isinstance(maker, NodeMaker) and device.type != "cpu":
        task.check(maker.assembler.store, maker.nodes, maker.node_type)
    if not isinstance(task, LinkPrediction):
        return task
    if device.type == "cpu" or not isinstance(maker, LinkMaker) or maker.transform is not None:
        return replace(task, checks_on_gpu=True)
    if maker.labels is not None and not is_triplet:
        task.check(maker.labels, maker.ends)
    return replace(task, checks_on_gpu=False)
