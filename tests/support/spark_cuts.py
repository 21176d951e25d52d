"""A driver that cuts graph.store in a folder on a cluster, and prints its stages as JSON; `spark_cut` starts it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.spark_builds import SparkBuilds, driver
from support.spark_cluster import SparkCluster

MEMORY = 600 << 20


@contextmanager
def spark_cut(cluster: SparkCluster, folder: Path, num_parts: int) -> Iterator[SparkBuilds]:
    """Cut graph.store into out.store, both in this folder; nothing of the driver runs afterwards."""
    words = ["support.spark_cuts", json.dumps([str(folder), num_parts, cluster.url])]
    with driver(cluster, folder, words) as started:
        yield started


def main() -> None:
    from hoploom import HoploomError
    from hoploom.partition.on_spark import SparkOptions, partition_on_spark

    folder, num_parts, master = json.loads(sys.argv[1])
    given = SparkOptions(master=master, memory=MEMORY)

    def tell(**event: object) -> None:
        print(json.dumps(event), flush=True)

    try:
        store, out = Path(folder, "graph.store"), Path(folder, "out.store")
        report = partition_on_spark(store, out, num_parts, given, progress=lambda stage: tell(stage=stage))
    except HoploomError as error:
        tell(refused=f"{type(error).__name__}: {error}")
    else:
        tell(edge_cut=report.edge_cut)


if __name__ == "__main__":
    main()
