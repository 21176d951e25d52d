"""The rates of `hoploom plan` for builds and cuts on Spark, from runs of two sizes, and what it says of others."""

from collections.abc import Mapping
from dataclasses import replace

from spark_cluster import Ended
from spark_tables import EDGES_PER_NODE

from hoploom.fields import Field
from hoploom.scale import Constants, Question, default_constants, plan
from hoploom.scale.sizes import node_bytes
from hoploom.scale.spark import EDGE_ROW, NODE_ROW, row_bytes
from hoploom.scale.spark_cut import LEVEL_STAGES, links_of_levels, spark_cut

WORKERS = 2  # of one core
ID = 8
FAST = 1e15  # bytes a second
LEAST = 1e-3  # seconds: a graph that is too small takes no longer than one that is smaller still


def planned(num_edges: int, constants: Constants) -> float:
    """Seconds of a build."""
    answer = plan(_question(num_edges), constants)
    assert answer.spark is not None
    return answer.spark.seconds


def rates_of(builds: Mapping[int, Ended], joins: Mapping[int, Ended], fixed: int, known: int) -> dict[str, float]:
    """Those of `known` edges; what `fixed` edges take is what every build takes. Graphs are named by their edges."""

    def beyond(of: Mapping[int, Ended], *stages: str) -> float:
        found = (of[known].stages.get(stage, 0.0) - of[fixed].stages.get(stage, 0.0) for stage in stages)
        return max(LEAST, sum(found))

    question, nodes = _question(known), known // EDGES_PER_NODE
    shuffle = beyond(joins, "joins and shuffle")
    writing = max(LEAST, beyond(builds, "node", "node to node") - shuffle)
    rates = {
        "spark_start": builds[fixed].seconds,
        "spark_nodes": nodes / beyond(builds, "numbering the nodes") / WORKERS,
        "spark_joins": known / shuffle / WORKERS,
        "spark_writes": (known * EDGE_ROW + nodes * (NODE_ROW + node_bytes(question))) / writing / WORKERS,
    }
    return _rounded(rates)


def planned_cut(num_edges: int, constants: Constants) -> float:
    """Seconds of a cut into parts."""
    run = plan(_cut_question(num_edges), constants).spark_cut
    assert run is not None
    return run.seconds


def cut_rates_of(cuts: Mapping[int, Ended], stage: float, fixed: int, known: int) -> dict[str, float]:
    """Likewise; `stage` is what a stage without work takes."""

    def beyond(*stages: str) -> float:
        return max(LEAST, sum(cuts[known].stages.get(name, 0.0) - cuts[fixed].stages.get(name, 0.0) for name in stages))

    question = _cut_question(known)
    rates = {"spark_cut_start": cuts[fixed].seconds, "spark_stage": stage, "spark_links": 1.0, "spark_rewrites": 1.0}
    shape = spark_cut(question, replace(default_constants(), **rates, disk_write=FAST, disk_read=FAST))
    seconds = {one.name: one.cores for one in shape.stages}  # of one link a second: the links of a core
    waited = len(list(links_of_levels(question))) * LEVEL_STAGES * stage
    rounds = ("link the nodes", "find clusters", "move nodes", "find the most used nodes")
    links = sum(seconds[name] for name in rounds) - waited
    rows = question.nodes * row_bytes(question) / default_constants().spark_writes / WORKERS
    rates["spark_links"] = links / max(
        LEAST, beyond("assigning nodes by stream", "finding the most used nodes") - waited
    )
    rewriting = beyond("node", "node to node", "counting cut edges") - rows
    rates["spark_rewrites"] = question.edges / WORKERS / max(LEAST, rewriting)
    return _rounded(rates)


def _rounded(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{rate:.3g}") for name, rate in rates.items()}


def constants_of(rates: Mapping[str, float]) -> Constants:
    """The built-in ones with these rates."""
    return replace(default_constants(), **rates)


def _question(num_edges: int) -> Question:
    """Two executors on one host: between them is no wire."""
    return Question(
        nodes=num_edges // EDGES_PER_NODE,
        edges=num_edges,
        features=None,
        original_id_bytes=ID,
        train_share=0.0,
        network=1e12,
        executors=WORKERS,
        executor_cores=1,
        batch_size=1,
    )


def _cut_question(num_edges: int) -> Question:
    """The graphs of spark_cutting.py."""
    return replace(_question(num_edges), features=Field("float32", (1,)), original_id_bytes=0, train_share=0.1)
