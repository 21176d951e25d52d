"""The task on links: true links are scored against labels or candidates, with the loss and the metrics of choice."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from hoploom import ops
from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.load.loader import Loader
from hoploom.load.maker import LinkMaker, NodeMaker
from hoploom.nn.decoders import Decoder, Dot, is_product
from hoploom.ranking.losses import binary_loss, in_batch, read_loss
from hoploom.ranking.scored_links import (
    ScoredLinks,
    decoded_scores,
    decoder_of,
    links_of_batch,
    no_candidates,
    values_of_links,
)
from hoploom.ranks.context import Context, unwrap
from hoploom.ranks.differentiable import rows_of_all_ranks
from hoploom.schema import check_ids
from hoploom.train.tasks import (
    MonitoredTask,
    NodeTask,
    SeveralTasks,
    Task,
    binary_losses,
    check_tensor,
    collection,
    full_precision,
)

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

LABELLED = ("auroc", "average_precision")  # metrics that need no candidates


class BoundLinks(NamedTuple):
    """The weights [n] and features [n, k] of a loader's links, and the ranks that train or evaluate together."""

    context: Context
    weights: Tensor | None  # in training
    features: Tensor | None


@dataclass(frozen=True)
class LinkPrediction(MonitoredTask):
    """Prediction of links, by the model's `decoder` if it has one, else by dot products.

    A forward that takes `edge_label_index` returns the scores itself. The loader decides what a true link is compared
    with: labels 0 and 1, such as neg_sampling="binary" makes; candidates, by neg_sampling="triplet"; or, if it has no
    negatives, all other destinations of the batch. A candidate that is the true destination does not count.

    Losses are "binary", and for candidates also "focal", "bpr", "margin" and "softmax" (InfoNCE). Metrics are auroc and
    average_precision, and for candidates mrr, hits@k and mean_rank. `log_q` has the logarithm of each destination's
    share of the links; in training, it corrects scores of the destinations of a batch. A decoder of several relations
    gets the `edge_label` of a batch with candidates. With `num_relations`, these are the numbers of relations, and
    evaluation has metrics of each, such as relations/7/mrr.

    `features` are for a decoder with `edge_channels`: a field of the links' edges, or a row for each link of the
    loader. Candidates are scored with the features of the true link of their row, and binary negatives with those of
    the link for which they were drawn, so features must be known before it is known which destination is true. Give the
    links of another split, which are no edges of the graph, a tensor: evaluate(..., replace(task, features=rows)).

    With loss="binary", `weight` weighs the true links in training: a field of their edges, or a number for each link of
    the loader. With `across_ranks`, the other destinations are those of all ranks, as if one rank had the whole step.
    In your own loop, use `task = task.bound(loader, context)` for all three; `fit` and `evaluate` do so.

    >>> task = LinkPrediction(loss="bpr", metrics=["mrr", "hits@10"])
    """

    best: str = ""  # by default, the first metric
    loss: str = "binary"
    metrics: Sequence[str] = LABELLED
    gamma: float | None = field(default=None, kw_only=True)  # of the focal loss
    margin: float | None = field(default=None, kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)  # of the softmax
    log_q: Tensor | None = field(default=None, kw_only=True, compare=False)  # [destinations] float
    features: str | Tensor | None = field(default=None, kw_only=True, compare=False)
    weight: str | Tensor | None = field(default=None, kw_only=True, compare=False)
    across_ranks: bool = field(default=False, kw_only=True)
    num_relations: int | None = field(default=None, kw_only=True)
    first_column: int = field(default=0, kw_only=True)  # of the rows that are scored: a node task may have those before
    bound_to: BoundLinks | None = field(default=None, repr=False, kw_only=True, compare=False)  # see `bound`
    checks_on_gpu: bool = field(default=True, repr=False, kw_only=True)  # labels batch by batch

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str) or not self.metrics:
            raise ConfigError(f"metrics is {self.metrics!r}; give a list of names, such as ['mrr', 'hits@10']")
        object.__setattr__(self, "metrics", tuple(self.metrics))
        object.__setattr__(self, "best", self.best or self.metrics[0])
        self._loss_of_rows()
        for name, given in (("weight", self.weight), ("features", self.features)):
            if not isinstance(given, str | Tensor | None):
                way_out = "give a field of edges or a tensor, a row for each link"
                raise ConfigError(f"{name} is a {type(given).__name__}; {way_out}")
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

    def bound(self, loader: Loader, context: Context, *, training: bool = True) -> "LinkPrediction":
        """Return the task for the batches of this loader, in training or in evaluation."""
        maker, values = getattr(loader, "maker", None), dict[str, Tensor]()
        for name, given in (("weight", self.weight if training else None), ("features", self.features)):
            if given is not None:
                values[name] = values_of_links(name, given, maker).to(context.device)
        negatives = maker.task.negatives if isinstance(maker, LinkMaker) else None
        if "features" in values and negatives is not None and negatives.is_binary() and negatives.amount % 1:
            what = f"neg_sampling has {negatives.amount:g} for each link"
            raise ConfigError(f"features are those of the link of a negative, and {what}; give a whole number")
        if training and isinstance(maker, LinkMaker):
            for name, is_given in (("across_ranks", self.across_ranks), ("log_q", self.log_q is not None)):
                if is_given and negatives is not None:
                    raise ConfigError(f"{name} is for candidates from the batch; give it or the loader's neg_sampling")
            count = maker.assembler.store.schema.node_type(maker.task.key[2]).num_nodes
            if self.log_q is not None and self.log_q.numel() != count:
                raise ConfigError(f"log_q has {self.log_q.numel()} numbers for {count} {maker.task.key[2]!r} nodes")
        log_q = None if self.log_q is None else self.log_q.to(context.device)
        weights = values["weight"].view(-1) if "weight" in values else None
        return replace(self, log_q=log_q, bound_to=BoundLinks(context, weights, values.get("features")))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._outputs(model, batch, links_of_batch(batch, self.needs_candidates))

    def _outputs(self, model: nn.Module, batch: Batch, links: ScoredLinks) -> Tensor:
        takes_links = getattr(model, "takes_links", False)
        links = links.spread() if takes_links else links
        is_there = links.ends[1] >= 0  # a candidate of -1 is none
        links = links._replace(ends=links.ends.clamp(min=0))
        if self.features is not None:
            if self.bound_to is None or self.bound_to.features is None or takes_links:
                way_out = "let a decoder score the links" if takes_links else "use task.bound(loader, context)"
                raise ConfigError(f"features are for the decoder, which does not get them here; {way_out}")
            links = links.with_features(self.bound_to.features)
        ends, width = links.ends, links.width
        if width == 0 and takes_links:  # every source with every destination
            width = ends.shape[1]
            ends = torch.stack([ends[0].repeat_interleave(width), ends[1].repeat(width)])
        if width is not None and takes_links:
            batch = copy.copy(batch)
            (batch[links.key] if isinstance(batch, HeteroData) else batch)["edge_label_index"] = ends
        z = model(batch)
        if not isinstance(z, Mapping):
            check_tensor(z, "a row for every node, or a score for every link")
        of_source, of_destination = (z, z) if takes_links else self._rows(z, links, batch)
        if takes_links:
            found: Tensor = z.reshape(-1)
        else:
            decoder = decoder_of(model)
            if width == 0:
                right = self._of_all_ranks(of_destination.index_select(0, ends[1]), model)
                return self._in_batch(decoder.against(links.source_rows(of_source), right), links, batch, model)
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

    def batch_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of every row of a batch, [n]: `losses` of its `outputs` and `targets`, or faster.

        A softmax over joint candidates never has their scores in memory, if these are products of float32 on a CPU.
        """
        links, takes_links = links_of_batch(batch, self.needs_candidates), getattr(model, "takes_links", False)
        if self.loss != "softmax" or links.shared is None or takes_links or self.features is not None:
            return self.losses(self._outputs(model, batch, links), self.targets(batch))
        z, decoder = model(batch), decoder_of(model)
        of_source, of_destination = self._rows(z, links, batch)
        is_native = of_source.device.type == "cpu" and of_source.dtype == of_destination.dtype == torch.float32
        if is_native and is_product(decoder):
            query = decoder.query(links.source_rows(of_source), links.relations)
            true, others = (of_destination.index_select(0, ids) for ids in (links.ends[1], links.shared))
            losses = ops.shared_softmax(query, true, others, self.temperature or 1.0)
            assert links.n_id is not None
            drawn, own = links.n_id[links.shared].sort().values, links.n_id[links.ends[1]]
            copies = torch.searchsorted(drawn, own, right=True) - torch.searchsorted(drawn, own)
            return losses + torch.log1p(-copies * torch.exp(-losses))  # candidates that are the true destination
        found = decoded_scores(decoder, links, of_source, of_destination)
        return self.losses(found.view(-1, links.width or 1), self.targets(batch))

    def _rows(self, z: Tensor | Mapping[str, Tensor], links: ScoredLinks, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows of the links' source type and of their destination type, which a decoder scores."""
        source, destination = (z[name] if isinstance(z, Mapping) else z for name in links.types)
        for name, rows in zip(links.types, (source, destination), strict=True):
            storage = batch[name] if isinstance(batch, HeteroData) else batch
            counts = {*accumulate(storage.get("num_sampled_nodes") or ()), storage["n_id"].shape[0]}  # layers may trim
            if rows.dim() != 2 or (rows.shape[1] == 1 and rows.shape[0] not in counts):
                raise ConfigError(
                    f"the model returned {list(rows.shape)} for the {storage['n_id'].shape[0]} nodes {name!r} of a "
                    "batch; return a row for each node, or let forward take the argument edge_label_index to return "
                    "scores of links: they are only taken from such a forward"
                )
        return source[:, self.first_column :], destination[:, self.first_column :]

    def _of_all_ranks(self, rows: Tensor, model: nn.Module) -> Tensor:
        """Return the rows of this rank's links, then those of the other ranks if all are candidates in training."""
        if self.bound_to is None or not (self.across_ranks and model.training):
            return rows
        return rows_of_all_ranks(rows, self.bound_to.context)

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
        if self.bound_to is None or self.bound_to.weights is None:
            return targets
        found = torch.stack([targets.float(), torch.ones(targets.shape, device=targets.device)], dim=-1)
        of_links = found[:, 0] if targets.dim() == 2 else found[: links.numbers.numel()]
        of_links[:, 1] = torch.where(of_links[:, 0] == 1, self.bound_to.weights[links.numbers], 1)
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
        if self.bound_to is not None and self.bound_to.weights is not None:
            targets, weights = targets.unbind(-1)
            if outputs.dim() == 2:
                return binary_loss(full_precision(outputs), weights[:, :1])
            return binary_losses(outputs, targets) * weights
        if outputs.dim() == 2:
            return self._loss_of_rows()(full_precision(outputs))
        if self.needs_candidates:
            raise no_candidates(self.needs_candidates)
        return binary_losses(outputs, targets)

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
        return collection(device, **chosen)


