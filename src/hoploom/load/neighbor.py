"""NeighborLoader, LinkNeighborLoader and HGTLoader: PyG's arguments in, PyG's batches out."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom.errors import ConfigError
from hoploom.load import arguments as inputs
from hoploom.load.arguments import HGTArguments, LinkArguments, NodeArguments, taking
from hoploom.load.loader import Loader
from hoploom.load.maker import LinkMaker, NodeMaker, NodeTimes, Sampler
from hoploom.sample import LinkTask
from hoploom.sample.hops import make_hgt_sampling, make_sampling
from hoploom.sample.negatives import KINDS, Kind, known_links
from hoploom.schema import ID_DTYPES, RelationName
from hoploom.store import Store
from hoploom.store.from_pyg import PygGraph
from hoploom.system import require_memory

PAIR_BYTES = 128  # of memory for each link and candidate, while a batch is made


class NeighborLoader(Loader):
    """Batches of sampled neighbourhoods of nodes, as PyG's NeighborLoader makes them.

    Takes PyG's arguments and yields PyG's batches. `data` may also be a store or its path, and `input_nodes` the name
    of a split. `num_workers` is a number of threads. Beyond PyG, there are:

    - `seed`: the number from which all random choices derive; default: the seed of `generator`, else 0
    - `rank`, `world_size`: which share of the seeds this loader reads; by default those of the process group, else of
      torchrun's or Slurm's environment, else one process. `rank=0, world_size=1` reads all seeds
    - `least_tail`: a last step with fewer seeds than this joins the step before it. If the value is at least your
      largest number of ranks, an epoch has the same steps for all numbers of ranks
    - `locality=[[0], [1]]`: seeds go to the ranks that hold their part, as far as equal batches allow; `True`: the
      parts of every rank are those that `hoploom.open` found
    - `look_ahead`: fetch the remote rows of this many steps together, each row once
    - `fields=["x"]`, `fields={"paper": ["x", "y"]}`: batches have only these fields, and ids; `[]`: no fields.
      Blocks have only those fields of edges that are named here, in `block.data`
    - `device`: where batches arrive, copied on a side stream; batches of a placed store are made on its device
    - `mode="blocks"`: message-flow blocks; `sample_frontier(layer, graph, seeds)` chooses the edges of each layer
    - `time_window`, `strictly_before`: edges that are too old, or as new as the seed, are not sampled
    - `labor`: the seeds of a batch share neighbours, so a batch has fewer distinct nodes
    - `aggregate="mean"`: the neighbours of layer one arrive aggregated, and `x` has only the nodes that layer one
      computes. Take the value from a model of hoploom.nn: `model.first_reduce`
    - `degrees`: adds `in_degree`, the in-degree of every node in the whole graph; GCN uses it to normalise

    >>> loader = NeighborLoader("papers.store", [15, 10, 5], input_nodes="train", batch_size=1024, shuffle=True)
    """

    @taking(NodeArguments)
    def __init__(self, given: NodeArguments) -> None:
        if given.input_time is not None and given.time_attr is None:
            raise ConfigError("'input_time' is set while 'time_attr' is not set; name the time attribute")
        graph = inputs.read_input(given.data, weight_attr=given.weight_attr, time_attr=given.time_attr)
        sampler = _neighbor_sampler(graph.store, given)
        super().__init__(given, graph, _node_maker(given, sampler, graph))


class HGTLoader(Loader):
    """Batches with a fixed number of nodes per type, sampled by budget, as PyG's HGTLoader makes them.

    In each layer, `num_samples` nodes of every type join the batch; give one list for all types, or a list by type.
    Nodes are drawn without replacement, in proportion to the square of their budget. A node's budget is the sum of
    1 / in-degree of all nodes of the batch to which it has an edge, for each relation. If a node has more than 50
    in-edges of a relation, 50 of them are picked. A batch has all edges between its nodes.

    Takes PyG's arguments, and of those that NeighborLoader adds `seed`, `rank`, `world_size`, `least_tail`, `locality`,
    `look_ahead`, `fields` and `device`.

    >>> loader = HGTLoader(data, [512] * 4, input_nodes=("paper", data["paper"].train_mask), batch_size=128)
    """

    @taking(HGTArguments)
    def __init__(self, given: HGTArguments) -> None:
        graph = inputs.read_input(given.data, weight_attr=None, time_attr=None)
        sampling = make_hgt_sampling(graph.store.schema, given.num_samples)
        super().__init__(given, graph, _node_maker(given, Sampler(graph.store.graph, sampling), graph))


class LinkNeighborLoader(Loader):
    """Batches of sampled neighbourhoods of links, with negative links, as PyG's LinkNeighborLoader makes them.

    Takes PyG's arguments and yields PyG's batches. Beyond PyG, it has the arguments that NeighborLoader adds, and:

    - `candidates`: the destinations that triplets draw: "uniform", or "joint", the same for all links of a step;
      "historical", earlier ones of the same source; "all", every other node; or a tensor of ids [num_links, m]
    - `strict_negatives`: no negative link is an edge of the graph, or one of `known_links` ([2, m])
    - `edge_label` with neg_sampling="triplet": the number of each link's relation, for decoders that have several
    - `exclude="both"`: the links of a step, and the same edges in the reverse relation, are not sampled; also "self",
      "reverse" or "none". `exclude_below=20` excludes only edges with an end that has fewer than 20 links

    >>> loader = LinkNeighborLoader(data, [10, 5], neg_sampling="binary", batch_size=512, shuffle=True)
    """

    @taking(LinkArguments)
    def __init__(self, given: LinkArguments) -> None:
        if (given.edge_label_time is None) != (given.time_attr is None):
            names = ("edge_label_time", "time_attr") if given.time_attr is None else ("time_attr", "edge_label_time")
            raise ConfigError("{!r} is set while {!r} is not set; give both or neither".format(*names))
        graph = inputs.read_input(given.data, weight_attr=given.weight_attr, time_attr=given.time_attr)
        store = graph.store
        sampler = _neighbor_sampler(store, given)
        assembler = inputs.assembler_of(given, graph, sampler.sampling)
        negatives = inputs.read_negatives(given.neg_sampling, given.neg_sampling_ratio)
        links = inputs.read_edge_label_index(store, given.edge_label_index)
        key, ends, _ = links
        count = ends.shape[1]
        if count == 0:
            raise ConfigError("edge_label_index is empty; give at least one link")
        labels = None
        if given.edge_label is not None:
            labels = inputs.read_tensor("edge_label", given.edge_label)
            if labels.shape[:1] != (count,):
                raise ConfigError(f"edge_label has shape {tuple(labels.shape)} for {count} links; give one each")
            if negatives is not None and negatives.is_binary() and labels.min() == 0:
                labels = labels + 1  # zero now means negative, as in PyG
        kind, negatives, listed = _read_candidates(given, negatives, count, store.schema.node_type(key[2]).num_nodes)
        if labels is not None and negatives is not None and negatives.is_triplet() and labels.is_floating_point():
            raise ConfigError(
                f"edge_label has {labels.dtype} beside neg_sampling='triplet', where it is the number of each link's "
                "relation; give true links only, edge_label_index[:, edge_label == 1], without edge_label"
            )
        task = _link_task(store, key, negatives, given, kind)
        times = inputs.as_times("edge_label_time", given.edge_label_time, count)
        input_id = None if given.input_id is None else inputs.read_column("input_id", given.input_id, "links", count)
        exclusion = inputs.read_exclude(store, links, given)
        columns = labels, times, input_id
        maker = LinkMaker(sampler, assembler, task, ends, *columns, exclusion, listed, transform=given.transform)
        super().__init__(given, graph, maker)


def _neighbor_sampler(store: Store, given: NodeArguments | LinkArguments) -> Sampler:
    sampling = make_sampling(
        store.schema,
        inputs.read_fanouts(store.schema, given.num_neighbors),
        subgraph_type=given.subgraph_type if given.directed else "induced",
        replace=given.replace,
        labor=given.labor,
        disjoint=given.disjoint,
        temporal_strategy=given.temporal_strategy,
        time_attr=given.time_attr,
        weight_attr=given.weight_attr,
        mode=given.mode,
        window=inputs.read_time_window(given.time_window),
        strictly_before=given.strictly_before,
    )
    if given.sample_frontier is None:
        return Sampler(store.graph, sampling)
    if sampling.mode != "blocks":  # then options that the hook would override, as it chooses the edges
        raise ConfigError("sample_frontier needs mode='blocks'")
    if sampling.disjoint:
        raise ConfigError("sample_frontier cannot be disjoint or temporal; drop one of the two")
    if sampling.weighted:
        raise ConfigError(
            "weight_attr has no effect beside sample_frontier; build the store with it, as in hoploom.from_pyg(data, "
            "weight_attr=...), and let the hook call graph.sample_neighbors(..., weighted=True)"
        )
    for name in ("replace", "labor"):
        if getattr(sampling, name):
            raise ConfigError(
                f"{name}=True has no effect beside sample_frontier; leave it out, and let the hook call "
                f"graph.sample_neighbors(..., {name}=True)"
            )
    return Sampler(store.graph, sampling, given.sample_frontier)


def _node_maker(given: NodeArguments | HGTArguments, sampler: Sampler, graph: PygGraph) -> NodeMaker:
    input_time, time_attr = (given.input_time, given.time_attr) if isinstance(given, NodeArguments) else (None, None)
    assembler = inputs.assembler_of(given, graph, sampler.sampling)
    node_type, nodes, implied = inputs.read_input_nodes(graph.store, given.input_nodes)
    if nodes.numel() == 0:
        raise ConfigError(f"input_nodes is empty ({given.input_nodes!r:.60}); give at least one seed")
    input_id = implied
    if given.input_id is not None:
        input_id = inputs.read_column("input_id", given.input_id, "seeds", nodes.numel())
    times = inputs.as_times("input_time", input_time, nodes.numel())
    if time_attr is not None and times is None and time_attr not in graph.store.schema.node_type(node_type).fields:
        raise ConfigError(f"{node_type!r} has no {time_attr!r} to date its seeds; give input_time")
    return NodeMaker(sampler, assembler, node_type, nodes, input_id, times, transform=given.transform)


def _read_candidates(
    given: LinkArguments, negatives: NegativeSampling | None, count: int, num_nodes: int
) -> tuple[Kind, NegativeSampling | None, Tensor | None]:
    """Return the kind of candidates, the options of negatives with their number, and listed candidates [count, m]."""
    named: Any = given.candidates
    if isinstance(named, str):
        if named not in KINDS[:-1]:
            names = list(KINDS[:-1])
            raise ConfigError(f"candidates is {named!r:.80}; choose one of {names}, or give ids [num_links, m]")
        if named != "all":
            return named, negatives, None
        if negatives is not None and (negatives.is_binary() or negatives.amount != 1):
            raise ConfigError("candidates='all' compares each link with all other nodes; give neg_sampling='triplet'")
        if num_nodes < 2:
            raise ConfigError("candidates='all' needs another destination than the true one; give a larger graph")
        size = min(given.batch_size, count)
        what = f"the {num_nodes - 1:,} candidates of each of {size} links take"
        way_out = "give a smaller batch_size (loader.eval_batch_size in a run), or neg_sampling='triplet'"
        require_memory(size * num_nodes * PAIR_BYTES, what, way_out)
        return "all", NegativeSampling("triplet", num_nodes - 1), None
    listed = inputs.read_tensor("candidates", named)
    if listed.dim() != 2 or listed.shape[0] != count or not listed.shape[1] or listed.dtype not in ID_DTYPES:
        shown = f"{listed.dtype} of shape {tuple(listed.shape)}"
        raise ConfigError(f"candidates is {shown}; give integer ids [{count}, m], a row for each link, -1 for none")
    least, most = (int(bound) for bound in listed.aminmax())
    if least < -1 or most >= num_nodes:
        raise ConfigError(f"candidates holds id {least if least < -1 else most}, out of range [-1, {num_nodes})")
    if (empty := (listed < 0).all(1)).any():
        raise ConfigError(f"candidates has only -1 in row {int(empty.nonzero()[0])}; leave the link out, or give ids")
    width = listed.shape[1]
    negatives = NegativeSampling("triplet", width) if negatives is None else negatives
    if negatives.amount > width:
        raise ConfigError(f"neg_sampling wants {negatives.amount:g} candidates of {width}; give at most {width}")
    return "listed", negatives, listed.to(torch.int64).contiguous()


def _link_task(
    store: Store, key: RelationName, negatives: NegativeSampling | None, given: LinkArguments, kind: Kind
) -> LinkTask:
    known = None
    if given.known_links is not None:
        if not (given.strict_negatives or kind == "all"):
            raise ConfigError("known_links has no effect without strict_negatives; give strict_negatives=True")
        ends = inputs.read_ends("known_links", given.known_links, store.schema, key)
        known = known_links(ends, store.schema.node_type(key[2]).num_nodes)
    if negatives is None and given.strict_negatives:
        raise ConfigError("strict_negatives needs neg_sampling")
    weights = {
        name: inputs.read_weight(name, weight, store.schema.node_type(end).num_nodes)
        for name, end in (("src_weight", key[0]), ("dst_weight", key[2]))
        if (weight := getattr(negatives, name, None)) is not None
    }
    if negatives is not None:
        negatives = NegativeSampling(negatives.mode, negatives.amount, **weights)
    times = None if given.time_attr is None else NodeTimes(store)  # links have times: negatives must exist by then
    task = LinkTask(key, negatives, given.strict_negatives, times, kind, known)
    task.check(store.schema)
    return task
