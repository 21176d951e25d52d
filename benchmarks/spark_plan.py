"""The rates of `hoploom plan` for Spark, from runs of two sizes, and its forecasts for other sizes."""

from collections.abc import Mapping
from dataclasses import replace

from spark_cluster import Ended
from spark_tables import EDGES_PER_NODE

from hoploom.scale import Constants, Question, default_constants, plan
from hoploom.scale.plan import EDGE_BYTES, NODE_ROW
from hoploom.scale.sizes import node_bytes

WORKERS = 2  # of one core
ID = 8
LEAST = 1e-3  # seconds: a graph that is too small takes no longer than a smaller one


def planned(num_edges: int, constants: Constants) -> float:
    """Return the forecast of a build, in seconds."""
    return plan(_question(num_edges), constants).spark["tables to parts"]


def rates_of(builds: Mapping[int, Ended], joins: Mapping[int, Ended], fixed: int, known: int) -> dict[str, float]:
    """Return the rates of the build of `known` edges; the build of `fixed` edges gives the fixed time."""

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
        "spark_writes": (known * EDGE_BYTES + nodes * (NODE_ROW + node_bytes(question))) / writing / WORKERS,
    }
    return {name: float(f"{rate:.3g}") for name, rate in rates.items()}


def constants_of(rates: Mapping[str, float]) -> Constants:
    """Return the built-in constants with these rates."""
    return replace(default_constants(), **rates)


def _question(num_edges: int) -> Question:
    return Question(
        nodes=num_edges // EDGES_PER_NODE,
        edges=num_edges,
        features=None,
        original_id_bytes=ID,
        train_share=0.0,
        executors=WORKERS,
        executor_cores=1,
        batch_size=1,
    )
