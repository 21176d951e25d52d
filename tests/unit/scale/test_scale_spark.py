"""Builds on Spark as they are planned: each stage by hand, what more executors change, and where Spark pays."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hoploom.errors import ConfigError
from hoploom.scale import Constants, Question, as_json, as_text, default_constants, plan
from hoploom.scale.spark import SHUFFLED_EDGE, SHUFFLED_ROW, SparkRun

NODES, EDGES = 10**8, 10**9
FIELDS = 16  # bytes of a node: a label, and an original id
SHUFFLED = NODES * (SHUFFLED_ROW + FIELDS) + EDGES * SHUFFLED_EDGE
QUESTION = Question(
    nodes=NODES,
    edges=EDGES,
    features=None,
    train_share=0.0,
    network=1e15,
    executors=4,
    executor_cores=5,
)


def constants(**given: float) -> Constants:
    """Twenty cores are all that is slow."""
    rates = {"spark_start": 10.0, "spark_nodes": 1e5, "spark_joins": 1e6, "spark_writes": 1e8}
    return replace(default_constants(), **(rates | {"disk_write": 1e15, "disk_read": 1e15} | given))


def spark(question: Question = QUESTION, **given: float) -> SparkRun:
    found = plan(question, constants(**given)).spark
    assert found is not None
    return found


def seconds(question: Question = QUESTION, **given: float) -> dict[str, float]:
    return {stage.name: stage.seconds for stage in spark(question, **given).stages}


def test_stages_take_what_twenty_cores_take() -> None:
    rows = NODES * (16 + FIELDS) + EDGES * 16
    expected = {
        "start": 10,
        "number the nodes": NODES / (20 * 1e5),
        "join and shuffle": EDGES / (20 * 1e6),
        "write the parts": rows / (20 * 1e8),
    }
    assert seconds() == pytest.approx(expected)
    assert spark().seconds == pytest.approx(sum(expected.values()))
    assert spark().core_seconds == pytest.approx(20 * sum(expected.values()))
    assert [stage.bottleneck for stage in spark().stages] == ["cores"] * 4


def test_four_disks_write_and_read_what_is_shuffled() -> None:
    assert spark().shuffled == SHUFFLED
    slow = seconds(disk_write=1e8, disk_read=1e9)
    assert slow["join and shuffle"] == pytest.approx(SHUFFLED / 4 * (1 / 1e8 + 1 / 1e9))
    stored = plan(QUESTION).disk
    assert slow["write the parts"] == pytest.approx(stored / 4 * (2 / 1e8 + 1 / 1e9))
    assert spark(disk_write=1e8).stages[2].bottleneck == "disk"


def test_three_quarters_of_a_shuffle_leave_one_of_four_hosts() -> None:
    slow = replace(QUESTION, network=1e8)
    assert seconds(slow)["join and shuffle"] == pytest.approx(SHUFFLED * 0.75 / 4 / 1e8)
    assert spark(slow).stages[2].bottleneck == "network"
    alone = replace(slow, executors=1)
    assert seconds(alone)["join and shuffle"] == pytest.approx(EDGES / (5 * 1e6))


def test_more_executors_take_less_time_and_more_core_hours() -> None:
    few, many = spark(), spark(replace(QUESTION, executors=40))
    assert many.seconds < few.seconds / 5
    assert many.core_seconds > few.core_seconds


def test_spark_pays_from_the_size_on_whose_build_takes_as_long_on_one_machine() -> None:
    question = replace(QUESTION, executors=100)
    rates = constants(spark_start=60.0)
    pays = plan(question, rates).spark_pays_from
    assert pays is not None

    def faster(edges: int) -> bool:
        answer = plan(replace(question, edges=edges, nodes=edges // 10), rates)
        assert answer.spark is not None
        return answer.spark.seconds < sum(answer.build.values())

    assert [faster(round(pays * factor)) for factor in (0.8, 1.01, 10)] == [False, True, True]
    sooner = plan(question, replace(rates, spark_start=6.0)).spark_pays_from
    assert sooner is not None
    assert sooner == pytest.approx(pays / 10, rel=0.15)


def test_too_few_cores_are_never_faster_than_one_machine() -> None:
    answer = plan(replace(QUESTION, executors=1, executor_cores=1), constants())
    assert answer.spark_pays_from is None
    assert "at no size" in as_text(answer)


def test_the_text_and_the_json_say_hours_and_core_hours() -> None:
    answer = plan(QUESTION, constants())
    section = as_text(answer).split("Building on Spark\n")[1].split("\n\n")[0]
    assert "join and shuffle" in section
    assert "executors: 4, cores: 20" in section
    assert f"{spark().core_seconds / 3600:.2f}" in section
    told: dict[str, Any] = json.loads(as_json(answer))["spark"]
    assert told["seconds"] == spark().seconds
    assert told["faster_than_one_machine_from_edges"] == answer.spark_pays_from
    assert json.loads(as_json(plan(replace(QUESTION, executors=None))))["spark"] is None
    assert "Spark" not in as_text(plan(replace(QUESTION, executors=None)))


@pytest.mark.parametrize("change", [{"executors": 0}, {"executor_cores": 0}])
def test_executors_without_cores_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"executor.* is 0; give a whole number"):
        replace(QUESTION, **change)
