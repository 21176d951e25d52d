"""Cuts on Spark as they are planned: the work of each stage by hand, levels of clusters, and where it is said."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from hoploom.fields import Field
from hoploom.scale import Constants, Question, as_json, as_text, default_constants, plan
from hoploom.scale import spark_cut as model
from hoploom.scale.spark import SparkRun
from hoploom.scale.spark_cut import LEVEL_STAGES, links_of_levels, links_of_nodes

NODES, EDGES = 10**7, 10**9  # every node has more in-edges than it asks
LINKS = 16 * NODES
QUESTION = Question(
    nodes=NODES,
    edges=EDGES,
    features=Field("float16", (36,)),
    original_id_bytes=0,
    train_share=0.0,
    network=1e15,
    executors=4,
    executor_cores=5,
)
ROW = 16 + 72 + 8  # bytes of a node: its ids, its features and a label


def constants(**given: float) -> Constants:
    """Twenty cores are all that is slow."""
    rates = {"spark_cut_start": 20.0, "spark_stage": 0.5, "spark_links": 1e6, "spark_rewrites": 1e6}
    rates |= {"spark_writes": 1e8, "disk_write": 1e15, "disk_read": 1e15}
    return replace(default_constants(), **(rates | given))


def cut(question: Question = QUESTION, **given: float) -> SparkRun:
    found = plan(question, constants(**given)).spark_cut
    assert found is not None
    return found


def test_stages_take_what_twenty_cores_take() -> None:
    clusters = [NODES / 3.5, NODES / 3.5 / 8]
    links = LINKS + 32 * sum(clusters)
    expected = {
        "start": 20,
        "link the nodes": (0.5 * EDGES + LINKS) / (20 * 1e6),
        "find clusters": 3 * LEVEL_STAGES * 0.5 + (3 + 8) * links / (20 * 1e6),
        "move nodes": 0.7 * 4 * LINKS / (20 * 1e6),
        "find the most used nodes": 0.5 * 2 * EDGES / (20 * 1e6),  # in two of three hops: there are no seeds
        "write the parts": (EDGES / 1e6 + NODES * ROW / 1e8) / 20,
    }
    assert {stage.name: stage.seconds for stage in cut().stages} == pytest.approx(expected)
    assert cut().core_seconds == pytest.approx(20 * sum(expected.values()))
    assert {stage.bottleneck for stage in cut().stages} == {"cores"}


def test_four_disks_write_and_read_what_is_sent() -> None:
    slow, sent = cut(disk_write=1e6, disk_read=2e6), 4 * LINKS * 6 / 4
    assert slow.stages[3].seconds == pytest.approx(sent * (1 / 1e6 + 1 / 2e6))
    assert slow.stages[3].bottleneck == "disk"
    assert cut().shuffled > 16 * EDGES + 2 * 8 * EDGES + 2 * 24 * EDGES


def test_links_are_read_over_the_network_in_every_turn() -> None:
    slow = cut(replace(QUESTION, network=1e6))
    moving = 4 * LINKS * 6 * 0.75 + LINKS * 12 * 2 * 4
    assert slow.stages[3].seconds == pytest.approx(moving / 4 / 1e6)
    assert {stage.bottleneck for stage in slow.stages[1:]} == {"network"}


def test_nodes_with_few_in_edges_have_links_along_out_edges() -> None:
    few = replace(QUESTION, edges=4 * NODES)  # one node in sixteen has eight in-edges or more
    assert 0.8 * 8 * NODES < links_of_nodes(few) < 8 * NODES
    assert links_of_nodes(QUESTION) == pytest.approx(LINKS)


@pytest.mark.parametrize(("nodes", "levels"), [(60_000, 0), (70_000, 1), (300_000, 2), (3_000_000, 3)])
def test_spark_works_on_levels_that_are_too_large_for_the_driver(nodes: int, levels: int) -> None:
    assert len(list(links_of_levels(replace(QUESTION, nodes=nodes, edges=20 * nodes)))) == levels


def test_a_level_has_at_most_twice_the_links_of_the_one_before() -> None:
    sparse = list(links_of_levels(replace(QUESTION, nodes=10**9, edges=10**9)))
    assert len(sparse) > 2
    assert all(above <= 2 * below for below, above in pairwise(sparse))


def test_the_text_and_the_json_say_hours_and_core_hours() -> None:
    answer = plan(QUESTION, constants())
    section = as_text(answer).split("Partitioning on Spark\n")[1].split("\n\n")[0]
    assert "find clusters" in section
    assert "executors: 4, cores: 20" in section
    assert json.loads(as_json(answer))["spark_cut"]["seconds"] == cut().seconds
    assert json.loads(as_json(plan(replace(QUESTION, executors=None))))["spark_cut"] is None


def test_rounds_and_links_are_those_of_the_partitioner() -> None:
    pytest.importorskip("pyspark")
    from hoploom.partition.spark import clusters, links, placing, refine

    for where, names in (
        (links, ("SAMPLES", "ENOUGH", "KEPT")),
        (clusters, ("ROUNDS", "LINKS")),
        (refine, ("PASSES",)),
        (placing, ("MOST_CLUSTERS",)),
    ):
        for name in names:
            assert getattr(model, name) == getattr(where, name), name
