"""What plans are asked with: amounts as people write them, questions, bench.json, and measuring one."""

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from hoploom.errors import ConfigError
from hoploom.scale import (
    Constants,
    Question,
    ScalePlan,
    constants_as_text,
    default_constants,
    machine,
    measure,
    parse_cut,
    parse_features,
    plan,
    read_constants,
    to_json,
)
from hoploom.scale.constants import rate_at
from hoploom.schema import Field

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

LARGE = Question(nodes=10**10, edges=10**12, features=Field("float16", (256,)), hosts=64, ranks_per_host=8)


# --- what is read --------------------------------------------------------------------------------


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
        (parse_features, "0xfp16", "give a width of at least 1"),
        (parse_cut, "metsi", "--x is 'metsi'; did you mean metis"),
    ],
)
def test_bad_features_and_cuts_are_refused_with_the_way_out(read: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("--x", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes is 0; give a whole number of at least 1"),
        ({"edges": -1}, "edges is -1; give a whole number of at least 1"),
        ({"hosts": 0}, "hosts is 0; give a whole number of at least 1"),
        ({"nodes": 1e10}, "nodes is 10000000000.0; give a whole number"),
        ({"nodes": 10**19}, "at most 1e18"),
        ({"hosts": 20_000, "parts_per_host": 6}, "120000 parts are more than a store takes"),
        ({"nodes": 10, "batch_size": 1}, "hosts is 64 for 10 nodes"),
        ({"features": Field("flaot16", (3,))}, "dtype 'flaot16'; did you mean float16"),
        ({"fanouts": ()}, "fanouts are empty; give one per layer"),
        ({"fanouts": (5, -2)}, "fanout is -2; give a count, or -1"),
        ({"fanouts": (5,) * 40}, "fanouts are 40; give one per layer, at most 32"),
        ({"edge_cut": 1.5}, "edge cut is 1.5; it is a share, give 0 to 1"),
        ({"edge_cut": math.nan}, "edge cut is nan; it is a share"),
        ({"edge_cut": "louvain"}, "edge cut is 'louvain'"),
        ({"cache": -0.1}, "cache is -0.1; it is a share"),
        ({"hit_rate": 2.0}, "hit rate is 2; it is a share"),
        ({"train_share": 7.0}, "train share is 7; it is a share"),
        ({"skew": 1.0}, "skew is 1; give 0"),
        ({"network": 0.0}, "network is 0; give a number above 0"),
        ({"step_seconds": -1.0}, "step seconds is -1.0; give a number above 0"),
        ({"topology": "some"}, "topology is 'some'; choose one of auto, everywhere, parts"),
        ({"mode": "graph"}, "mode is 'graph'; choose one of blocks, subgraph"),
        ({"largest_type": 10**11}, "largest type is 100000000000 of 10000000000 nodes"),
        ({"memory_per_host": 0}, "memory per host is 0"),
    ],
)
def test_a_bad_question_is_refused_when_it_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LARGE, **change)


# --- constants -----------------------------------------------------------------------------------


def test_rates_between_two_points_are_linear_in_the_logarithm() -> None:
    curve = ((1e6, 100.0), (1e8, 20.0))
    assert [rate_at(curve, size) for size in (1.0, 1e6, 1e7, 1e8, 1e12)] == pytest.approx([100, 100, 60, 20, 20])


def test_constants_come_back_from_their_file(tmp_path: Path) -> None:
    own = replace(default_constants(), machine="mine", join_edges=None)
    (tmp_path / "bench.json").write_text(to_json(own))
    assert read_constants(tmp_path / "bench.json") == own
    assert plan(LARGE, own).build  # the built-in figure stands in for the join


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not what `hoploom bench` writes"),
        ({"version": 99}, "is not what `hoploom bench` writes"),
        ({"disk_read": 0}, "disk_read is 0; it must be a number above 0"),
        ({"disk_read": "fast"}, "disk_read is 'fast'; it must be a number above 0"),
        ({"sample_picks": []}, "sample_picks is .*; it must be .bytes, rate. pairs"),
        ({"sample_picks": [[2, 1], [1, 1]]}, "sample_picks is"),
        ({"machine": 3}, "machine is 3; it must be text"),
        ({"disk_read": None}, "disk_read is None"),
    ],
)
def test_a_wrong_bench_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(to_json(default_constants())) | change))
    with pytest.raises(ConfigError, match=message):
        read_constants(path)


def test_a_bench_file_that_is_missing_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(
        ConfigError, match=r"cannot be read: No such file.*`hoploom bench --out .*bench.json` writes one"
    ):
        read_constants(path)
    path.write_text(to_json(default_constants())[:100])
    with pytest.raises(ConfigError, match="is no JSON"):
        read_constants(path)


def test_a_bench_file_from_before_a_figure_was_measured_says_which_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    contents = json.loads(to_json(default_constants()))
    del contents["partition_edges"]
    path.write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match=r"lacks partition_edges, .*; run `hoploom bench --out bench.json` again"):
        read_constants(path)
    del contents["linear_flops"]
    path.write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match="lacks partition_edges, linear_flops, "):
        read_constants(path)


# --- measuring -----------------------------------------------------------------------------------

TINY = measure.Effort((20_000, 60_000), 2 * measure.MB, (measure.MB, 2 * measure.MB), 20_000, 20_000, 0.002)


def assert_positive(constants: Constants) -> None:
    for field in fields(Constants):
        value = getattr(constants, field.name)
        if isinstance(value, tuple):
            assert all(size > 0 and 0 < rate < math.inf for size, rate in value)
        elif isinstance(value, float):
            assert 0 < value < math.inf, field.name


def test_measuring_yields_constants_that_plans_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUICK", TINY)
    said: list[str] = []
    constants = measure.measure(quick=True, folder=tmp_path, progress=said.append)
    assert_positive(constants)
    assert said
    assert not list(tmp_path.iterdir())
    (tmp_path / "bench.json").write_text(to_json(constants))
    assert asdict(read_constants(tmp_path / "bench.json")) == asdict(constants)
    assert "quickly" in constants_as_text(constants)
    assert "assigning nodes by stream, 1 thread" in constants_as_text(constants)
    answer: ScalePlan = plan(LARGE, constants)
    assert not answer.uses_defaults


@pytest.mark.slow
def test_bench_quick_measures_this_machine() -> None:
    assert_positive(measure.measure(quick=True))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory; give one on the disk"):
        measure.measure(quick=True, folder=tmp_path / "absent")


def test_a_loopback_measurement_counts_what_arrives() -> None:
    rate, trip = machine.loopback(0.02)
    assert rate > machine.PIECE
    assert 0 < trip < 1
