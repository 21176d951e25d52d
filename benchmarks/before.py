"""The last commit that spoke Arrow Flight, in a folder of its own, so that it is measured in the same run as this one.

Made once, with a core of its own: beside the graphs. It needs git, a compiler and pyarrow; without them it is absent.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import cluster
import graph
from report import ROOT

COMMIT = "63c9d6b"
NAME = f"Flight, {COMMIT}"
DEADLINE = 1800.0  # seconds to build the core


def found() -> Path | None:
    """Its Python, which imports that hoploom; None where it cannot be made."""
    python = folder() / ".venv" / "bin" / "python"
    try:
        if not (folder() / "made").exists():
            print(f"making {folder()}; this is done once", file=sys.stderr, flush=True)
            _make(python)
        _run([str(python), "-c", "import hoploom, pyarrow.flight"])
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{NAME} is absent: {error}", file=sys.stderr)
        return None
    return python


def folder() -> Path:
    """Its files, benchmarks/ among them."""
    return graph.folder() / f"hoploom-{COMMIT}"


def trainer_command(python: Path) -> list[str]:
    """Its own trainer: the names that it uses may be others by now."""
    return cluster.trainer_command(python, folder() / "benchmarks")


def _make(python: Path) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    packed = _run(["git", "archive", COMMIT], cwd=ROOT)
    subprocess.run(["tar", "--extract", "--directory", str(folder())], input=packed, check=True, timeout=DEADLINE)
    _run([sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent)])
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # whose own .pth files do not count
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(packages)]
    _run([sys.executable, "-m", "pip", "install", "--quiet", *options, str(folder())])
    (folder() / "made").touch()


def _run(command: list[str], cwd: Path | None = None) -> bytes:
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, check=True, timeout=DEADLINE).stdout
