"""fields=: which rows a batch gathers, and which it leaves to the user."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.graphs import library, random_graph, ring
from support.shards import elsewhere_of, spread

import hoploom
from hoploom import ConfigError, LinkNeighborLoader, NeighborLoader, Store

WRITES = ("author", "writes", "paper")


@pytest.fixture(scope="module")
def store() -> Store:
    return hoploom.from_pyg(random_graph(60, 500, seed=1))


def _nodes(store: Any, **options: Any) -> NeighborLoader:
    return NeighborLoader(store, [3, 2], batch_size=20, shuffle=True, **options)


def _links(store: Any, **options: Any) -> LinkNeighborLoader:
    ends = torch.stack([torch.arange(20), torch.arange(20).flip(0)])
    return LinkNeighborLoader(store, [3, 2], ends, neg_sampling="binary", batch_size=20, **options)


@pytest.mark.parametrize("make", [_nodes, _links])
@pytest.mark.parametrize("mode", ["subgraph", "blocks"])
def test_a_batch_without_fields_has_the_ids_to_gather_by(store: Store, make: Any, mode: str) -> None:
    """As GLT's collect_features=False."""
    for bare, full in zip(make(store, fields=[], mode=mode), make(store, mode=mode), strict=True):
        gone = {"x", "node_time", "train_mask", "weight", "edge_time"} & set(full.keys())
        assert "x" in gone
        assert set(bare.keys()) == set(full.keys()) - gone | {"num_nodes"}
        assert torch.equal(bare.n_id, full.n_id)
        assert bare.num_nodes == full.num_nodes
        (rows,) = store.features.gather([("node", "x", bare.n_id)])
        assert torch.equal(rows, full.x)
        if mode == "subgraph":
            assert torch.equal(bare.e_id, full.e_id)  # the user's own ids


def test_what_is_not_chosen_is_not_asked_for(store: Store) -> None:
    remote = spread(store, 3, here=[0])
    list(_nodes(remote, fields=["node_time"]))
    asked = {name for shard in elsewhere_of(remote) for gathered in shard.gathers for _, name in gathered}
    assert asked == {"node_time", "edge_id"}


def test_fields_are_chosen_by_type() -> None:
    data, chosen = library(), {"paper": ["year"], WRITES: ["weight"]}
    for batch in NeighborLoader(data, [2, 2], ("paper", None), batch_size=4, fields=chosen):
        assert torch.equal(batch["paper"].year, 2000 + batch["paper"].n_id)
        assert not {"x", "y", "train_mask"} & set(batch["paper"].keys())
        assert batch["author"].num_nodes == batch["author"].n_id.numel()
        assert "x" not in batch["author"]
        assert [key for key in batch.edge_types if "weight" in batch[key]] == [WRITES]
        assert not any("edge_attr" in batch[key] for key in batch.edge_types)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["x", "z"], r"fields names 'z'; there are \['edge_attr', 'train_mask', 'weight', 'x', 'y', 'year'\]"),
        ({"paper": ["weight"]}, r"fields names 'weight' of 'paper'; there are \['train_mask', 'x', 'y', 'year'\]"),
        ({"nobody": ["x"]}, "unknown node type 'nobody'; the graph has"),
        ({("a", "b", "c"): []}, r"unknown relation \('a', 'b', 'c'\)"),
        ("x", r"fields is 'x'; give a list of names, such as \['x', 'y'\], or a list by node type and relation"),
        ({"paper": "x"}, "fields of 'paper' is 'x'; give a list of names"),
        (7, "fields is 7; give a list of names"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_that_lists_what_is(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeighborLoader(library(), [2], ("paper", None), fields=fields)


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({"collect_features": False}, r"collect_features=; give fields=\[\] for False, and leave it out for True"),
        ({"channel_size": "1GB"}, "channel_size=; give num_workers= and prefetch_factor="),
        ({"to_device": "cpu"}, "to_device=; give device="),
        ({"worker_options": object()}, "worker_options=; give num_workers="),
        ({"use_ddp": True}, "use_ddp=; leave it out"),
        ({"ddp_seed": 1}, "ddp_seed=; give seed="),
        ({"prob": "w"}, "prob=; give weight_attr="),
    ],
)
def test_glts_names_lead_to_ours(store: Store, given: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ConfigError, match=f"NeighborLoader does not support {way_out}"):
        _nodes(store, **given)


@pytest.mark.parametrize("fields", [["x", "edge_attr"], {("node", "to", "node"): ["edge_attr"]}])
@pytest.mark.parametrize("hook", [None, lambda layer, graph, seeds: graph.in_edges(seeds)])
def test_blocks_have_the_fields_of_edges_that_are_named(fields: Any, hook: Any) -> None:
    options = {"sample_frontier": hook, "batch_size": 3, "mode": "blocks"}
    for batch in NeighborLoader(ring(8), [2, 1], fields=fields, **options):
        assert ("x" in batch) is isinstance(fields, list)
        for block in batch.blocks:
            assert torch.equal(block.data["edge_attr"].view(-1), block.e_id.float())
    for fields in (None, ["x"]):
        assert all(
            not block.data for block in next(iter(NeighborLoader(ring(8), [2], fields=fields, **options))).blocks
        )


def test_blocks_of_several_types_have_fields_by_relation() -> None:
    fields = {WRITES: ["weight"], ("paper", "cites", "paper"): ["weight", "edge_attr"]}
    for batch in NeighborLoader(library(), [2, 2], ("paper", None), batch_size=4, mode="blocks", fields=fields):
        for block in batch.blocks:
            assert {key: tuple(sorted(data)) for key, data in block.data.items()} == {
                key: tuple(sorted(names)) for key, names in fields.items()
            }
            for key, data in block.data.items():
                assert all(torch.equal(rows, block.e_id[key].float()) for rows in data.values())


def test_a_hooks_data_comes_before_a_field_of_its_name_and_edges_without_positions_have_no_fields() -> None:
    def twos(layer: int, graph: Any, seeds: Any) -> Any:
        found = graph.in_edges(seeds)
        return hoploom.Edges(
            found.sources, found.destinations, found.positions, {"weight": torch.full((len(seeds) * 2,), 2)}
        )

    data = ring(8)
    data.weight = torch.ones(16)
    options = {"mode": "blocks", "batch_size": 4, "fields": ["weight"]}
    (block,) = next(iter(NeighborLoader(data, [2], sample_frontier=twos, **options))).blocks
    assert block.data["weight"].tolist() == [2] * 8
    bare = lambda *given: replace(twos(*given), positions=None)  # noqa: E731
    with pytest.raises(ConfigError, match=r"fields names 'weight' of .*sample_frontier returned such edges without"):
        next(iter(NeighborLoader(data, [2], sample_frontier=bare, **options)))
