"""What a frontier hook sees of the graph, data that it gives with its edges, and what it asks or returns wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import library, random_graph, ring
from support.proportions import assert_in_proportion, assert_uniform
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

import hoploom
from hoploom import ConfigError, Edges, NeighborLoader, ops
from hoploom import nn as hnn
from hoploom.sample import LayerGraph

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
PRINTS, APPEARS = ("venue", "prints", "paper"), ("paper", "appears_in", "venue")
NONE = Edges(*torch.empty(2, 0, dtype=torch.int64))


def loader_of(data: Any, hook: Any, seeds: Any = (0, 3), num_layers: int = 1, **options: Any) -> NeighborLoader:
    seeds = torch.tensor(seeds) if isinstance(seeds, tuple) and not isinstance(seeds[0], str) else seeds
    options = {"batch_size": 1000, **options}
    return NeighborLoader(data, [2] * num_layers, seeds, mode="blocks", sample_frontier=hook, **options)


def ask(data: Any, question: Callable[[LayerGraph], Any], **options: Any) -> list[Any]:
    """What a question gets in each layer of the steps of an epoch."""
    answers = []

    def hook(layer: int, graph: LayerGraph, seeds: Any) -> Any:
        answers.append(question(graph))
        return graph.in_edges(seeds)

    list(loader_of(data, hook, **options))
    return answers


DRAWS: dict[str, Callable[[LayerGraph], Tensor]] = {
    "uniform": lambda graph: graph.uniform(50),
    "uniform for ids": lambda graph: graph.uniform(torch.arange(50)),
    "integers": lambda graph: graph.integers(1 << 40, 50),
    "generator": lambda graph: torch.rand(50, generator=graph.generator()),
    "independent picks": lambda graph: graph.sample_neighbors(torch.arange(50), 1, independent=True).sources,
    "walk": lambda graph: graph.walk(torch.arange(50), 3),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_the_same_again_and_differs_by_seed_epoch_step_layer_and_call(draw: Any) -> None:
    data = random_graph(60, 500, 1)

    def draws(seed: int, epoch: int) -> list[tuple[Any, ...]]:
        answers: list[Tensor] = []

        def hook(layer: int, graph: LayerGraph, seeds: Tensor) -> Edges:
            answers.extend([draw(graph), draw(graph)])
            return NONE

        loader = loader_of(data, hook, num_layers=2, batch_size=1, seed=seed)
        loader.set_epoch(epoch)
        list(loader)
        return [tuple(answer.flatten().tolist()) for answer in answers]

    assert draws(1, 1) == draws(1, 1)
    found = [answer for seed, epoch in ((1, 1), (1, 2), (2, 1)) for answer in draws(seed, epoch)]
    assert len(set(found)) == len(found) == 3 * 2 * 2 * 2  # loops, steps, layers, calls


def test_a_number_for_an_id_is_its_own_whoever_asks_and_a_repeated_id_has_others() -> None:
    [numbers] = ask(ring(12), lambda graph: graph.uniform(torch.arange(100)))
    [others] = ask(ring(12), lambda graph: graph.uniform(torch.tensor([7, 99, 7, 3, 7])))
    assert (others[[0, 1, 3]].tolist(), len(set(others.tolist()))) == (numbers[[7, 99, 3]].tolist(), 5)
    [again] = ask(ring(12), lambda graph: graph.uniform(torch.tensor([7, 7])))
    assert again.tolist() == others[[0, 2]].tolist()


def test_numbers_are_uniform_and_never_0_or_1() -> None:
    [numbers] = ask(ring(12), lambda graph: graph.uniform((100, 500)))
    assert (numbers.shape, numbers.dtype) == ((100, 500), torch.float32)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert_uniform((numbers.flatten() * 100).long(), 100)
    [dice] = ask(ring(12), lambda graph: graph.integers(6, torch.zeros(60_000, dtype=torch.int64)))
    assert_uniform(dice, 6)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_least_and_the_greatest_word_give_numbers_inside(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "draw_words", lambda *_: torch.full((1, 4), word, dtype=torch.uint32))
    [number] = ask(ring(12), lambda graph: graph.uniform(1))
    assert number > 0
    assert number < 1


def test_a_hook_knows_its_epoch_step_layer_and_fanout() -> None:
    def where(graph: LayerGraph) -> Any:
        return graph.epoch, graph.step, graph.layer, graph.fanout

    loop = ask(ring(12), where, num_layers=2, batch_size=1)
    assert loop == [(0, step, layer, 2) for step in (0, 1) for layer in (0, 1)]
    [(_, _, _, fanout)] = ask(library(), where, seeds=("paper", [1]))
    assert fanout == dict.fromkeys(hoploom.from_pyg(library()).schema.relation_index, 2)

    seen = []
    loader = loader_of(ring(12), lambda layer, graph, seeds: seen.append(graph.step) or NONE)
    loader([0, 1])
    assert seen == [-1]


def test_picks_are_independent_only_where_that_is_asked_for() -> None:
    seeds, data = torch.tensor([5] * 40), random_graph(60, 4000, 1)

    def both(graph: LayerGraph) -> Any:
        same = [graph.sample_neighbors(seeds, 2).sources for _ in range(2)]
        return *same, graph.sample_neighbors(seeds, 2, independent=True).sources.view(40, 2)

    [(first, second, free)] = ask(data, both)
    assert torch.equal(first, second)
    assert len(set(map(tuple, first.view(40, 2).tolist()))) == 1
    assert len(set(map(tuple, free.tolist()))) > 30
    lists = data.edge_index[0, data.edge_index[1] == 5]
    assert torch.isin(free, lists).all()


def test_in_degrees_count_every_edge_loops_too() -> None:
    data = random_graph(60, 500, 1)
    expected = torch.bincount(data.edge_index[1], minlength=60)
    assert (data.edge_index[0] == data.edge_index[1]).any()
    nodes = torch.tensor([5, 59, 5, 0])
    [found] = ask(data, lambda graph: graph.in_degrees(nodes))
    assert found.tolist() == expected[nodes].tolist()
    books = library()
    [found] = ask(books, lambda graph: graph.in_degrees(torch.arange(10), CITES), seeds=("paper", [1]))
    assert found.tolist() == torch.bincount(books[CITES].edge_index[1], minlength=10).tolist()


def test_a_walk_goes_against_the_edges_until_there_are_none() -> None:
    [trace] = ask(ring(12), lambda graph: graph.walk(torch.tensor([0, 5, 5]), 20))
    assert (trace.shape, trace[:, 0].tolist()) == ((3, 21), [0, 5, 5])
    steps = trace.diff(dim=1) % 12
    assert set(steps.flatten().tolist()) == {1, 2}
    assert not torch.equal(trace[1], trace[2])
    chain = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    [trace] = ask(chain, lambda graph: graph.walk(torch.tensor([2, 0]), 4), seeds=(0,))
    assert trace.tolist() == [[2, 1, 0, -1, -1], [0, -1, -1, -1, -1]]


def test_every_in_edge_of_every_step_is_equally_likely() -> None:
    data = random_graph(8, 30, 3)
    [trace] = ask(data, lambda graph: graph.walk(torch.full((20_000,), 2), 2), seeds=(0,))
    matrix = torch.zeros(8, 8).index_put_((data.edge_index[1], data.edge_index[0]), torch.ones(30), accumulate=True)
    matrix /= matrix.sum(1, keepdim=True).clamp(min=1)
    for step in (1, 2):
        assert_in_proportion(trace[:, step][trace[:, step] >= 0], torch.linalg.matrix_power(matrix, step)[2])


def test_a_walk_that_restarts_goes_on_from_its_start() -> None:
    [trace] = ask(ring(100), lambda graph: graph.walk(torch.tensor([10, 50]), 30, restart=1.0))
    assert set((trace[:, 1:] - trace[:, :1]).flatten().tolist()) == {1, 2}
    [trace] = ask(ring(100), lambda graph: graph.walk(torch.zeros(4000, dtype=torch.int64), 2, restart=0.25))
    share = (trace[:, 2] < 3).float().mean()  # from the start, or by two short steps: a quarter of the rest
    assert abs(float(share) - (0.25 + 0.75 * 0.25)) < 0.04


def test_a_walk_follows_a_path_of_relations() -> None:
    books = library()
    [trace] = ask(books, lambda own: own.walk(torch.tensor([0, 4]), 4, path=[PRINTS, APPEARS]), seeds=("paper", [1]))
    venues, papers = trace[:, 1::2], trace[:, 0::2]
    assert (papers % 3 == venues[:, [0, 0, 1]]).all()  # venue v prints the papers with p % 3 == v
    assert papers.max() < 9
    assert (papers >= 0).all()


WRONG_WALKS = {
    "no path": ({}, "path is missing"),
    "empty": ({"path": []}, "path is empty"),
    "unknown": ({"path": [("a", "b", "c")]}, "unknown relation"),
    "broken": ({"path": [PRINTS, CITES]}, "leads a walk to 'venue'"),
    "no way back": ({"path": [WRITES]}, "leads a walk to 'author'"),
    "length": ({"path": [CITES], "length": -1}, "length"),
    "restart": ({"path": [CITES], "restart": 1.5}, "restart is 1.5"),
    "starts": ({"path": [CITES], "starts": torch.tensor([10])}, "holds id 10"),
    "fractions": ({"path": [CITES], "starts": torch.tensor([1.0])}, "float"),
}


@pytest.mark.parametrize(("given", "message"), WRONG_WALKS.values(), ids=WRONG_WALKS)
def test_a_walk_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    options = {"starts": torch.tensor([0]), "length": 3, **given}
    with pytest.raises(ConfigError, match=message):
        ask(library(), lambda graph: graph.walk(**options), seeds=("paper", [1]))


@pytest.mark.parametrize("path", [[PRINTS, APPEARS], [WRITES]], ids=["to papers", "to authors"])
def test_the_most_visited_are_those_that_walks_meet_most(path: Any) -> None:
    books, seeds = library(), torch.tensor([1, 4, 9])
    walks = {"length": 6 if len(path) == 2 else 1, "restart": 0.3, "path": path}
    [found] = ask(books, lambda graph: graph.most_visited(seeds, 3, num_walks=40, **walks), seeds=("paper", [1]))
    [trace] = ask(books, lambda graph: graph.walk(seeds.repeat_interleave(40), **walks), seeds=("paper", [1]))
    expected = []
    for row, seed in enumerate(seeds.tolist()):
        ends = trace[40 * row : 40 * (row + 1), len(path) :: len(path)].flatten().tolist()
        left_out = {seed, -1} if path[-1] == APPEARS else {-1}  # author 1 is not paper 1
        counts = sorted((-ends.count(node), node) for node in set(ends) - left_out)[:3]
        expected += [(node, seed, -count, -count / -sum(c for c, _ in counts)) for count, node in counts]
    columns = (found.sources, found.destinations, found.data["visits"], found.data["weight"])
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (node, seed, count, pytest.approx(share)) for node, seed, count, share in expected
    ]
    assert set(found.destinations.tolist()) == {1, 4}  # paper 9 has no edge


def test_top_keeps_the_best_edges_of_each_seed_with_all_that_belongs_to_them() -> None:
    ends, scores = torch.tensor([4, 2, 4, 4, 2]), torch.tensor([0.1, 5.0, 0.3, 0.2, 5.0])
    found = Edges(torch.arange(5), ends, torch.arange(5) + 10, {"score": scores}).top(scores, 2)
    assert (found.sources.tolist(), found.destinations.tolist()) == ([1, 4, 2, 3], [2, 2, 4, 4])
    assert found.positions.tolist() == [11, 14, 12, 13]
    assert torch.equal(found.data["score"], scores[found.sources])


def test_top_of_minus_one_keeps_all_edges_in_order() -> None:
    found = Edges(torch.arange(3), torch.tensor([4, 2, 4])).top(torch.tensor([0.1, 0.2, 0.3]), -1)
    assert (found.sources.tolist(), found.destinations.tolist()) == ([1, 2, 0], [2, 4, 4])


@pytest.mark.parametrize(
    ("scores", "most", "message"),
    [
        (torch.ones(3), 2.5, "most is 2.5"),
        (torch.ones(3), -2, "most is -2"),
        (torch.ones(4), 2, r"scores have shape \(4,\) for 3 edges"),
        (torch.ones(3, 1), 2, r"scores have shape \(3, 1\)"),
        ([1.0, 2.0, 3.0], 2, "scores are a list"),
    ],
)
def test_top_refuses_what_is_no_score_of_each_edge(scores: Any, most: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Edges(torch.arange(3), torch.tensor([4, 2, 4])).top(scores, most)


def test_numbers_for_ids_do_not_depend_on_the_number_of_ranks() -> None:
    data = random_graph(60, 800, 1)

    def hook(layer: int, graph: LayerGraph, seeds: Tensor) -> Edges:
        found = graph.in_edges(seeds)
        found = found[graph.uniform(found.positions) < 0.5]
        walked = graph.most_visited(seeds, 2, num_walks=5, length=4, restart=0.2)
        columns = zip((found.sources, found.destinations), (walked.sources, walked.destinations), strict=True)
        return Edges(*map(torch.cat, columns))

    def edges(rank: int, world_size: int) -> set[tuple[int, int]]:
        whole = {"batch_size": 30 // world_size, "rank": rank, "world_size": world_size}
        batch = next(iter(loader_of(data, hook, torch.arange(60), **whole)))
        return set(map(tuple, batch.n_id[batch.blocks[0].edge_index].t().tolist()))

    assert edges(0, 2) | edges(1, 2) == edges(0, 1)


def numbered(layer: int, graph: LayerGraph, seeds: Tensor) -> Edges:
    """All in-edges, the last seed's first, each with the number of its ends."""
    found = graph.in_edges(seeds)[torch.arange(2 * len(seeds)).flip(0)]
    return Edges(found.sources, found.destinations, found.positions, {"both": 100 * found.sources + found.destinations})


