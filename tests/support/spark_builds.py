"""`hoploom build` on a standalone cluster, as a process that tests watch and disturb; and graphs that keep it busy."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hoploom.deploy.guard import descendants
from support.spark_cluster import Executor, SparkCluster
from support.stores import contents
from support.tables import build_here, write_table
from support.until import until

GRAPH = """
[nodes.node]
files = "nodes*.parquet"
id = "id"
features = ["a", "b"]
label = "y"
time = "at"
split = "fold"
[edges."node to node"]
files = "edges*.parquet"
source = "src"
destination = "dst"
weight = "w"
features = ["kind"]
"""
FOLDS = np.array(["train", "val", "test"])


def write_large(folder: Path, num_nodes: int, num_edges: int, files: int = 4, width: int = 1) -> None:
    """A graph of integers with gaps as ids; every value is arithmetic on its row. `width`: features of an edge."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = np.arange(num_nodes)
    ids = nodes * 7919 % (1 << 40) - 10**6
    columns = {"id": ids, "a": nodes / 2, "b": nodes % 11, "y": nodes % 7, "at": nodes * 1000, "fold": FOLDS[nodes % 3]}
    write_table(folder / "nodes.parquet", columns, files=files, row_groups=1 << 16)
    for number in range(files):
        edges = np.arange(num_edges * number // files, num_edges * (number + 1) // files)
        kinds = (edges[:, None] % 5 + np.arange(width)).astype(np.float32).reshape(-1)
        columns = {
            "src": ids[edges * 31 % num_nodes],
            "dst": ids[(edges * 17 + edges // num_nodes) % num_nodes],
            "w": edges % 13 + 1.0,
            "kind": pa.FixedSizeListArray.from_arrays(pa.array(kinds), width),
        }
        write_table(folder / f"edges-{number}.parquet", columns, row_groups=1 << 16)
    (folder / "graph.toml").write_text(GRAPH)


def by_duckdb(folder: Path, **options: Any) -> dict[str, bytes]:
    """The bytes of the store that DuckDB makes of the tables in a folder."""
    build_here(folder, (folder / "graph.toml").read_text(), "duckdb.store", **options)
    return contents(folder / "duckdb.store")


@dataclass
class SparkBuilds:
    process: subprocess.Popen[bytes]
    said: Path  # its events, a line each
    errors: Path  # its stderr

    @property
    def events(self) -> list[dict[str, Any]]:
        whole, _, _ = self.said.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def stages(self) -> list[str]:
        return [event["stage"] for event in self.events if "stage" in event]

    def until(self, moment: Callable[[], bool]) -> None:
        """Wait until it has come so far; it goes on meanwhile."""
        deadline = time.monotonic() + 300
        while not moment():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.stages
            time.sleep(0.002)

    def finish(self, seconds: float = 400.0) -> list[dict[str, Any]]:
        """Wait for its end; what became of each build: its seconds, or how it was refused."""
        code = self.process.wait(seconds)
        assert code == 0, f"{self.stages}, {self.errors.read_text()}"
        return [event for event in self.events if "stage" not in event]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def unfinished(folder: Path) -> list[str]:
    """Files of the store that is being written in a folder."""
    staging = folder.glob(".out.store.partial-*")
    return [os.path.join(root, name) for path in staging for root, _, names in os.walk(path) for name in names]


def busy_executor(cluster: SparkCluster, *, python: bool = False) -> Executor:
    """An executor that has begun a task and not ended it; `python`: one of its Python processes is at it."""
    found: list[Executor] = []

    def busy() -> bool:
        found[:] = [each for each in cluster.executors if each.running and (each.tasks or not python)]
        return bool(found)

    until(busy, "a task on an executor", 200)
    return found[0]


@contextmanager
def spark_builds(
    cluster: SparkCluster,
    folders: Sequence[Path],
    environment: dict[str, str] | None = None,
    *,
    task_bytes: int | None = None,
    **options: Any,
) -> Iterator[SparkBuilds]:
    """A driver that builds out.store from graph.toml in each of the folders; nothing of it runs afterwards.

    `task_bytes`: of files, that a task joins.
    """
    more = {"options": {"master": cluster.url, **options}, "task_bytes": task_bytes}
    with _driver(cluster, [{"folder": str(folder), **more} for folder in folders], environment) as builds:
        yield builds


@contextmanager
def spark_cut(cluster: SparkCluster, folder: Path, num_parts: int) -> Iterator[SparkBuilds]:
    """A driver that cuts graph.store into out.store, both in this folder; nothing of it runs afterwards."""
    options = {"master": cluster.url, "memory": 600 << 20}
    with _driver(cluster, [{"folder": str(folder), "num_parts": num_parts, "options": options}]) as cutting:
        yield cutting


@contextmanager
def _driver(
    cluster: SparkCluster, wanted: list[dict[str, Any]], environment: dict[str, str] | None = None
) -> Iterator[SparkBuilds]:
    said, errors = (Path(f"{wanted[0]['folder']}.driver.{kind}") for kind in ("out", "err"))
    with said.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.spark_driver", json.dumps(wanted)],
            env={**cluster.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        yield SparkBuilds(process, said, errors)
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait(10)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
