"""A driver: builds or cuts stores one after the other, and prints as JSON what happens. `spark_builds` starts it.

All of them share one Spark session, so that executors start once.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hoploom import HoploomError
from hoploom.ingest.spark import joining
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import read_graph
from hoploom.partition.on_spark import SparkOptions, partition_on_spark

Stage = Callable[[str], None]


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def build_one(progress: Stage, folder: str, options: dict[str, Any], task_bytes: int | None) -> dict[str, float]:
    if task_bytes is not None:
        joining.TASK_BYTES = task_bytes
    begin = time.monotonic()
    given = BuildOptions(**{"engine": "spark", **options})
    build(read_graph(Path(folder, "graph.toml")), Path(folder, "out.store"), given, progress=progress)
    return {"seconds": time.monotonic() - begin}


def cut_one(progress: Stage, folder: str, num_parts: int, options: dict[str, Any]) -> dict[str, float]:
    store, out = Path(folder, "graph.store"), Path(folder, "out.store")
    report = partition_on_spark(store, out, num_parts, SparkOptions(**options), progress=progress)
    return {"edge_cut": report.edge_cut}


def main() -> None:
    wanted = json.loads(sys.argv[1])
    if len(wanted) > 1:
        from pyspark.sql import SparkSession

        session = SparkSession.builder.master(wanted[0]["options"]["master"]).getOrCreate()
        session.sparkContext.setLogLevel("OFF")  # a session of the user's logs what the user wants
    for number, one in enumerate(wanted):
        act = cut_one if "num_parts" in one else build_one
        try:
            done = act(lambda stage: tell(build=number, stage=stage), **one)  # noqa: B023
        except HoploomError as error:
            done = {"refused": f"{type(error).__name__}: {error}"}
        tell(build=number, **done)


if __name__ == "__main__":
    main()