def test_data_of_edges_arrives_beside_them_in_the_block() -> None:
    (batch,) = loader_of(ring(12), numbered, seeds=(3, 0, 3), num_layers=2)
    for block in (*batch.blocks, batch.blocks[0].to("cpu")):
        sources, destinations = batch.n_id[block.edge_index]
        assert block.data["both"].tolist() == (100 * sources + destinations).tolist()
    assert batch.blocks[1].data["both"].numel() == 6  # a repeated seed has its data twice


def test_data_of_relations_is_kept_by_relation() -> None:
    def hook(layer: int, graph: LayerGraph, seeds: dict[str, Tensor]) -> Any:
        found = graph.sample_neighbors(seeds, {CITES: 2, WRITES: 1})
        weight = found[CITES].sources.float().view(-1, 1)
        return {**found, CITES: Edges(found[CITES].sources, found[CITES].destinations, None, {"weight": weight})}

    (batch,) = loader_of(library(), hook, seeds=("paper", [3, 1]))
    (block,) = batch.blocks
    assert list(block.data) == [CITES]
    assert torch.equal(block.data[CITES]["weight"].view(-1).long(), batch["paper"].n_id[block.edge_index[CITES][0]])
    assert block.e_id[CITES] is None
    assert block.e_id[WRITES] is not None


