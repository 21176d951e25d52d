"""What each way of sampling promises, by arithmetic on rings and small graphs. Distributions: test_statistics.py."""

from typing import Any

import pytest
import torch
from support.batches import Replayed, assert_same
from support.graphs import add_relation, library, random_graph, ring
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from hoploom import ConfigError, Edges, NeighborLoader
from hoploom.sample import Layer, LayerGraph

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def sample(data: Any, num_neighbors: Any, input_nodes: Any = None, **options: Any) -> Any:
    (batch,) = NeighborLoader(data, num_neighbors, input_nodes, batch_size=1000, **options)
    return batch


def graph_of(num_nodes: int, edges: list[tuple[int, int]]) -> Data:
    return Data(edge_index=torch.tensor(edges).t().contiguous(), num_nodes=num_nodes)


def star(num_leaves: int, num_centres: int = 1) -> Data:
    """Every leaf points at every centre; the centres are the first nodes."""
    leaves, centres = range(num_centres, num_centres + num_leaves), range(num_centres)
    return graph_of(num_centres + num_leaves, [(leaf, centre) for centre in centres for leaf in leaves])


def in_degrees(batch: Data) -> Tensor:
    return torch.bincount(batch.edge_index[1], minlength=batch.n_id.numel())


def test_each_node_is_expanded_once_at_the_hop_that_first_reaches_it() -> None:
    batch = sample(ring(12), [-1, -1, -1], [0])
    assert batch.n_id.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([1, 2, 2, 2], [2, 4, 4])
    assert in_degrees(batch).tolist() == [2, 2, 2, 2, 2, 0, 0]
    assert sample(ring(5), [-1] * 4, [0]).num_sampled_nodes == [1, 2, 2, 0, 0]
    assert sample(ring(12), [0, 2], [0, 6]).num_sampled_edges == [0, 0]


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_seeds_without_neighbours_are_alone(subgraph_type: str) -> None:
    data = Data(x=torch.eye(4), edge_index=torch.empty(2, 0, dtype=torch.int64))
    batch = sample(data, [2, -1], [3, 1], subgraph_type=subgraph_type)
    assert (batch.n_id.tolist(), batch.edge_index.shape, batch.edge_index.dtype) == ([3, 1], (2, 0), torch.int64)
    assert sample(data, [2], [3, 1], mode="blocks").blocks[0].edge_index.shape == (2, 0)
    assert sample(graph_of(4, [(0, 1)]), [5, 5], [3, 2], subgraph_type=subgraph_type).n_id.tolist() == [3, 2]


def test_loops_and_repeated_edges_are_edges_like_any_other() -> None:
    batch = sample(graph_of(2, [(0, 0), (1, 0), (1, 0), (1, 1)]), [-1, -1], [0])
    assert (batch.n_id.tolist(), batch.edge_index.tolist()) == ([0, 1], [[0, 1, 1, 1], [0, 0, 0, 1]])
    assert batch.e_id.tolist() == [0, 1, 2, 3]


attrs = pytest.mark.parametrize("attr", ["node_time", "edge_time"])


def times_of_edges(data: Data, attr: str) -> Tensor:
    return data.edge_time if attr == "edge_time" else data.node_time[data.edge_index[0]]


@attrs
@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_a_tree_grows_at_every_hop_by_what_its_seed_may_see(attr: str, strategy: str) -> None:
    data, seeds, seed_times = random_graph(60, 600, 2), torch.tensor([5, 9, 5, 30]), torch.tensor([20, 40, 60, 99])
    options = {"time_attr": attr, "input_time": seed_times, "temporal_strategy": strategy}
    batch, times = sample(data, [3, 3], seeds, **options), times_of_edges(data, attr)
    assert (times[batch.e_id] <= seed_times[batch.batch[batch.edge_index[1]]]).all()
    count = sum(batch.num_sampled_nodes[:-1])  # all but those of the last hop have had their turn
    visible = [
        ((data.edge_index[1] == node) & (times <= seed_times[tree])).sum()
        for node, tree in zip(batch.n_id[:count], batch.batch[:count], strict=True)
    ]
    assert torch.equal(in_degrees(batch)[:count], torch.stack(visible).clamp(max=3))


def test_seeds_have_their_own_time_unless_another_is_given() -> None:
    data = random_graph(60, 600, 2)
    own = sample(data, [3, 3], time_attr="node_time")
    given = sample(data, [3, 3], time_attr="node_time", input_time=data.node_time)
    assert torch.equal(own.e_id, given.e_id)
    assert "seed_time" not in own


def test_types_without_a_time_are_always_in_time() -> None:
    data = library()
    data["paper"].time = torch.arange(10)
    batch = sample(data, [-1, -1], ("paper", torch.tensor([2, 7])), time_attr="time")
    assert (batch["paper"].time <= torch.tensor([2, 7])[batch["paper"].batch]).all()
    for tree, paper in enumerate([2, 7]):
        authors = batch["author"].n_id[batch["author"].batch == tree]
        assert set(authors.tolist()) >= {a for a in range(6) if (a + paper) % 2 == 0 or (a + paper) % 3 == 0}
    assert batch[CITES].e_id.numel() == 0  # whoever cites a paper is later
    with pytest.raises(ConfigError, match="input_time"):
        sample(data, [-1], "author", time_attr="time")
    by_venue = sample(data, [-1], "venue", time_attr="time", input_time=torch.tensor([-1, 4, 100]))
    assert by_venue["paper", "appears_in", "venue"].edge_index[1].tolist() == [1, 1, 2, 2, 2]


