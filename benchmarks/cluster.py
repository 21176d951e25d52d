"""Processes of a small cluster on this machine: graph servers, and trainers that walk over loaders when told to."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import graph
import report

DEADLINE = 600.0  # seconds for one repetition
SHAPE = graph.Shape(500_000, 60.0, 100)  # 30 M edges: the graph that GLT's figures are of
GLT = (
    "GLT on this graph, two cores, measured before and not in this run, ms per batch and rank: 306 to 356 collocated, "
    "900 to 970 with sampler processes, 555 server-client"
)


def parts_of(shape: graph.Shape, num_parts: int, tiny: bool) -> Path:
    """The graph cut into parts by hash, hottest nodes first; made once."""
    whole = graph.path_of(shape, tiny)
    folder = whole.with_name(f"{whole.stem}-parts{num_parts}.store")
    if not folder.exists():
        print(f"making {folder}; this is done once", file=sys.stderr, flush=True)
        command = ["partition", str(whole), "-o", str(folder), "--parts", str(num_parts), "--method", "hash"]
        subprocess.run([sys.executable, "-m", "hoploom", *command], check=True, stdout=sys.stderr, timeout=3600)
    return folder


@contextmanager
def serving(path: Path, parts: Sequence[Sequence[int]], *more: str) -> Iterator[list[str]]:
    """Servers for these lists of parts; their addresses."""
    with ExitStack() as stack:
        lines = []
        for own in parts:
            chosen = [word for part in own for word in ("--part", str(part))]
            command = [sys.executable, "-m", "hoploom", "serve", str(path), *chosen, *more]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        yield [str(json.loads(line)["ready"]) for line in lines]


class Trainers:
    """Processes of one script each, told what to do in lines of JSON, all at once."""

    def __init__(self, script: Path, count: int) -> None:
        command = [sys.executable, str(script)]
        self._all = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]

    def tell(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each gets its message; the answers, once all have answered."""
        for process, message in zip(self._all, messages, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._all:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a trainer ended: {process.wait(10)}")
            answers.append(json.loads(line))
        return answers

    def tell_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self.tell([message] * len(self._all))

    def __enter__(self) -> "Trainers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.kill()
            process.wait()


def serve_commands(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A trainer's side: answers lines until its input ends. Whatever else it prints goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    report.use_two_cores()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)
