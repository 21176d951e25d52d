"""Plans: sizes against stores on disk, batches against real sampling, traffic by hand; questions and bench.json."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import assert_raises

import hoploom
from hoploom import NeighborLoader, ops
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic import generate
from hoploom.ops.sample import MAP_BUDGET
from hoploom.scale import (
    Question,
    as_json,
    as_text,
    default_constants,
    findings,
    measure,
    parse_features,
    plan,
    read_constants,
    sizes,
    to_json,
)
from hoploom.scale.inputs import parse_cut
from hoploom.scale.plan import hosts_needed
from hoploom.scale.sizes import Popularity, batch_size, grow, host_items, picks_per_node, topology_bytes, traffic
from hoploom.schema import Field
from hoploom.store import format as store_format

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

HUGE = 10**15  # nodes among which no two picks meet
LARGE = Question(nodes=10**10, edges=10**12, features=Field("float16", (256,)), hosts=64, ranks_per_host=8)


def bytes_of(folder: Path, pattern: str = "*.npy") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def disk(question: Question, name: str) -> float:
    return sum(item.disk for item in host_items(question, everywhere=False) if item.name == name)


def without_overlap(**given: Any) -> Question:
    """Ten seeds, two picks each, on two hosts."""
    graph = {"nodes": HUGE, "edges": 20 * HUGE, "skew": 0.0, "features": Field("float32", (4,))}
    run = {"hosts": 2, "batch_size": 10, "fanouts": (2,), "original_id_bytes": 0, "topology": "parts"}
    return Question(**(graph | run | given))


def test_sizes_are_those_of_a_store_to_the_byte(tmp_path: Path) -> None:
    edge_index = torch.randint(1000, (2, 10_000))
    nodes = {"x": torch.zeros(1000, 4), "y": torch.zeros(1000, dtype=torch.int64)}
    hoploom.from_tensors(nodes, edge_index, splits={"train": torch.arange(100)}).save(tmp_path / "s")
    question = Question(nodes=1000, edges=10_000, features=Field("float32", (4,)), original_id_bytes=0)
    edge_id = 128 + 8 * 10_000  # from_tensors keeps the user's own numbers of the edges
    assert disk(question, "features") == 128 + 16 * 1000
    assert disk(question, "topology") == 128 + 8 * 1001 + 128 + 4 * 10_000
    assert plan(question).disk == bytes_of(tmp_path / "s") - edge_id


def test_each_of_two_hosts_holds_half_of_a_store_within_two_percent(tmp_path: Path) -> None:
    store = generate(tmp_path / "s", num_nodes=1000, avg_degree=10, num_features=4, num_parts=2)
    num_edges = store.schema.relations[0].num_edges
    graph = {"nodes": 1000, "edges": num_edges, "features": Field("float32", (4,)), "original_id_bytes": 0}
    question = Question(**graph, hosts=2, train_share=1.0, topology="parts")  # its three splits together
    for part in ("part-00000", "part-00001"):
        held = bytes_of(tmp_path / "s" / part)
        own_edges = np.load(next((tmp_path / "s" / part).rglob("csc.indptr.npy")))[-1]
        splits = 2 * 128  # two headers more: the plan has one split
        expected = plan(question).disk + splits + 4 * (int(own_edges) - num_edges / 2)
        assert held == pytest.approx(expected, rel=0.02)
    assert bytes_of(tmp_path / "s") == pytest.approx(plan(question).disk * 2 + 2 * 2 * 128, abs=1)


def test_topology_takes_the_whole_on_every_host_where_it_fits() -> None:
    small = replace(LARGE, nodes=10**6, edges=10**7)
    everywhere = plan(small)
    assert everywhere.everywhere
    assert everywhere.batch.remote_picks == 0
    parts = plan(replace(small, topology="parts"))
    assert parts.store[0].disk == pytest.approx(everywhere.store[0].disk / 64)
    assert not plan(LARGE).everywhere


def test_limits_are_those_of_the_sampler_and_of_the_store() -> None:
    assert (sizes.MAP_BUDGET, sizes.ID_LIMIT) == (MAP_BUDGET, store_format.ID_LIMIT)


def test_ids_are_wide_from_two_to_the_31_nodes_on() -> None:
    for nodes, width in ((2**31 - 1, 4), (2**31, 8)):
        assert topology_bytes(Question(nodes=nodes, edges=2**33), 1) == 8 * nodes + width * 2**33 + 2 * 128 + 8


def test_distinct_nodes_without_skew_are_the_closed_form() -> None:
    assert Popularity(1000, 0.0).distinct(0, 500) == pytest.approx(1000 * (1 - math.exp(-0.5)), rel=1e-4)
    assert Popularity(1000, 0.0).distinct(100, 0) == pytest.approx(100, rel=1e-4)


def test_distinct_nodes_with_skew_are_those_of_a_simulation() -> None:
    num_nodes, draws = 50_000, 40_000
    generator = torch.Generator().manual_seed(1)
    ranks = (torch.rand(draws, generator=generator).square() * num_nodes).long()  # density 1/2 rank^(-1/2)
    found = ranks.unique()
    crowd = Popularity(num_nodes)
    assert crowd.distinct(0, draws) == pytest.approx(found.numel(), rel=0.01)
    among_hottest = float((found < num_nodes // 10).sum()) / found.numel()
    assert crowd.hit_rate(0, draws, 0.1) == pytest.approx(among_hottest, rel=0.02)


@pytest.mark.parametrize(("fanout", "limit"), [(3, 3), (10, 10), (25, 25), (-1, math.inf)])
def test_picks_per_node_are_the_mean_of_degrees_cut_off(fanout: int, limit: float) -> None:
    shares = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    degrees = 10 / shares.sqrt()  # more than d: (10 / d)^2
    assert picks_per_node(20, fanout) == pytest.approx(float(degrees.clamp(max=limit).mean()), rel=1e-3)


def test_a_batch_is_as_large_as_a_real_one_within_two_percent(tmp_path: Path) -> None:
    store = generate(tmp_path / "s", num_nodes=20_000, avg_degree=20, num_features=2)
    num_edges = store.schema.relations[0].num_edges
    loader = NeighborLoader(store, [10, 5], ops.permute(0, 20_000, 0, 400), batch_size=400, mode="blocks")
    batch = next(iter(loader))
    picks = sum(block.edge_index.shape[1] for block in batch.blocks)
    hops = grow(Popularity(20_000), num_edges / 20_000, 400, [10, 5])
    assert sum(hop.picks for hop in hops) == pytest.approx(picks, rel=0.02)
    assert hops[-1].nodes == pytest.approx(batch.n_id.numel(), rel=0.02)


def test_a_cache_without_skew_hits_as_often_as_it_holds() -> None:
    assert Popularity(10**6, 0.0).hit_rate(1000, 10**5, 0.25) == pytest.approx(0.25)
    assert Popularity(10**6).hit_rate(1000, 10**5, 1.0) == pytest.approx(1.0, rel=1e-3)


def test_with_seeds_from_anywhere_half_of_all_comes_from_the_other_host() -> None:
    for cut in (0.1, 0.5):  # whatever is cut
        question = without_overlap(edge_cut=cut)
        size = batch_size(question, everywhere=False)
        assert (size.remote_frontier, size.remote_picks, size.remote_rows) == pytest.approx((5, 10, 15), rel=1e-3)
        moved = traffic(question, size)
        assert moved["hops"] == pytest.approx(5 * (8 + 8) + 10 * (8 + 8), rel=1e-3)
        assert moved["rows"] == pytest.approx(15 * (8 + 8 + 16), rel=1e-3)  # an id, a label and four floats


def test_with_local_seeds_only_cut_edges_lead_away() -> None:
    size = batch_size(without_overlap(edge_cut=0.2, local_seeds=True, fanouts=(2, 3)), everywhere=False)
    away = 0.8 * 0.2 + 0.2 * 0.8  # of the second hop: left at last, or left before and not come back
    again = 10 * (picks_per_node(20, 2, 3) - 2)  # the lists of the ten seeds are drawn from twice
    assert size.remote_rows == pytest.approx(20 * 0.2 + (again + 20 * 3) * away, rel=1e-3)
    assert size.remote_frontier == pytest.approx(20 * 0.2, rel=1e-3)
    assert size.remote_picks == pytest.approx(3 * 20 * 0.2, rel=1e-3)


def test_gradients_go_round_the_hosts_once_for_all_ranks_of_each() -> None:
    question = without_overlap(hosts=4, ranks_per_host=2, hidden=8, classes=3, fanouts=(2, 2))
    parameters = (2 * 4 * 8 + 8) + (2 * 8 * 3 + 3)
    assert traffic(question, batch_size(question, everywhere=False))["gradients"] == 2 * (3 / 4) * 4 * parameters / 2


def test_one_host_moves_nothing_and_hits_leave_the_rest() -> None:
    assert set(plan(without_overlap(hosts=1)).traffic.values()) == {0}
    cached = plan(without_overlap(cache=0.75))
    assert cached.traffic["rows"] == pytest.approx(15 * 0.25 * 32, rel=1e-3)
    assert cached.cached == pytest.approx(0.75 * HUGE / 2 * 24)


@pytest.mark.parametrize(
    ("change", "measured"),
    [
        ({"edges": 2 * 10**12}, lambda p: p.mapped),
        ({"nodes": 2 * 10**10}, lambda p: p.mapped),
        ({"features": Field("float32", (256,))}, lambda p: p.traffic["rows"]),
        ({"batch_size": 2048}, lambda p: p.step),
        ({"batch_size": 2048}, lambda p: p.private),
        ({"fanouts": (15, 10, 10)}, lambda p: p.times["sampling"]),
        ({"edges": 2 * 10**12}, lambda p: sum(p.build.values())),
        ({"ranks_per_host": 16}, lambda p: p.private),
        ({"hidden": 512}, lambda p: p.private),
        ({"cache": 0.1}, lambda p: p.wanted),
        ({"cache": 0.1}, lambda p: -p.traffic["rows"]),
        ({"edge_cut": 0.1, "local_seeds": True}, lambda p: -p.traffic["rows"]),
    ],
)
def test_more_of_one_thing_takes_more_of_another(change: dict[str, Any], measured: Any) -> None:
    assert measured(plan(replace(LARGE, **change))) > measured(plan(LARGE))


def test_the_bottleneck_is_what_takes_longest() -> None:
    assert plan(replace(LARGE, step_seconds=1000.0)).bottleneck == "model"
    starved = plan(replace(LARGE, network=1e6))
    assert starved.bottleneck == "network"
    assert starved.step == pytest.approx(sum(starved.traffic.values()) * 8 / 1e6)
    small = plan(Question(nodes=10**6, edges=10**7, features=None, original_id_bytes=0))
    assert small.bottleneck == "sampling"
    assert small.step == pytest.approx(small.times["sampling"] + small.times["gathering"])


def test_the_hosts_it_names_are_the_fewest_that_fit() -> None:
    crowded = replace(LARGE, hosts=8, memory_per_host=256 * 10**9)
    enough = hosts_needed(crowded, default_constants())
    fits = [plan(replace(crowded, hosts=hosts)).wanted <= crowded.memory_per_host for hosts in (enough - 1, enough)]
    assert fits == [False, True]
    (slow,) = [f for f in findings(plan(crowded)) if "do not fit" in f.what]
    assert slow.level == "slow"
    assert f"{enough} hosts" in slow.way_out


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        ({"cache": 0.5}, "breaks", "trainers and cache take"),
        ({"memory_per_host": 10**11}, "slow", "do not fit the 100 GB of a host"),
        ({"network": 1e7}, "slow", "network bounds the step"),
        ({"network": 1e15, "step_seconds": 1e-3}, "slow", "sampling bounds the step"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], level: str, what: str) -> None:
    found = findings(plan(replace(LARGE, **change)))
    assert [f.level for f in found if what in f.what] == [level]
    assert all(f.way_out for f in found)


def test_assigning_by_stream_takes_as_long_as_was_measured_for_each_edge_and_core() -> None:
    own = replace(default_constants(), partition_edges=1e7, cores=4)
    plans = [plan(replace(LARGE, edge_cut=cut), own) for cut in ("stream", "hash", 0.2)]
    assigning = [made.partition["assign the nodes"] for made in plans]
    assert assigning == pytest.approx([10**12 / (4 * 1e7), 0, 0])


EXTREMES = [
    Question(nodes=10, edges=10, batch_size=1, features=Field("float32"), edge_features=Field("float32")),
    Question(nodes=1, edges=1, batch_size=1),
    Question(nodes=1, edges=1, batch_size=1, features=None, original_id_bytes=0, train_share=0.0),
    Question(nodes=3, edges=10**15, batch_size=1, fanouts=(0, -1), skew=0.99),
    Question(nodes=10**18, edges=10**18, hosts=2, memory_per_host=1, cache=1.0),
    Question(nodes=10**6, edges=1, batch_size=10**6, hosts=3, edge_cut=1.0, local_seeds=True),
    replace(LARGE, edge_features=Field("int8", (3,)), cache=1),
]


@pytest.mark.parametrize("question", [LARGE, *EXTREMES])
def test_the_text_holds_numbers_whatever_is_asked(question: Question) -> None:
    answer = plan(question)
    text = as_text(answer)
    assert not any(word in text.lower().split() for word in ("nan", "inf", "-inf", "none"))
    assert "-0" not in text
    assert max(map(len, text.splitlines())) < 160
    assert json.loads(as_json(answer))["host"]["disk"] == answer.disk


def test_the_text_names_whose_constants_it_uses() -> None:
    assert "Constants: the built-in ones, measured on" in as_text(plan(LARGE))
    own = replace(default_constants(), machine="my own")
    assert "Constants: measured on my own" in as_text(plan(LARGE, own))


def test_features_and_cuts_are_read_as_people_write_them() -> None:
    assert parse_features("f", "256xfp16") == Field("float16", (256,))
    assert parse_features("f", "100xbfloat16") == Field("bfloat16", (100,))
    assert parse_features("f", "none") is None
    assert (parse_cut("c", "0.2"), parse_cut("c", "stream")) == (0.2, "stream")


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_features, "256", "give a width and a dtype such as 256xfp16, or none"),
        (parse_features, "256xfp61", "--x has dtype 'fp61'; did you mean fp64"),
        (parse_features, "256xflaot32", "did you mean float32"),
        (parse_cut, "metsi", "--x is 'metsi'; give a number"),
    ],
)
def test_bad_features_and_cuts_are_refused_with_the_way_out(read: Any, text: str, message: str) -> None:
    assert_raises(ConfigError, message, read, "--x", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes is 0; give a whole number from 1 to 10"),
        ({"edges": -1}, "edges is -1; give a whole number"),
        ({"nodes": 1e10}, "nodes is 10000000000.0; give a whole number"),
        ({"nodes": 10**19}, "from 1 to 1000000000000000000"),
        ({"nodes": 10, "batch_size": 1}, "hosts is 64 for 10 nodes"),
        ({"features": Field("flaot16", (3,))}, "features is Field.*; give a dtype and a width"),
        ({"features": Field("float16", (0,))}, "a width of at least 1"),
        ({"fanouts": ()}, "give one count per layer"),
        ({"fanouts": (5, -2)}, "give one count per layer"),
        ({"fanouts": (5,) * 40}, "for at most 32 layers"),
        ({"edge_cut": 1.5}, "edge cut is 1.5; give a share from 0 to 1, or one of hash, range, stream"),
        ({"edge_cut": math.nan}, "edge cut is nan; give a share"),
        ({"edge_cut": "louvain"}, "edge cut is 'louvain'"),
        ({"cache": 2.0}, "cache is 2.0; give a number from 0 to 1"),
        ({"skew": 1.0}, "skew is 1.0; give a number from 0 to below 1"),
        ({"network": 0.0}, "network is 0.0; give a number above 0"),
        ({"topology": "some"}, 'topology is \'some\'; give one of "auto", "everywhere", "parts"'),
        ({"memory_per_host": 0}, "memory per host is 0"),
    ],
)
def test_a_bad_question_is_refused_when_it_is_made(change: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, message, replace, LARGE, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not what `hoploom bench` writes"),
        ({"version": 99}, "is not what `hoploom bench` writes"),
        ({"disk_read": 0}, "disk_read is 0; it must be a number above 0"),
        (
            {"disk_read": "fast"},
            r"disk_read is 'fast'; it must be a number above 0; run `hoploom bench --out bench.json` again",
        ),
        ({"machine": 3}, "machine is 3; it must be text"),
    ],
)
def test_a_wrong_bench_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(to_json(default_constants())) | change))
    assert_raises(ConfigError, message, read_constants, path)


def test_a_bench_file_that_is_missing_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    said = "cannot be read: No such file.*`hoploom bench --out .*bench.json` writes one"
    assert_raises(ConfigError, said, read_constants, path)
    path.write_text(to_json(default_constants())[:100])
    assert_raises(ConfigError, "is no JSON", read_constants, path)


def test_measuring_yields_constants_that_plans_take(tmp_path: Path) -> None:
    effort = measure.Effort(60_000, 2 << 20, 20_000, 0.002)
    said: list[str] = []
    constants = measure.measure(tmp_path, said.append, effort)
    assert all(0 < value < math.inf for value in asdict(constants).values() if isinstance(value, float))
    assert said
    assert not list(tmp_path.iterdir())
    (tmp_path / "bench.json").write_text(to_json(constants))
    assert read_constants(tmp_path / "bench.json") == constants
    assert "Constants: measured on" in as_text(plan(LARGE, constants))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert_raises(ConfigError, "is no directory; give one on the disk", measure.measure, tmp_path / "absent")
