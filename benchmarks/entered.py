"""How many files of the library do five common ways enter? A file counts once one of its functions is called.

    python benchmarks/entered.py [--files]

Counts the calling process alone, so what ranks and servers do is not in it. The first way ends at the first step.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import FrameType

import torch

import hoploom
from hoploom import cli

ROOT = Path(hoploom.__file__).parent
CLUSTER = """
store = "graph.parts"
hosts.one = { address = "127.0.0.1", parts = [0] }
hosts.two = { address = "127.0.0.1", parts = [1] }
"""


class Reached(BaseException):
    """The end of a way."""


class Entered:
    """The files whose functions are called while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & CO_NEWLOCALS and code.co_filename.startswith(str(ROOT)):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def command(*words: str) -> None:
    """`hoploom ...`, without what it prints."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = cli.main(list(words))
    if code:
        sys.exit(f"hoploom {' '.join(words)} ended with {code}:\n{said.getvalue()}")


def first_step() -> None:
    """`hoploom train`, up to its first optimizer step."""

    def step(*arguments: object, **more: object) -> None:
        raise Reached

    own = torch.optim.Adam.step
    torch.optim.Adam.step = step  # type: ignore[method-assign, assignment]
    try:
        command("train", "run.toml")
    except Reached:
        pass
    finally:
        torch.optim.Adam.step = own  # type: ignore[method-assign]


def one_batch() -> Callable[[], object]:
    """The first batch of a loader that stands ready."""
    store = hoploom.open("graph.store")
    loader = hoploom.NeighborLoader(store, [10, 5], "train", batch_size=64, num_workers=2)
    return lambda: next(iter(loader))


@contextmanager
def worker_mode() -> Iterator[Callable[[], object]]:
    """The first batch of a loader whose other part a server holds."""
    words = [sys.executable, "-m", "hoploom", "serve", "graph.parts", "--part", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["ready"]
            with hoploom.connect(address, "graph.parts", parts=[0]) as store:
                loader = hoploom.NeighborLoader(store, [10, 5], "train", batch_size=64, num_workers=2)
                yield lambda: next(iter(loader))
        finally:
            server.terminate()


def prepare() -> None:
    """A store, the same in parts, and files that people write."""
    command("generate", "graph.store", "--nodes", "2000", "--degree", "10", "--features", "16", "--classes", "4")
    command("init", "run.toml", "--store", "graph.store")
    Path("tables").mkdir()
    people = [f"person-{number}" for number in range(500)]
    Path("tables/people.csv").write_text("id,age\n" + "".join(f"{one},{20 + n % 60}\n" for n, one in enumerate(people)))
    knows = [(people[n % 500], people[n * 7 % 500]) for n in range(2000)]
    Path("tables/knows.csv").write_text("source,target\n" + "".join(f"{one},{other}\n" for one, other in knows))
    command("init", "graph.toml", "--tables", "tables")
    command("partition", "graph.store", "-o", "graph.parts", "--parts", "2")
    Path("cluster.toml").write_text(CLUSTER)
    Path("script.py").write_text("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="name them")
    with_names = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare()
        ways: dict[str, Callable[[], object]] = {
            "run.toml to the first step": first_step,
            "tables to a store": lambda: command("build", "graph.toml", "-o", "people.store", "--memory", "4GB"),
            "cluster file to processes": lambda: command("launch", "cluster.toml", "--", "script.py"),
            "one batch": one_batch(),
        }
        with worker_mode() as ways["one batch in worker mode"]:
            for name, way in ways.items():
                entered = Entered()
                with entered.on():
                    way()
                print(
                    f"{name}: {len(entered.files)} files", *(sorted(entered.files) if with_names else ()), sep="\n    "
                )


if __name__ == "__main__":
    main()