def halved(layer: int, graph: LayerGraph, seeds: Tensor) -> Edges:
    found = graph.in_edges(seeds)
    return Edges(found.sources, found.destinations, found.positions, {"weight": (found.sources + 1) / 10})


def test_layers_of_both_libraries_take_the_weights() -> None:
    data = random_graph(30, 200, 2)
    (batch,) = loader_of(data, halved, seeds=(0, 3, 0))
    (block,) = batch.blocks
    ours, theirs = hnn.SAGEConv(5, 4, aggr="sum"), GraphConv(5, 4)
    theirs.lin_rel.load_state_dict(ours.lin_l.state_dict())
    theirs.lin_root.load_state_dict(ours.lin_r.state_dict())
    x_dst, weight = batch.x[: block.num_destinations], block.data["weight"]
    expected = theirs((batch.x, x_dst), block.edge_index, weight)
    torch.testing.assert_close(ours((batch.x, x_dst), block.edge_index, edge_weight=weight), expected)
    mixed = torch.randperm(block.edge_index.shape[1])
    torch.testing.assert_close(ours((batch.x, x_dst), block.edge_index[:, mixed], edge_weight=weight[mixed]), expected)


@pytest.mark.parametrize("kind", ["sage", "gin"])
def test_a_model_multiplies_by_the_weights_of_the_hook(kind: str) -> None:
    data = random_graph(30, 200, 2)
    model = {"sage": hnn.GraphSAGE, "gin": hnn.GIN}[kind](5, 8, 1, 3)
    (batch,) = loader_of(data, halved, seeds=(0, 3, 7))
    (block,) = batch.blocks
    conv = model.stage(0).conv(("node", "to", "node"))
    weight, x_dst = (batch.n_id[block.edge_index[0]] + 1) / 10, batch.x[: block.num_destinations]
    torch.testing.assert_close(model(batch), conv((batch.x, x_dst), block.edge_index, edge_weight=weight))
    assert not torch.allclose(model(batch), conv((batch.x, x_dst), block.edge_index))


