"""A build on Spark where Java, the master or Hoploom on the executors is missing: one line says what, and the way out.

That way is taken, too: an environment that is packed, shipped and used.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.ports import free_ports
from support.spark_cluster import SparkCluster, spark_cluster
from support.stores import contents
from support.tables import IDS, NODES, build_here, write_graph

import hoploom
from hoploom import _core

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PACKAGE = Path(hoploom.__file__).parent
INSTALLED = Path(sysconfig.get_paths()["purelib"])


def without_hoploom(folder: Path) -> Path:
    """A python that imports all that this one does but Hoploom."""
    site = _new(folder)
    for entry in INSTALLED.iterdir():
        if "hoploom" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def with_version(folder: Path, version: str) -> Path:
    """A python with a Hoploom that says that it is of this version."""
    python = without_hoploom(folder)
    other = _site(folder) / "hoploom"
    other.mkdir()
    for entry in PACKAGE.iterdir():
        (other / entry.name).symlink_to(entry)
    text = (PACKAGE / "__init__.py").read_text()
    (other / "__init__.py").unlink()
    _add_core(other)
    (other / "__init__.py").write_text(text.replace(f'"{hoploom.__version__}"', f'"{version}"'))
    return python


def complete(folder: Path) -> Path:
    """An environment of files of its own, as `pip install 'hoploom[tables]'` makes it: no link leads out of it."""
    site = _new(folder)
    shutil.copytree(PACKAGE, site / "hoploom", ignore=shutil.ignore_patterns("__pycache__"))
    _add_core(site / "hoploom")
    for name in set(_needed("hoploom", "tables")) - {"hoploom"}:
        for file in metadata.distribution(name).files or ():
            given, target = Path(str(file.locate())), site / file
            if ".." not in file.parts and given.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(given, target)
    return folder


def _needed(name: str, extra: str = "") -> Iterator[str]:
    """A distribution and those that it needs, each by its name; some come several times."""
    waiting, seen = [(name, extra)], set()
    while waiting:
        wanted = waiting.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        yield wanted[0]
        for text in metadata.requires(wanted[0]) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": wanted[1]}):
                waiting += [(needed.name, extra) for extra in ("", *needed.extras)]


def _add_core(package: Path) -> None:
    """Where an editable install has the compiled core in a folder of its own."""
    core = Path(_core.__file__)
    if not (package / core.name).exists():
        shutil.copyfile(core, package / core.name)


def _link(given: Path, target: Path) -> None:
    try:
        os.link(given, target)
    except OSError:  # of another disk, or there already
        if not target.exists():
            shutil.copyfile(given, target)


def _new(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return _site(folder)


def _site(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """Its executors see nothing of this environment but what they are given."""
    with spark_cluster(tmp_path_factory.mktemp("spark"), {"PYTHONPATH": ""}) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "graph"
    folder.mkdir()
    write_graph(folder, IDS["text"])
    (folder / "graph.toml").write_text(NODES)
    return folder


def build(folder: Path, master: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hoploom", "build", "graph.toml", "-o", "out.store", "--engine", "spark"]
    command += ["--master", master, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def refused(folder: Path, master: str, *words: str, **environment: str) -> str:
    """The one line that it prints beside those of a Spark that starts; nothing is left."""
    done = build(folder, master, *words, **environment)
    assert done.returncode == 2, done.stderr
    assert {path.suffix for path in folder.iterdir()} == {".parquet", ".toml"}
    assert "Traceback" not in done.stderr
    assert "\tat " not in done.stderr
    assert "FutureWarning" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hoploom:")]
    assert done.stderr.endswith(f"{line}\n")
    return line


def test_java_is_missing_or_too_old(cluster: SparkCluster, folder: Path, tmp_path: Path) -> None:
    said = refused(folder, "local[2]", **cluster.environment | {"JAVA_HOME": "/nowhere"})
    assert "Spark needs Java, which does not start (/nowhere/bin/java: not found); install Java 17 or later" in said
    (tmp_path / "bin").mkdir()
    old = tmp_path / "bin" / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    old.chmod(0o755)
    said = refused(folder, cluster.url, **cluster.environment | {"JAVA_HOME": str(tmp_path)})
    assert 'Spark needs Java 17 or later, and finds version "1.8.0_392"; install Java 17 or later' in said


def test_a_master_that_does_not_answer(cluster: SparkCluster, folder: Path) -> None:
    begin, (port,) = time.monotonic(), free_ports(1)
    said = refused(folder, f"spark://127.0.0.1:{port}", **cluster.environment)
    assert f"no Spark master answers at spark://127.0.0.1:{port} (Connection refused); start it" in said
    assert time.monotonic() - begin < 30


def test_executors_without_hoploom_or_with_another_one(cluster: SparkCluster, folder: Path, tmp_path: Path) -> None:
    for python, words in (
        (without_hoploom(tmp_path / "bare"), "the Python of Spark's executors has no hoploom"),
        (with_version(tmp_path / "other", "9.9.9"), "executors have Hoploom 9.9.9, but you run Hoploom"),
        (tmp_path / "no python", f"Spark's executors have no Python at {tmp_path / 'no python'}"),
    ):
        said = refused(folder, cluster.url, **cluster.environment | {"PYSPARK_PYTHON": str(python)})
        assert words in said
        assert words != "the Python of Spark's executors has no hoploom" or "spark.archives=" in said


def test_an_environment_that_is_shipped(cluster: SparkCluster, folder: Path, tmp_path: Path) -> None:
    venv_pack = pytest.importorskip("venv_pack")
    packed = tmp_path / "environment.tar.gz"
    prefix = str(complete(tmp_path / "environment"))
    venv_pack.pack(prefix=prefix, output=str(packed), format="tar.gz", compress_level=1)
    conf = [f"spark.archives={packed}#environment", "spark.pyspark.python=./environment/bin/python"]
    done = build(folder, cluster.url, *(word for each in conf for word in ("--conf", each)), **cluster.environment)
    assert done.returncode == 0, done.stderr
    assert len(list(cluster.folder.glob("work-*/*/*/environment/lib/*/site-packages/hoploom/__init__.py"))) == 2
    build_here(folder, NODES, "duckdb.store")
    assert contents(folder / "out.store") == contents(folder / "duckdb.store")
