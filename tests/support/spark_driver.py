"""A driver: builds stores one after the other, and prints as JSON what happens. `SparkBuilds` starts it.

All builds share one Spark session, so that executors start once.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from hoploom import HoploomError
from hoploom.ingest.spark import joining
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import read_graph


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def build_one(number: int, folder: Path, options: dict[str, Any], task_bytes: int | None) -> None:
    if task_bytes is not None:
        joining.TASK_BYTES = task_bytes
    begin = time.monotonic()
    options = {"engine": "spark", **options}
    try:
        build(
            read_graph(folder / "graph.toml"),
            folder / "out.store",
            BuildOptions(**options),
            progress=lambda stage: tell(build=number, stage=stage),
        )
    except HoploomError as error:
        tell(build=number, refused=f"{type(error).__name__}: {error}")
    else:
        tell(build=number, seconds=time.monotonic() - begin)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    if len(wanted) > 1:
        from pyspark.sql import SparkSession

        session = SparkSession.builder.master(wanted[0]["options"]["master"]).getOrCreate()
        session.sparkContext.setLogLevel("OFF")  # a session of the user's logs what the user wants
    for number, one in enumerate(wanted):
        build_one(number, Path(one["folder"]), one["options"], one["task_bytes"])


if __name__ == "__main__":
    main()