@pytest.mark.parametrize(("model", "words"), [(hnn.GAT, "takes no edge weights"), (hnn.GCN, "needs sums of weights")])
def test_a_model_that_cannot_use_weights_refuses_them(model: Any, words: str) -> None:
    (batch,) = loader_of(random_graph(30, 200, 2), halved, degrees=True)
    with pytest.raises(ConfigError, match=words):
        model(5, 8, 1, 3)(batch)


def test_what_the_loader_aggregates_has_no_weights_so_they_are_refused() -> None:
    with pytest.raises(ConfigError, match="without the weights"):
        list(loader_of(random_graph(30, 200, 2), halved, aggregate="mean"))


ZERO = torch.tensor([0])
WRONG_QUESTIONS: dict[str, tuple[Callable[[LayerGraph], Any], str]] = {
    "a size below zero": (lambda graph: graph.uniform(-1), "size"),
    "ids of floats": (lambda graph: graph.uniform(torch.ones(3)), "ids have dtype"),
    "an empty range": (lambda graph: graph.integers(0, 3), "high"),
    "degrees of no node": (lambda graph: graph.in_degrees(torch.tensor([60])), "id 60"),
    "labor by replacement": (lambda graph: graph.sample_neighbors(ZERO, 2, labor=True, replace=True), "labor=True"),
    "labor by itself": (lambda graph: graph.sample_neighbors(ZERO, 2, labor=True, independent=True), "independent"),
    "a fanout below -1": (lambda graph: graph.sample_neighbors(ZERO, -2), "fanout is -2"),
    "a fanout of 2.5": (lambda graph: graph.sample_neighbors(ZERO, 2.5), "fanout is 2.5"),
    "a fanout of a list": (lambda graph: graph.sample_neighbors(ZERO, [2]), r"fanout is \[2\]"),
    "edges of a list": (lambda graph: graph.in_edges([1, 2]), "seeds of 'node' are a list"),
    "degrees of a list": (lambda graph: graph.in_degrees([1, 2]), "nodes are a list"),
    "a walk from a number": (lambda graph: graph.walk(3, 2), "starts are an int"),
    "a path that is none": (lambda graph: graph.walk(ZERO, 2, path=3), "path is 3"),
    "a restart of text": (lambda graph: graph.walk(ZERO, 2, restart="a"), "restart is 'a'"),
    "visits of a mapping": (lambda graph: graph.most_visited({"node": ZERO}, 2, num_walks=2, length=2), "seeds are"),
    "nothing asked": (lambda graph: graph.uniform(None), "None; give a count"),
    "text asked": (lambda graph: graph.integers(3, "ab"), "'ab'; give a count"),
    "no walks": (lambda graph: graph.most_visited(ZERO, 2, num_walks=0, length=2), "num_walks"),
}


