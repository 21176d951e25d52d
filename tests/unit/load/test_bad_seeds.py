"""Wrong fanouts, seeds, times and links are refused when the loader is made: what, which value, and the way out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.graphs import library, ring
from support.refusals import Call, assert_refused, both_loaders, events, links, nodes, table
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import from_pyg, from_tensors

NODE_TO_NODE = ("node", "to", "node")
RELATIONS = library().edge_types
WRITES = RELATIONS[0]


def fanouts(**changed: Any) -> dict[tuple[str, str, str], Any]:
    """Two hops for every relation of the library, but for those changed by name."""
    return {key: changed.get(key[1], [2, 2]) for key in RELATIONS}


BAD_FANOUTS: dict[str, tuple[Any, ...]] = {
    "empty mapping": ({}, "leave out", str(NODE_TO_NODE)),
    "a number": (5, "5"),
    "nothing": (None, "None"),
    "a word": ("ab", "'ab'"),
    "below -1": ([2, -2], "-2", "-1"),
    "true": ([True], "True"),
    "lists of lists": ([[2], [2]], "[2]"),
    "of an unknown relation": ({("a", "b", "c"): [2]}, "('a', 'b', 'c')", str(NODE_TO_NODE)),
    "by node type": ({"node": [2]}, "'node'", str(NODE_TO_NODE)),
}


@both_loaders
@table(BAD_FANOUTS)
def test_wrong_fanouts_are_refused(given: Any, said: tuple[str, ...], loader: Callable[..., Any]) -> None:
    assert_refused(lambda: loader(ring(8), given), *said)


BAD_FANOUTS_BY_RELATION: dict[str, tuple[Any, ...]] = {
    "uneven": (fanouts(writes=[1]), "[1, 2]", "the same across all relations"),
    "one empty": (fanouts(cites=[]), "[0, 2]", "the same across all relations"),
    "a number": (fanouts(writes=5), "5"),
    "a relation too many": ({**fanouts(), ("x", "y", "z"): [1, 1]}, "('x', 'y', 'z')", str(WRITES)),
    "a relation too few": ({WRITES: [2, 2]}, "reviews", "[0, ...]"),
}


@table(BAD_FANOUTS_BY_RELATION)
def test_wrong_fanouts_by_relation_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: nodes(library(), given, input_nodes="paper"), *said)


def test_a_fanout_may_be_any_integer_type() -> None:
    assert len(nodes(num_neighbors=[np.int64(2), np.int32(-1)], batch_size=8)) == 1


BAD_SEEDS: dict[str, tuple[Any, ...]] = {
    "empty list": ([], "input_nodes", "empty"),
    "mask too short": (torch.ones(7, dtype=torch.bool), "input_nodes", "7", "8"),
    "mask of one column": (torch.ones(8, 1, dtype=torch.bool), "input_nodes", "(8, 1)"),
    "mask of integers": (torch.tensor([1, 0, 0, 1, 0, 0, 1, 1]), "input_nodes", "int64", "8 nodes", ".bool()"),
    "mask of bytes": (torch.ones(8, dtype=torch.uint8), "input_nodes", "uint8", ".bool()"),
    "negative": ([0, -1], "input_nodes", "-1", "[0, 8)"),
    "too large": (torch.tensor([0, 8]), "input_nodes", "8", "[0, 8)"),
    "floats": ([0.0, 1.0], "input_nodes", "float32"),
    "two dimensions": (torch.tensor([[0, 1]]), "input_nodes", "(1, 2)"),
    "a number": (3, "input_nodes"),
    "a mapping": ({"a": 1}, "input_nodes"),
    "unknown split": ("nope", "'nope'", "train"),
    "with a node type": (("paper", [0]), "input_nodes"),
}


@table(BAD_SEEDS)
def test_wrong_seeds_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: nodes(input_nodes=given), *said)


BAD_TYPED_SEEDS: dict[str, tuple[Any, ...]] = {
    "nothing": (None, "None", "paper"),
    "ids without a type": ([0, 1], "[0, 1]", "paper"),
    "unknown type": (("book", [0]), "'book'", "paper"),
    "unknown split": (("paper", "val"), "'val'", "train"),
    "split of another type": (("author", "train"), "'train'", "author"),
    "too large": (("paper", [10]), "10", "[0, 10)"),
    "empty": (("paper", []), "empty"),
    "mask of another type": (("paper", torch.ones(7, dtype=torch.bool)), "7", "10"),
    "a type alone in a tuple": (("paper",), "('paper',)"),
    "three things": (("paper", [0], 1), "('paper', [0], 1)"),
}


@table(BAD_TYPED_SEEDS)
def test_wrong_seeds_with_types_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: nodes(library(), input_nodes=given), *said)


def test_an_empty_split_is_refused() -> None:
    data = ring(8)
    data.val_mask = torch.zeros(8, dtype=torch.bool)
    assert_refused(lambda: nodes(data, input_nodes="val"), "'val'", "empty")
    assert_refused(lambda: from_pyg(data).split("vall"), "'vall'", "val")


def test_a_mask_of_integers_is_no_split() -> None:
    data, mask = ring(8), torch.tensor([1, 0, 0, 1, 0, 0, 1, 1])
    data.val_mask = mask
    assert_refused(lambda: nodes(data, input_nodes="val"), "'val'", "val_mask is int64", ".bool()")
    data.val_mask = torch.ones(8, 10, dtype=torch.bool)
    assert_refused(lambda: nodes(data, input_nodes="val"), "'val'", "val_mask is bool [10] per node", "one column")
    assert_refused(lambda: from_tensors({"x": data.x}, data.edge_index, splits={"val": mask}), "int64", ".bool()")


def test_ids_may_be_zero_and_one() -> None:
    assert next(iter(nodes(input_nodes=torch.tensor([0, 1]), batch_size=2))).input_id.tolist() == [0, 1]
    pair = ring(2)
    assert next(iter(nodes(pair, input_nodes=torch.tensor([0, 1]), batch_size=2))).n_id[:2].tolist() == [0, 1]


@both_loaders
def test_ids_of_the_input_must_be_as_many_as_the_seeds(loader: Callable[..., Any]) -> None:
    count = 8 if loader is nodes else 16
    assert_refused(lambda: loader(input_id=torch.arange(count - 1)), "input_id", str(count - 1), str(count))
    assert_refused(lambda: loader(input_id=torch.zeros(count, 2)), "input_id", f"({count}, 2)")
    assert_refused(lambda: loader(input_id="a"), "input_id")


@both_loaders
def test_ids_of_the_input_may_be_a_list_or_an_array(loader: Callable[..., Any]) -> None:
    count = 8 if loader is nodes else 16
    for ids in (list(range(count)), np.arange(count)):
        batch = next(iter(loader(input_id=ids, batch_size=count)))
        assert torch.equal(torch.as_tensor(batch.input_id), torch.arange(count))


BAD_INPUT_TIMES: dict[str, tuple[Any, ...]] = {
    "too few": (torch.arange(19), "input_time", "(19,)", "20"),
    "floats": (torch.arange(20.0), "input_time", "float32"),
    "two dimensions": (torch.zeros(20, 1, dtype=torch.int64), "input_time", "(20, 1)"),
    "a number": (5, "input_time", "20"),
    "a word": ("now", "input_time"),
}


@table(BAD_INPUT_TIMES)
def test_wrong_times_of_seeds_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: nodes(events(), time_attr="edge_time", input_time=given), *said)


BAD_TIME_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "input_time alone": (lambda: nodes(input_time=torch.arange(8)), "input_time", "time_attr"),
    "edge times without input_time": (lambda: nodes(events(), time_attr="edge_time"), "edge_time", "input_time"),
    "seeds without a time": (lambda: nodes(library(), input_nodes="venue", time_attr="year"), "venue", "input_time"),
    "unknown time_attr": (lambda: nodes(events(), time_attr="when"), "'when'", "edge_time", "node_time"),
    "unknown weight_attr": (lambda: nodes(events(), weight_attr="heavy"), "'heavy'", "weight"),
    "weights of nodes": (lambda: nodes(events(), weight_attr="node_time"), "'node_time'", "weight"),
    "edge_label_time alone": (lambda: links(edge_label_time=torch.arange(16)), "edge_label_time", "time_attr"),
    "time_attr alone": (lambda: links(events(), time_attr="node_time"), "edge_label_time", "time_attr"),
    "edge_label_time too short": (
        lambda: links(events(), time_attr="node_time", edge_label_time=torch.arange(59)),
        "edge_label_time",
        "(59,)",
        "60",
    ),
    "a store without that time": (
        lambda: nodes(from_pyg(events()), time_attr="node_time"),
        "'node_time'",
        "without time_attr",
        "build",
    ),
    "a store without that weight": (
        lambda: nodes(from_pyg(events()), weight_attr="weight"),
        "'weight'",
        "without weight_attr",
        "build",
    ),
    "a store with another time": (
        lambda: nodes(from_pyg(events(), time_attr="edge_time"), time_attr="node_time"),
        "'node_time'",
        "'edge_time'",
        "build",
    ),
}


@table(BAD_TIME_ARGUMENTS)
def test_wrong_use_of_times_and_weights_is_refused(given: Call, said: tuple[str, ...]) -> None:
    assert_refused(given, *said)


BAD_LINKS: dict[str, tuple[Any, ...]] = {
    "empty": (torch.empty(2, 0, dtype=torch.int64), "edge_label_index", "empty"),
    "empty list": ([], "edge_label_index", "(0,)"),
    "source negative": ([[-1], [0]], "source", "-1", "[0, 8)"),
    "destination too large": ([[0], [8]], "destination", "8", "[0, 8)"),
    "floats": ([[0.5], [1.0]], "edge_label_index", "float32"),
    "masks": (torch.ones(2, 8, dtype=torch.bool), "edge_label_index", "bool"),
    "three rows": (torch.zeros(3, 2, dtype=torch.int64), "(3, 2)", "[2, n]"),
    "a vector": (torch.zeros(4, dtype=torch.int64), "(4,)", "[2, n]"),
    "rows of two lengths": ([[0, 1], [1]], "edge_label_index"),
    "a word": ("all", "edge_label_index"),
    "a number": (5, "edge_label_index", "[2, n]"),
    "a relation": ((("node", "to", "node"), None), "edge_label_index"),
}


@table(BAD_LINKS)
def test_wrong_links_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: links(edge_label_index=given), *said)


BAD_TYPED_LINKS: dict[str, tuple[Any, ...]] = {
    "nothing": (None, "relation"),
    "ends without a relation": (torch.tensor([[0], [1]]), "relation"),
    "unknown relation": (("author", "burns", "paper"), "burns", "writes"),
    "an unknown end with ends": ((("author", "burns", "wood"), [[0], [0]]), "'wood'", "paper"),
    "two ends that two relations join, with ends": ((("author", "paper"), [[0], [0]]), "writes", "reviews"),
    "one name with ends": ((("author",), [[0], [0]]), "('author',)", "writes"),
    "two ends that two relations join": (("author", "paper"), "('author', 'paper')", "writes", "reviews"),
    "two ends that none joins": (("venue", "author"), "('venue', 'author')", "writes"),
    "a word": ("writes", "relation"),
    "source too large": ((WRITES, [[7], [0]]), "source", "7", "[0, 7)"),
    "destination too large": ((WRITES, [[0], [10]]), "destination", "10", "[0, 10)"),
    "three things": ((WRITES, None, 3), "relation"),
}


@table(BAD_TYPED_LINKS)
def test_wrong_links_of_relations_are_refused(given: Any, said: tuple[str, ...]) -> None:
    assert_refused(lambda: links(library(), edge_label_index=given), *said)


def sampling(mode: str, weights: Tensor, end: str) -> NegativeSampling:
    return NegativeSampling(mode, 1, **{f"{end}_weight": weights})


BAD_LINK_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "too few labels": ({"edge_label": torch.zeros(3)}, "edge_label", "3", "16"),
    "a number as label": ({"edge_label": torch.tensor(1)}, "edge_label", "16"),
    "a word as label": ({"edge_label": "a"}, "edge_label"),
    "strict without negatives": ({"strict_negatives": True}, "strict_negatives", "neg_sampling"),
    "unknown mode": ({"neg_sampling": "nope"}, "neg_sampling", "'nope'", "binary", "triplet", "or a NegativeSampling"),
    "negatives are a number": ({"neg_sampling": 5}, "neg_sampling", "5"),
    "a negative amount": ({"neg_sampling": {"mode": "binary", "amount": -1}}, "neg_sampling", "-1"),
    "half a triplet": ({"neg_sampling": ("triplet", 0.5)}, "neg_sampling", "0.5"),
    "a negative ratio": ({"neg_sampling_ratio": -1.0}, "neg_sampling_ratio", "-1.0"),
    "a word as ratio": ({"neg_sampling_ratio": "a"}, "neg_sampling_ratio", "'a'"),
}


@table(BAD_LINK_ARGUMENTS)
def test_wrong_arguments_of_links_are_refused(given: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_refused(lambda: links(**given), *said)


def test_labels_may_be_a_list_or_an_array() -> None:
    for labels in ([1] * 16, np.ones(16)):
        batch = next(iter(links(edge_label=labels, batch_size=16)))
        assert batch.edge_label.tolist() == [1] * 16


BAD_NEGATIVE_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "too few": (torch.ones(7), "7", "8"),
    "nan": (torch.tensor([1.0] * 7 + [float("nan")]), "nan"),
    "negative": (torch.tensor([1.0] * 7 + [-2.5]), "-2.5"),
    "all zero": (torch.zeros(8), "zero"),
}


@pytest.mark.parametrize("end", ["src", "dst"])
@table(BAD_NEGATIVE_WEIGHTS)
def test_wrong_weights_of_negatives_are_refused(given: Tensor, said: tuple[str, ...], end: str) -> None:
    assert_refused(lambda: links(neg_sampling=sampling("binary", given, end)), "weight", *said)