def test_relations_without_weights_are_sampled_uniformly_beside_those_with() -> None:
    data = library()
    data[CITES].weight = torch.zeros(36)
    batch = sample(data, [2], "paper", weight_attr="weight")
    assert batch[CITES].e_id.numel() == 0
    assert (batch[WRITES].weight > 0).all()
    assert batch["author", "reviews", "paper"].e_id.numel() == 18


def test_labor_gives_seeds_of_the_same_neighbourhood_the_same_sources() -> None:
    batch = sample(star(60, num_centres=4), [5], torch.arange(4), labor=True)
    assert (in_degrees(batch)[:4].tolist(), batch.num_sampled_nodes) == ([5, 5, 5, 5], [4, 5])
    assert sample(star(60, num_centres=4), [5], torch.arange(4)).num_sampled_nodes[1] > 5


@pytest.mark.parametrize(("data", "seeds"), [(random_graph(40, 400, 1), [0, 1]), (library(), ("paper", [0, 8]))])
def test_an_induced_batch_has_every_edge_between_its_nodes_once(data: Any, seeds: Any) -> None:
    batch = sample(data, [2, 1], seeds, subgraph_type="induced")
    for whole, part in zip(data.edge_stores, batch.edge_stores, strict=True):
        ends = [batch.n_id] * 2 if isinstance(batch, Data) else [batch[end].n_id for end in whole._key[::2]]
        inside = torch.isin(whole.edge_index[0], ends[0]) & torch.isin(whole.edge_index[1], ends[1])
        assert sorted(part.e_id.tolist()) == inside.nonzero().view(-1).tolist()
        found = torch.stack([nodes[row] for nodes, row in zip(ends, part.edge_index, strict=True)])
        assert torch.equal(found, whole.edge_index[:, part.e_id])


@pytest.mark.parametrize("attr", [None, "node_time", "edge_time"])
def test_an_induced_tree_has_every_edge_between_its_nodes_that_its_seed_may_see(attr: str | None) -> None:
    data, seeds, seed_times = random_graph(40, 600, 2), torch.tensor([5, 9, 5, 30]), torch.tensor([20, 40, 60, 99])
    times = torch.zeros(600) if attr is None else times_of_edges(data, attr)
    options: Any = {"disjoint": True} if attr is None else {"time_attr": attr, "input_time": seed_times}
    batch = sample(data, [3, 2], seeds, subgraph_type="induced", **options)
    of_edges = batch.batch[batch.edge_index]
    assert torch.equal(of_edges[0], of_edges[1])
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    for tree, latest in enumerate(seed_times):
        inside = torch.isin(data.edge_index, batch.n_id[batch.batch == tree]).all(dim=0) & (times <= latest)
        assert sorted(batch.e_id[of_edges[0] == tree].tolist()) == inside.nonzero().view(-1).tolist()


def both_ways() -> HeteroData:
    data = library()
    add_relation(data, ("paper", "rev_writes", "author"), [(p, a) for a, p in data[WRITES].edge_index.t().tolist()])
    return data


def ends_of(out: Any) -> dict[Any, list[tuple[int, int]]]:
    rows, columns = (out.row, out.col) if isinstance(out.row, dict) else ({None: out.row}, {None: out.col})
    return {key: sorted(zip(rows[key].tolist(), columns[key].tolist(), strict=True)) for key in rows}


@pytest.mark.filterwarnings("ignore:.*reverse")
@pytest.mark.parametrize(("data", "node_type"), [(random_graph(40, 300, 1), None), (both_ways(), "paper")])
def test_bidirectional_is_what_pyg_makes_of_the_directional_sample(data: Any, node_type: str | None) -> None:
    ids = torch.tensor([2, 5, 6])
    seeds, index = ids if node_type is None else (node_type, ids), NodeSamplerInput(None, ids, input_type=node_type)
    directional, both = (
        Replayed(NeighborLoader(data, [2, 2], seeds, batch_size=3, subgraph_type=subgraph_type)).sample_from_nodes(
            index
        )
        for subgraph_type in ("directional", "bidirectional")
    )
    found = ends_of(both)
    assert found == ends_of(directional.to_bidirectional())
    assert all(len(set(ends)) == len(ends) for ends in found.values())
    if node_type is not None:
        assert sorted(found["paper", "rev_writes", "author"]) == sorted((p, a) for a, p in found[WRITES])


@pytest.mark.filterwarnings("ignore:.*reverse")  # what is not matched comes again
def test_a_relation_without_a_reverse_stays_directional_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"\('author', 'writes', 'paper'\) has no reverse"):
        batch = sample(library(), [2], ("paper", [3]), subgraph_type="bidirectional")
    assert batch[WRITES].edge_index[1].tolist() == [0, 0]


@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 4], [2, 0]])
def test_every_layer_samples_all_its_destinations_afresh(fanouts: list[int]) -> None:
    data, seeds = random_graph(50, 400, 1), torch.tensor([4, 9, 4, 30])
    batch = sample(data, fanouts, seeds, mode="blocks")
    inner, outer = batch.blocks  # from the input layer on
    assert (outer.num_destinations, inner.num_destinations) == (4, outer.num_sources)
    assert inner.num_sources == batch.n_id.numel() == batch.x.shape[0]
    assert torch.equal(batch.n_id[:4], seeds)
    for block, fanout in zip((outer, inner), fanouts, strict=True):
        degree = torch.bincount(data.edge_index[1], minlength=50)[batch.n_id[: block.num_destinations]]
        picked = torch.bincount(block.edge_index[1], minlength=block.num_destinations)
        assert torch.equal(picked, degree if fanout < 0 else degree.clamp(max=fanout))
        assert torch.equal(batch.n_id[block.edge_index], data.edge_index[:, block.e_id])
        own, seen = batch.n_id[: block.num_destinations].tolist(), batch.n_id[block.edge_index[0]].tolist()
        assert batch.n_id[: block.num_sources].tolist() == own + [n for n in dict.fromkeys(seen) if n not in own]


def test_every_layer_and_every_relation_draws_on_its_own() -> None:
    inner, outer = sample(star(200), [10, 10], [0], mode="blocks").blocks
    edges: Any = {"edge_index": torch.stack([torch.arange(200), torch.zeros(200, dtype=torch.int64)])}
    data = HeteroData(a={"num_nodes": 200}, b={"num_nodes": 1}, a__p__b=edges, a__q__b=edges)
    assert not torch.equal(inner.e_id, outer.e_id)
    assert not torch.equal(*sample(data, [10], "b").e_id_dict.values())


def by_hook(data: Any, num_layers: int, input_nodes: Any, hook: Any, **options: Any) -> Any:
    return sample(data, [0] * num_layers, input_nodes, mode="blocks", sample_frontier=hook, **options)


@pytest.mark.parametrize(("data", "seeds"), [(random_graph(50, 400, 1), [4, 9, 4]), (library(), ("paper", [2, 9, 2]))])
def test_a_hook_that_samples_uniformly_gives_the_blocks_of_the_sampler_itself(data: Any, seeds: Any) -> None:
    def hook(layer: Layer, graph: LayerGraph, nodes: Any) -> Any:
        return graph.sample_neighbors(nodes, layer.fanout)

    own, by_hook = (sample(data, [3, 2], seeds, mode="blocks", sample_frontier=given) for given in (None, hook))
    assert_same(by_hook, own)


def test_a_hook_may_choose_the_edges_itself() -> None:
    def hook(layer: int, graph: LayerGraph, nodes: Tensor) -> Edges:
        if layer == 0:  # the seeds' layer
            return Edges(torch.tensor([11, 7, 11]), torch.tensor([2, 0, 0]))
        edges = graph.in_edges(nodes)
        return Edges(edges.sources[:1], edges.destinations[:1], edges.positions[:1])

    batch = by_hook(ring(12), 2, [0, 2], hook)
    inner, outer = batch.blocks
    assert (batch.n_id.tolist(), outer.edge_index.tolist()) == ([0, 2, 7, 11, 1], [[2, 3, 3], [0, 0, 1]])
    assert outer.e_id is None  # the hook did not say which edges these are
    assert (inner.edge_index.tolist(), inner.e_id.tolist()) == ([[4], [0]], [0])


def test_a_hook_sees_every_seed_once_and_may_leave_out_relations() -> None:
    seen = []

    def hook(layer: int, graph: LayerGraph, nodes: dict[str, Tensor]) -> Any:
        seen.append({name: ids.tolist() for name, ids in nodes.items()})
        return {WRITES: Edges(torch.tensor([5]), torch.tensor([3]))}

    batch = by_hook(library(), 1, ("paper", [3, 1, 3]), hook)
    assert seen == [{"author": [], "paper": [3, 1], "venue": []}]
    assert batch.blocks[0].edge_index[WRITES].tolist() == [[0, 0], [0, 2]]  # both copies of paper 3
    assert batch["author"].n_id.tolist() == [5]


def test_picks_depend_on_seed_epoch_and_step_and_on_nothing_else() -> None:
    def picks(seed: int, epoch: int) -> list[list[int]]:
        loader = NeighborLoader(star(200), [10], [0, 0, 0], batch_size=1, seed=seed)
        loader.set_epoch(epoch)
        return [batch.e_id.tolist() for batch in loader]

    assert picks(1, 1) == picks(1, 1)
    steps = [step for seed, epoch in ((1, 1), (1, 2), (2, 1), (2, 2)) for step in picks(seed, epoch)]
    assert len({tuple(step) for step in steps}) == len(steps) == 12
