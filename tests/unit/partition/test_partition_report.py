"""What the report says is what arithmetic says, in text and JSON."""

import json
from pathlib import Path

import pytest
from support.graphs import in_parts, library, ring, save_in_parts

import hoploom
from hoploom import ConfigError, Store
from hoploom.load.presample import Presampling
from hoploom.partition import bounded_store
from hoploom.partition.report import Cut, PartCost, PartitionReport, report, report_as_json
from hoploom.schema import RelationName

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


def made_up(num_parts: int, *, sampled: bool = True) -> PartitionReport:
    """Part p has p + 1 times a hundred nodes; a batch has ten times as many rows, a quarter of them remote."""
    parts = []
    for part in range(num_parts):
        count = 100 * (part + 1)
        rows = (10.0 * count, 2.5 * count, 1e4 * count) if sampled else ()
        parts.append(PartCost({"node": count}, 7 * count, 50, *rows))
    sampling = {"seeds": "train", "fanouts": [15, 10], "batch_size": 64}
    cuts = (Cut("node to node", 1000, 125),)
    return PartitionReport(cuts, tuple(parts), sampling) if sampled else PartitionReport(cuts, tuple(parts))


def test_cut_and_balance_of_the_ring_are_those_of_arithmetic(tmp_path: Path) -> None:
    store = hoploom.from_pyg(ring(12))
    for given in (in_parts(store, 2), save_in_parts(store, tmp_path / "ring", 2), tmp_path / "ring"):
        costs = report(given, fanouts=None)
        assert costs.cuts == (Cut("node to node", 24, 6),)  # of 4, 5, 10 and 11: one, two, one and two
        assert costs.edge_cut == 0.25
        assert [part.num_nodes for part in costs.parts] == [{"node": 6}] * 2
        assert [part.num_edges for part in costs.parts] == [12, 12]
        assert [part.num_seeds for part in costs.parts] == [6, 0]
        assert costs.remote_share is None


def test_cut_of_every_relation_by_part_of_its_own_types() -> None:
    store = hoploom.from_pyg(library())
    costs = report(in_parts(store, 2), seeds=None)
    edges = {relation.key: 0 for relation in store.schema.relations}
    middle = {"author": 3, "paper": 5, "venue": 1}  # where the second part begins

    def across(key: RelationName, source: int, destination: int) -> bool:
        return (source >= middle[key[0]]) != (destination >= middle[key[2]])

    data = library()
    for key in edges:
        edges[key] = sum(across(key, *ends) for ends in data[key].edge_index.t().tolist())
    assert {cut.relation: cut.num_cut for cut in costs.cuts} == {" ".join(key): n for key, n in edges.items()}
    assert costs.parts[1].num_nodes == {"author": 4, "paper": 5, "venue": 2}


def test_remote_rows_of_the_ring_are_those_of_arithmetic() -> None:
    costs = report(in_parts(hoploom.from_pyg(ring(12)), 2), [-1])
    first, second = costs.parts
    assert (first.batch_rows, first.remote_rows) == (8.0, 2.0)  # seeds 0 to 5 reach 7
    assert first.remote_bytes == 2 * (16 + 8 + 3)  # x, y and three masks
    assert (second.num_seeds, second.batch_rows, second.remote_rows) == (0, 0.0, 0.0)
    assert costs.remote_share == 0.25


def test_the_batches_measured_are_not_those_that_found_the_most_used_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, range]] = []
    visited = bounded_store.visited

    def watched(store: Store, fanouts: object, seeds: object, plan: Presampling) -> object:
        assert plan.batches is not None
        seen.append((plan.seed, plan.batches))
        return visited(store, [1], seeds, plan)

    monkeypatch.setattr(bounded_store, "visited", watched)
    report(in_parts(hoploom.from_pyg(ring(12)), 2), [1], sampling=Presampling(seed=5))
    assert seen == [(6, range(32))]


def test_a_report_is_the_same_every_time_whatever_the_threads() -> None:
    store = in_parts(hoploom.from_pyg(library()), 3)
    seeds = ("paper", "train")
    one, other = (report(store, [2, 1], seeds, sampling=Presampling(num_threads=n, batch_size=2)) for n in (1, 3))
    assert one == other
    assert one.sampling == {"seeds": "paper train", "fanouts": [2, 1], "batch_size": 2}


def test_a_report_of_what_is_not_there_is_refused(ring_store: Store) -> None:
    with pytest.raises(ConfigError, match="unknown split 'valid'"):
        report(ring_store, [1], "valid")
    with pytest.raises(ConfigError, match="fanouts are empty"):
        report(ring_store, [])


def test_the_table_says_what_the_figures_say() -> None:
    assert str(made_up(2)).splitlines() == [
        "part  nodes  edges  seeds  rows a batch  remote  remote MB",
        "0       100    700     50         1,000  25.0 %        1.0",
        "1       200  1,400     50         2,000  25.0 %        2.0",
        "",
        "edges from another part: 12.5 %",
        "rows of a batch from another part: 25.0 %",
        "sampled: batches of 64, seeds train, fanouts [15, 10]",
    ]
    assert str(made_up(1, sampled=False)).splitlines() == [
        "part  nodes  edges  seeds",
        "0       100    700     50",
        "",
        "edges from another part: 12.5 %",
    ]


def test_the_json_holds_every_figure() -> None:
    contents = json.loads(report_as_json(made_up(3)))
    assert contents["edge_cut"] == 0.125
    assert contents["remote_share"] == 0.25
    assert contents["parts"][2]["num_nodes"] == {"node": 300}
    assert contents["cuts"] == [{"relation": "node to node", "num_edges": 1000, "num_cut": 125}]