@pytest.mark.parametrize(("question", "message"), WRONG_QUESTIONS.values(), ids=WRONG_QUESTIONS)
def test_a_question_that_has_no_answer_is_refused(question: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(random_graph(60, 500, 1), question)


def test_empty_questions_have_empty_answers() -> None:
    empty = torch.empty(0, dtype=torch.int64)

    def every(graph: LayerGraph) -> Any:
        found = graph.most_visited(empty, 2, num_walks=3, length=2)
        numbers = graph.uniform(0), graph.integers(5, empty), graph.in_degrees(empty), found.sources
        return [len(answer) for answer in (*numbers, graph.walk(empty, 2), graph.sample_neighbors(ZERO, 0).sources)]

    assert ask(ring(12), every) == [[0] * 6]


ONE, TWO = torch.tensor([1]), torch.tensor([1, 2])
WRONG_ANSWERS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned None; return hoploom.Edges"),
    "a tuple": ((ONE, ZERO), "returned a tuple"),
    "a tensor": (torch.stack([ONE, ZERO]), "a tensor of torch.int64 and shape"),
    "nothing for a relation": ({("node", "to", "node"): None}, "returned None for"),
    "an unknown relation": ({("a", "b", "c"): NONE}, "edges of .'a', 'b', 'c'.; the relations are"),
    "lists": (Edges([1], [0]), "gave sources as a list"),
    "floats": (Edges(torch.tensor([1.0]), ZERO), "gave sources as a tensor of torch.float32"),
    "a matrix": (Edges(ONE, ZERO.view(1, 1)), r"gave destinations as a tensor of torch.int64 and shape \(1, 1\)"),
    "a source too high": (Edges(torch.tensor([12]), ZERO), r"sources that hold 12, out of range \[0, 12\)"),
    "a source too low": (Edges(torch.tensor([-1]), ZERO), "sources that hold -1"),
    "a destination too high": (Edges(ONE, torch.tensor([12])), "destinations that hold 12"),
    "a position too high": (Edges(ONE, ZERO, torch.tensor([24])), r"positions that hold 24, out of range \[-1, 24\)"),
    "no seed": (Edges(ONE, torch.tensor([5])), "an edge to 5, which is no seed"),
    "lengths": (Edges(TWO, ZERO), "'sources': 2, 'destinations': 1"),
    "positions": (Edges(ONE, ZERO, TWO), "'positions': 2"),
    "data too long": (Edges(ONE, ZERO, None, {"w": torch.ones(2)}), r"data\['w'\]\": 2"),
    "data of lists": (Edges(ONE, ZERO, None, {"w": [1.0]}), "gave a list as data"),
    "data without a name": (Edges(ONE, ZERO, None, torch.ones(1)), "as data; give tensors by name"),
    "data without rows": (Edges(ONE, ZERO, None, {"w": torch.tensor(1.0)}), "as data; give tensors by name"),
}


@pytest.mark.parametrize(("answer", "message"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_a_wrong_answer_of_a_hook_is_told_with_its_layer(answer: Any, message: str) -> None:
    def hook(layer: int, graph: LayerGraph, seeds: Tensor) -> Any:
        return NONE if layer == 0 else answer

    with pytest.raises(ConfigError, match=f"sample_frontier, at layer 1, .*{message}"):
        list(loader_of(ring(12), hook, num_layers=2))


def test_edges_of_no_relation_are_refused_where_there_are_several() -> None:
    with pytest.raises(ConfigError, match="returned Edges of no relation"):
        list(loader_of(library(), lambda layer, graph, seeds: NONE, ("paper", [1])))
    wrong = {WRITES: Edges(torch.tensor([7]), torch.tensor([1]))}
    with pytest.raises(ConfigError, match=r"layer 0, for \('author', 'writes', 'paper'\) gave sources that hold 7"):
        list(loader_of(library(), lambda layer, graph, seeds: wrong, ("paper", [1])))
