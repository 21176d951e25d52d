"""What plans are asked with: amounts as people write them, questions, bench.json, and measuring one."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hoploom.errors import ConfigError
from hoploom.scale import Question, as_text, default_constants, measure, parse_features, plan, read_constants, to_json
from hoploom.scale.inputs import parse_cut
from hoploom.schema import Field

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

LARGE = Question(nodes=10**10, edges=10**12, features=Field("float16", (256,)), hosts=64, ranks_per_host=8)


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
    with pytest.raises(ConfigError, match=message):
        read("--x", text)


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
    with pytest.raises(ConfigError, match=message):
        replace(LARGE, **change)


def test_constants_come_back_from_their_file(tmp_path: Path) -> None:
    own = replace(default_constants(), machine="mine")
    (tmp_path / "bench.json").write_text(to_json(own))
    assert read_constants(tmp_path / "bench.json") == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not what `hoploom bench` writes"),
        ({"version": 99}, "is not what `hoploom bench` writes"),
        ({"disk_read": 0}, "disk_read is 0; it must be a number above 0"),
        ({"disk_read": "fast"}, "disk_read is 'fast'; it must be a number above 0"),
        ({"machine": 3}, "machine is 3; it must be text"),
        (
            {"disk_read": None},
            r"disk_read is None; it must be a number above 0; run `hoploom bench --out bench.json` again",
        ),
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
    with pytest.raises(ConfigError, match="is no directory; give one on the disk"):
        measure.measure(tmp_path / "absent")
