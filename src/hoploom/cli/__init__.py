"""The `hoploom` command. A subcommand is one entry of a COMMANDS: a name, its arguments, and a function to run.

Exit codes: 0 done, 1 a check found problems or training failed, 2 the user's mistake (one line, no traceback),
130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import hoploom
from hoploom.cli import stores, training
from hoploom.cli.command import Command
from hoploom.errors import BatchError, HoploomError, PeerError, TrainError

COMMANDS = (*stores.COMMANDS, *training.COMMANDS)
FAILURES = (TrainError, PeerError, BatchError)  # what goes wrong on the way is no mistake in the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hoploom", description=hoploom.__doc__)
    parser.add_argument("--version", action="version", version=f"hoploom {hoploom.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser
