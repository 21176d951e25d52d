"""Processes of a small cluster on this machine: graph servers, and trainers that walk over loaders when told to."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import graph
import report
from measure import Side

HERE = Path(__file__).parent
RANKS = 4  # that the seeds are dealt out to, though fewer may be there
SHAPE = graph.Shape(500_000, 60.0, 100)  # 30 M edges: the graph that GLT's figures are of


def parts_of(shape: graph.Shape, num_parts: int, tiny: bool) -> Path:
    """The graph cut into parts by hash, hottest nodes first; made once."""
    whole = graph.path_of(shape, tiny)
    folder = whole.with_name(f"{whole.stem}-parts{num_parts}.store")
    if not folder.exists():
        print(f"making {folder}; this is done once", file=sys.stderr, flush=True)
        command = ["partition", str(whole), "-o", str(folder), "--parts", str(num_parts), "--method", "hash"]
        subprocess.run([sys.executable, "-m", "hoploom", *command], check=True, stdout=sys.stderr, timeout=3600)
    return folder


def serve_command(path: Path, parts: Sequence[int], *more: str, python: Path | str = sys.executable) -> list[str]:
    """A server of these parts; of none given, of all."""
    chosen = [word for part in parts for word in ("--part", str(part))]
    return [str(python), "-m", "hoploom", "serve", str(path), *chosen, *more]


def trainer_command(python: Path | str = sys.executable, folder: Path = HERE) -> list[str]:
    """A trainer: cluster_trainer.py of this commit, or of another one."""
    return [str(python), str(folder / "cluster_trainer.py")]


@contextmanager
def serving(commands: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Servers by their commands, all started at once; their addresses."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            processes.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(processes[-1].kill)
        yield [_address(process) for process in processes]


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a server ended: {process.wait(10)}")
    return str(json.loads(line)["ready"])


class Trainers:
    """Processes that are told what to do in lines of JSON, all at once."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self.all = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
        ]

    def tell(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each gets its message; the answers, once all have answered."""
        for process, message in zip(self.all, messages, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        answers = []
        for process in self.all:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a trainer ended: {process.wait(10)}")
            answers.append(json.loads(line))
        return answers

    def tell_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self.tell([message] * len(self.all))

    def __enter__(self) -> "Trainers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def load(trainers: Trainers, name: str, **options: Any) -> int:
    """A loader in each, as of a job of four ranks, so that an epoch is short and yet many batches; how many."""
    told = {"do": "load", "name": name, "world_size": RANKS, **options}
    (answer, *_) = trainers.tell([told | {"rank": rank} for rank in range(len(trainers.all))])
    return int(answer["steps"])


def epoch(trainers: Trainers, name: str, steps: int) -> Side:
    """Milliseconds for a batch, over whole epochs: what loaders do before the first batch counts, and what they make
    ahead is used."""

    def side(number: int) -> float:
        answers = trainers.tell_all({"do": "walk", "name": name, "batches": steps})
        trainers.tell_all({"do": "rest", "name": name})
        return max(float(answer["seconds"]) for answer in answers) / steps * 1e3

    return side


def leave_shared_memory() -> None:
    """From now on this process reaches servers over TCP, as if they were on other hosts."""
    with suppress(ImportError):
        from hoploom.serve import handshake

        handshake.can_share = lambda: False


def serve_commands(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A trainer's side: answers lines until its input ends. Whatever else it prints goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    report.use_two_cores()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)
