"""Look for leaks in a sample of a run's training batches: predicted links, edges of the future, labels among features.

Nothing is trained. A batch is sampled as training would sample it, and its edges are compared with what it predicts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom.batch import Sampled
from hoploom.load.maker import LinkMaker, NodeMaker
from hoploom.ranks.context import Context
from hoploom.sample.exclusions import opposite_relations
from hoploom.store import Store, Wanted
from hoploom.store.base import NO_IDS
from hoploom.train.runs.link_splits import read_links, shared_links
from hoploom.train.runs.run import complete_setup, make_model, open_graph, train_loader
from hoploom.train.runs.run_file import LINKS, RunFile

BATCHES = 8  # spread over the epoch
ROWS = 4096  # seeds whose features are compared with their labels


@dataclass
class Leaks:
    """The result of the look."""

    num_batches: int = 0
    num_edges: int = 0  # that messages pass over in these batches
    found: list[str] = field(default_factory=list)  # a sentence for each kind of leak


def find_leaks(run_file: RunFile, context: Context, num_batches: int = BATCHES) -> Leaks:
    """Sample some training batches of a run, and return which leaks they have.

    >>> find_leaks(read_run_file("run.toml"), context).found
    """
    setup = complete_setup(run_file, open_graph(run_file, context), context)
    model = make_model(run_file, setup)
    reading, *of_sides = (
        train_loader(run_file, each, context, model).reading() for each in (setup, *setup.sides.values())
    )
    order, maker, leaks = reading.order.at_epoch(0), reading.maker, Leaks()
    predicted = turned = later = 0
    for step in order.steps[:: max(1, len(order.steps) // num_batches)][:num_batches]:
        share = order.step(step)
        seeds, sampled = maker.start(share), maker.sample(share)
        edges = [_edges(setup.store, sampled, index) for index in range(len(setup.store.schema.relations))]
        leaks.num_batches += 1
        leaks.num_edges += sum(of_relation.sources.numel() for of_relation in edges)
        if isinstance(maker, LinkMaker):
            own, back = _predicted(maker, share.whole_step(), edges)
            predicted, turned = predicted + own, turned + back
        elif seeds.times is not None:
            later += _later(setup.store, seeds.times, edges)
    for count, what in (
        (predicted, "are links that their step predicts; leave task.exclude out"),
        (turned, "are such links in the opposite direction; leave task.exclude out"),
        (later, "are later than their seed"),
    ):
        if count:
            leaks.found.append(f"{count:,} of {leaks.num_edges:,} edges in {leaks.num_batches} batches {what}")
    if isinstance(maker, LinkMaker) and run_file.task.links is not None:
        leaks.found += shared_links(read_links(run_file, setup.store, maker.task.key, run_file.task.links))
    if isinstance(maker, NodeMaker) and setup.store.schema.time is not None and maker.sampler.sampling.temporal is None:
        late = f"edges may be later than their seed by the field {setup.store.schema.time!r}"
        leaks.found.append(f"{late}; set loader.temporal")
    for each in (reading, *of_sides):
        if isinstance(each.maker, NodeMaker):
            leaks.found += _among_features(run_file, setup.store, each.maker)
    return leaks


class BatchEdges(NamedTuple):
    """The edges of one relation in a batch."""

    sources: Tensor  # [n] int64 node ids
    destinations: Tensor  # [n] int64 node ids
    positions: Tensor  # [n] int64, in the store
    trees: Tensor | None  # [n] int64: the seed of each edge, from 0; in disjoint sampling


def _edges(store: Store, sampled: Sampled, index: int) -> BatchEdges:
    schema, key = store.schema, store.schema.relations[index].key
    layers = [(block.edge_index[key], block.e_id[key]) for block in sampled.blocks]  # type: ignore[index]
    layers = layers or [(sampled.edge_index[index], sampled.edges[index])]
    ends = torch.cat([edge_index for edge_index, _ in layers], dim=1).long()
    positions = torch.cat([NO_IDS if found is None else found for _, found in layers])
    trees = None if sampled.trees is None else sampled.trees[schema.destinations[index]][ends[1]]
    nodes = sampled.nodes[schema.sources[index]][ends[0]], sampled.nodes[schema.destinations[index]][ends[1]]
    return BatchEdges(*nodes, positions, trees)


def _predicted(maker: LinkMaker, links: Tensor, edges: Sequence[BatchEdges]) -> tuple[int, int]:
    """Return how many edges are links of the step, and how many are such links in the opposite direction."""
    schema, key = maker.sampler.graph.schema, maker.task.key
    if key not in schema.relation_index:
        return 0, 0
    own, stride = schema.relation_index[key], schema.node_type(key[2]).num_nodes
    wanted = maker.ends[0][links] * stride + maker.ends[1][links]
    same = torch.isin(edges[own].sources * stride + edges[own].destinations, wanted)
    turned = [
        torch.isin(edges[other].destinations * stride + edges[other].sources, wanted)
        for other in opposite_relations(schema, own)
    ]
    return int(same.sum()), sum(int(found.sum()) for found in turned)


def _later(store: Store, times: Tensor, edges: Sequence[BatchEdges]) -> int:
    """Return how many edges are later than their seed, by their own time or that of their source."""
    schema, count = store.schema, 0
    assert schema.time is not None
    for relation, found in zip(schema.relations, edges, strict=True):
        if schema.time in relation.fields:
            wanted = Wanted(relation.key, schema.time, found.positions)
        elif schema.time in schema.node_type(relation.source).fields:
            wanted = Wanted(relation.source, schema.time, found.sources)
        else:
            continue
        assert found.trees is not None  # temporal sampling is disjoint
        count += int((store.features.gather([wanted])[0].long() > times[found.trees]).sum())
    return count


def _among_features(run_file: RunFile, store: Store, maker: NodeMaker) -> Iterator[str]:
    """Yield a sentence for each feature that equals a label of the nodes."""
    fields, task = store.schema.node_type(maker.node_type).fields, run_file.task
    names = [*([] if task.kind == LINKS else [task.label]), *task.more]
    if "x" not in fields or any(len(fields[name].shape) > 1 for name in ("x", *names)):
        return
    wanted = [Wanted(maker.node_type, name, maker.nodes[:ROWS]) for name in ("x", *names)]
    x, *of_names = (rows.double().reshape(len(rows), -1) for rows in store.features.gather(wanted))
    for label, own in (
        (name, own) for name, rows in zip(names, of_names, strict=True) for own in torch.split(rows, 1, dim=1)
    ):
        if (own != own[0]).any():
            for feature in torch.nonzero((x == own).all(0)).view(-1).tolist():
                yield f"feature {feature} of {maker.node_type!r} equals the label {label!r}; leave it out"
