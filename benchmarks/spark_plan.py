"""The rates of `hoploom plan` for builds on Spark, from builds of two sizes, and what it says of others."""

from collections.abc import Mapping
from dataclasses import replace

from spark_cluster import Ended
from spark_tables import EDGES_PER_NODE

from hoploom.scale import Constants, Question, default_constants, plan
from hoploom.scale.sizes import node_bytes
from hoploom.scale.spark import EDGE_ROW, NODE_ROW

WORKERS = 2  # of one core
ID = 8
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