def check_labels(task: Task, loader: Loader, model: nn.Module, context: Context, *, training: bool) -> Task:
    """Check the labels before the first batch if the device is a GPU; raise an error for an invalid label.

    Numbers of relations and features of links are checked on any device. Return the task, bound to the loader. A task
    on links checks labels batch by batch on a CPU. On a GPU, it does so only if a transform or a server makes the
    links, because these are not known in advance.
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
        elif isinstance(task, LinkPrediction) and relations is not None and decoder is None:
            false = (relations == 0).nonzero()
            if false.numel() and int(relations.max()) == 1:
                ends = maker.ends[:, int(false[0])].tolist()
                way_out = "give true links only, without edge_label; or num_relations=2, if these are relations"
                raise ConfigError(f"link {ends} has the label 0 beside neg_sampling='triplet'; {way_out}")
    on_cpu = context.device.type == "cpu"
    if isinstance(task, NodeTask) and isinstance(maker, NodeMaker):
        for own in (task, *(task.tasks.values() if isinstance(task, SeveralTasks) else ())):
            if own.node_type not in (None, maker.node_type):
                what = f"node_type of {type(own).__name__} is {own.node_type!r}"
                raise ConfigError(
                    f"{what}, and the loader's seeds are of {maker.node_type!r}; name that, or leave it out"
                )
        if not on_cpu:
            task.check(maker.assembler.store, maker.nodes, maker.node_type)
    if not isinstance(task, LinkPrediction):
        return task
    task = task.bound(loader, context, training=training)
    features = None if task.bound_to is None else task.bound_to.features
    (decoder if isinstance(decoder, Decoder) else Dot()).check_features(0 if features is None else features.shape[1])
    if on_cpu or not isinstance(maker, LinkMaker) or maker.transform is not None:
        return replace(task, checks_on_gpu=True)
    if maker.labels is not None and not is_triplet:
        task.check(maker.labels, maker.ends)
    return replace(task, checks_on_gpu=False)
