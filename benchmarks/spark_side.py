"""A driver of its own for benchmarks: builds a store, or has Spark do only its joins and one shuffle of the same rows.

    spark_side.py build|joins ASKED   (JSON: folder, out, options; prints the seconds of its stages, as JSON)

`joins` numbers the nodes as the build does, keeps that map, joins it to both ends of every edge, and has the joined
rows moved to as many ranges of destinations as the build makes; they are written nowhere.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import read_graph


def build_store(folder: Path, out: Path, given: Mapping[str, Any]) -> dict[str, float]:
    return build(read_graph(folder / "graph.toml"), out, BuildOptions(**given)).seconds


def only_join(folder: Path, out: Path, given: Mapping[str, Any]) -> dict[str, float]:
    from hoploom.ingest.spark.frames import ranges_for, set_join_tasks
    from hoploom.ingest.spark.session import spark_session
    from hoploom.ingest.tables.ids import number_nodes
    from hoploom.ingest.tables.sources import read_sources
    from hoploom.ingest.tables.spark_engine import SparkEngine

    graph, options = read_graph(folder / "graph.toml"), BuildOptions(**given)
    (nodes,), (edges,) = graph.nodes.values(), graph.edges.values()
    seconds, last = {}, time.monotonic()

    def ended(stage: str) -> None:
        nonlocal last
        seconds[stage], last = time.monotonic() - last, time.monotonic()

    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        sources = read_sources(graph, Path(name))
        with (
            spark_session(Path(name), options.memory, options.master, options.conf) as session,
            closing(SparkEngine(session)) as engine,
        ):
            ended("starting Spark")
            set_join_tasks(session, max(source.num_rows for source in sources.values()))
            numbering = number_nodes(engine, nodes, sources[nodes.owner], options.parts)
            known = engine.frame(numbering.pairs)  # kept; counting what comes twice has made it
            ended("numbering the nodes")
            joined, num_rows = engine.frame(engine.read(sources[edges.owner].paths)), sources[edges.owner].num_rows
            for end in ("source", "destination"):
                map_of_end = known.withColumnsRenamed({"id": f"{end}_id", "node": f"{end}_node"}).drop("again")
                joined = joined.join(map_of_end, joined[end] == map_of_end[f"{end}_id"], "left").drop(f"{end}_id")
            joined = joined.select("source_node", "destination_node")
            tasks = session.sparkContext.defaultParallelism
            ranges = ranges_for(numbering.num_nodes, num_rows, 16, options.memory, tasks)
            moved = joined.repartition(ranges.count, ranges.number_of("destination_node"))
            moved.write.format("noop").mode("overwrite").save()
            ended("joins and shuffle")
    return seconds


SIDES = {"build": build_store, "joins": only_join}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[2])
    print(json.dumps(SIDES[sys.argv[1]](Path(asked["folder"]), Path(asked["out"]), asked["options"])))


if __name__ == "__main__":
    main()
