"""The `hoploom` command. A subcommand is an entry of COMMANDS here and of its module: its arguments, and a function.

Exit codes: 0 done, 1 a check found problems or training failed, 2 the user's mistake (one line, no traceback),
130 interrupted.
"""

import argparse
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module

import hoploom
from hoploom.cli.command import Command
from hoploom.config.values import nearest
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, TrainError

# name -> (the module that has it, what it does): only the module of the command that runs is imported.
COMMANDS = {
    "build": ("stores", "make a store from tables, as a graph.toml describes"),
    "import": ("stores", "make a store from a downloaded data set or an archive"),
    "partition": ("stores", "cut a store into parts for a cluster"),
    "generate": ("stores", "write a synthetic graph of any size"),
    "info": ("stores", "show what a store holds"),
    "check": ("stores", "read every byte of a store and name what is damaged"),
    "init": ("training", "write a commented run.toml or graph.toml to start from"),
    "train": ("training", "train as a run.toml describes"),
    "serve": ("serving", "serve parts of a store to other processes"),
    "certs": ("certs", "make a test CA and certificates for servers and clients"),
    "launch": ("launching", "start servers and trainers on one or many hosts"),
    "report": ("reporting", "write a page about one run, or several compared"),
    "watch": ("reporting", "show that page live while runs go on"),
    "plan": ("scaling", "work out what a graph of some size takes on some hosts"),
    "bench": ("scaling", "measure batches of a store, or what plan reckons with"),
}
FAILURES = (TrainError, PeerError, BatchError)  # what goes wrong on the way is no mistake in the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    with _for_good() if argv is None else nullcontext():  # without words of its caller this process is ours
        parser = _parser(words[0] if words else "")
    _check_command(parser, words)
    try:
        words, behind = _split(words)
        arguments = parser.parse_args(_joined(words), argparse.Namespace(behind=behind))
        command: Command = arguments.command
        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HoploomError, OSError) as error:
        print(f"hoploom: {error}", file=sys.stderr)
        return 1 if isinstance(error, FAILURES) else 2
    except KeyboardInterrupt as interrupt:
        print(f"hoploom: interrupted{f'; {interrupt}' if interrupt.args else ''}", file=sys.stderr)
        return 130


@contextmanager
def _for_good() -> Iterator[None]:
    """What is imported here stays to the end, so no collection looks at it: a quarter of a short command's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Say what there is instead of a command that is missing or unknown."""
    listed = f"there are {', '.join(COMMANDS)}; `hoploom --help` describes them"
    if not words:
        parser.error(f"give a command; {listed}")
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        close = nearest(words[0], list(COMMANDS))
        parser.error(f"there is no command {words[0]!r}; {f'did you mean {close}?' if close else listed}")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind the -- of `launch`, which has a command behind it."""
    if words[0] != "launch":
        return words, []
    at = words.index("--") if "--" in words else len(words)
    if at == len(words) and not {"-h", "--help"} & set(words):
        raise ConfigError("there is no -- with a command behind it; write hoploom launch CLUSTER -- train run.toml")
    return words[:at], words[at + 1 :]


def _joined(words: Sequence[str]) -> list[str]:
    """`--fanouts -1,5` as `--fanouts=-1,5`: by itself argparse takes the -1 for an option."""
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and re.match(r"-[0-9]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hoploom", description=hoploom.__doc__)
    parser.add_argument("--version", action="version", version=f"hoploom {hoploom.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == wanted:
            command: Command = import_module(f"hoploom.cli.{module}").COMMANDS[name]
            command.add_arguments(subparser)
            subparser.set_defaults(command=command)
    return parser
