"""The `hoploom` command. A subcommand is an entry of COMMANDS here and in its module: its arguments, and a function.

The modules with arguments do not import torch, so that help appears at once.
Exit codes: 0 done, 1 a check found problems or training failed, 2 the user's mistake (one line, no traceback),
130 interrupted, 141 the reader of a pipe was gone.
"""

import argparse
import gc
import io
import json
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import hoploom
from hoploom.cli.command import Arguments, Command, complaint, paint, say
from hoploom.config.values import nearest
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.system import keep_imports

# name -> (module, help, group): only the module of the given command is imported.
COMMANDS = {
    "init": ("training", "write a commented run.toml or graph.toml to start from", "Data"),
    "build": ("stores", "make a store from tables, as a graph.toml describes", "Data"),
    "import": ("stores", "make a store from a downloaded data set or an archive", "Data"),
    "generate": ("stores", "write a synthetic graph of any size", "Data"),
    "partition": ("stores", "partition a store for several hosts", "Data"),
    "fetch": ("stores", "bring a store, or parts of it, from an object store to this host", "Data"),
    "train": ("training", "train as a run.toml describes", "Train"),
    "evaluate": ("training", "measure a trained model on a split", "Train"),
    "infer": ("training", "write embeddings and predictions of all nodes", "Train"),
    "launch": ("clusters", "start servers and trainers on one or many hosts", "Scale out"),
    "serve": ("clusters", "serve parts of a store to other processes", "Scale out"),
    "plan": ("scaling", "estimate what a graph of some size needs on some hosts", "Scale out"),
    "bench": ("scaling", "measure the speed of loading from your store, or of this machine", "Scale out"),
    "info": ("stores", "show the node types, relations, fields and splits of a store", "Inspect and report"),
    "check": ("stores", "verify all files of a store and list damaged ones", "Inspect and report"),
    "doctor": ("reporting", "check this machine and suggest fixes", "Inspect and report"),
    "report": ("reporting", "write an HTML report about a run, or compare several runs", "Inspect and report"),
    "watch": ("reporting", "show the report of a run in the browser while it trains", "Inspect and report"),
}
PYG_SPEAKS = "ignore:`torch.jit.script` is deprecated:FutureWarning"  # on import, with torch 2.15
FAILURES = (TrainError, PeerError, BatchError)  # they are no mistakes in the command, and exit with 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    _open_streams()
    try:
        return _run(words, is_process=argv is None)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        return 141  # as other programs, which SIGPIPE ends: 0 would hide what `check` has found
    except (HoploomError, OSError) as error:
        if isinstance(error, OSError) and _output_fails():
            _drop_output()
            print(complaint(f"cannot write to standard output: {error.strerror or error}"), file=sys.stderr)
            return 1
        if isinstance(error, _UsageError):
            print(error.usage, end="", file=sys.stderr)
        return _fail(words, str(error), 1 if isinstance(error, FAILURES) else 2)
    except KeyboardInterrupt as interrupt:
        return _fail(words, f"interrupted{f'; {interrupt}' if interrupt.args else ''}", 130)


def _fail(words: Sequence[str], text: str, code: int) -> int:
    """Print the error: a line on stderr, and with --json one object on stdout, by rank 0 if there are several."""
    print(complaint(text), file=sys.stderr)
    ours = words[: words.index("--")] if "--" in words else words
    is_main = True
    with suppress(ConfigError):
        is_main = environment.read_started().rank == 0
    if "--json" in ours and is_main:
        try:
            print(json.dumps({"error": text, "exit_status": code}), flush=True)
        except OSError:
            _drop_output()
    return code


def _run(words: list[str], *, is_process: bool) -> int:
    with _import_permanently() if is_process else nullcontext():
        parser = _parser(words[0] if words else "")
    _check_command(parser, words)
    words, behind = _split(words)
    arguments = parser.parse_args(_joined(words), argparse.Namespace(behind=behind))
    command: Command = arguments.command
    if command.doing is not None and (doing := command.doing(arguments)):
        say(doing)
    if is_process:
        imports = command.imports(arguments) if callable(command.imports) else command.imports
        if imports is not None:
            import_module(imports)
    if isinstance(command.run, str):
        module, _, name = command.run.partition(":")
        run = getattr(import_module(f"hoploom.cli.{module}"), name)
    else:
        run = command.run
    if is_process and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, a command cleans up behind itself
    try:
        code: int = run(arguments)
    except ConfigError as error:
        raise ConfigError(_with_flag(str(error), arguments)) from error
    sys.stdout.flush()
    return code


def _with_flag(text: str, arguments: Arguments) -> str:
    """Replace the name of an argument, with which a message of the library begins, by that of its option."""
    for action in arguments.parser._actions:
        if action.option_strings and re.match(rf"{action.dest} (is|has) ", text):
            return text.replace(action.dest, _shown(action), 1)
    return text


@contextmanager
def _import_permanently() -> Iterator[None]:
    """Disable garbage collection and PyG's FutureWarning in this block, then freeze the imported objects.

    Collections of them take a quarter of a short command's time.
    """
    gc.disable()
    sys.warnoptions.append(PYG_SPEAKS)  # spawned ranks inherit it
    warnings.filterwarnings("ignore", PYG_SPEAKS.split(":")[1], FutureWarning)
    try:
        yield
    finally:
        keep_imports()
        gc.enable()


# --- streams -------------------------------------------------------------------------------------


def _open_streams() -> None:
    """Replace streams that the shell has closed (`>&-`) by the null device."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115  (to the end of the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: half of a pair of surrogates is no error


def _output_fails() -> bool:
    """Return whether standard output has text that it cannot write, such as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Drop text that standard output cannot write: Python would complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- mistakes in the command line ----------------------------------------------------------------


class _UsageError(ConfigError):
    """A command line that cannot be parsed; the usage is printed above the message."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Show the help if the command is missing, and a hint if it is unknown."""
    if not words:
        parser.exit(2, parser.format_help())
    if words[0] in COMMANDS or words[0] in parser._option_string_actions:
        return
    if words[0].startswith("-"):
        parser.error(f"there is no option {words[0]} before the command; options stand behind it")
    close = nearest(words[0], list(COMMANDS))
    parser.error(
        f"there is no command {words[0]!r}; {f'did you mean {close}?' if close else '`hoploom --help` lists them'}"
    )


def _unknown(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> str:
    """Return a hint for words that the command does not take."""
    first = next((word for word in unknown if word.startswith("-")), unknown[0])
    flag, _, value = first.partition("=")
    if not flag.startswith("-"):
        return f"unexpected {flag!r}; `{parser.prog} --help` shows what the command takes"
    if any("--set" in action.option_strings for action in parser._actions):
        from hoploom.train.runs.run_file import FIELDS  # imports torch

        name = flag.lstrip("-").replace("-", "_")
        keys = [key for key in FIELDS if name in (key, key.rpartition(".")[2])]
        if keys:
            behind = [*words, "-"][words.index(first) + 1]
            value = value or ("VALUE" if behind.startswith("-") else behind)
            ways = " or ".join(f"--set {key}={value}" for key in keys)
            return f"there is no option {flag}; run.toml has a key of this name: write {ways}"
    close = nearest(flag, [option for action in parser._actions for option in action.option_strings])
    way_out = f"did you mean {close}?" if close else f"`{parser.prog} --help` lists the options"
    return f"there is no option {flag}; {way_out}"


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of `launch` at --, behind which is the command to launch."""
    if words[0] != "launch":
        return words, []
    at = words.index("--") if "--" in words else len(words)
    if at == len(words) and not {"-h", "--help"} & set(words):
        raise ConfigError("there is no -- with a command behind it; write hoploom launch CLUSTER -- train run.toml")
    return words[:at], words[at + 1 :]


def _joined(words: Sequence[str]) -> list[str]:
    """Turn `--fanouts -1,5` into `--fanouts=-1,5`, as argparse takes -1 for an option, and _ in options into -."""
    joined: list[str] = []
    for given in words:
        word = re.sub(r"^--[a-z_]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), given)
        if joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and re.match(r"-[0-9]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# --- the parser ----------------------------------------------------------------------------------


ARGPARSE = (  # messages of argparse, and those of this command
    (r"argument (?:.*/)?(.+): expected .*one argument", r"\1 has no value; `{prog} --help` shows what to give"),
    (r"argument (?:.*/)?(.+): ignored explicit argument (.+)", r"\1 takes no value, but is given \2; leave that out"),
    (r"argument (.+): not allowed with argument (.+)", r"\1 and \2 exclude each other; give one of them"),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a usage, and a line with the value and a hint."""

    def __init__(self, *given: Any, **described: Any) -> None:
        columns = partial(
            argparse.HelpFormatter, max_help_position=26, width=min(shutil.get_terminal_size().columns, 100) - 2
        )
        super().__init__(*given, **{"formatter_class": columns, "allow_abbrev": False, **described})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        required = [action for action in self._actions if action.required]
        self.usage = self.usage or _usage(self)
        for action in self._actions:
            action.required = False  # or argparse says what is missing before what is mistyped
            if not action.option_strings:
                action.metavar = _shown(action)  # as in the usage and in messages
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(self, args, unknown))
        missing = [_shown(action) for action in required if getattr(found, action.dest, None) is None]
        if missing:
            is_or_are = "are" if missing[1:] else "is"
            self.error(f"{' and '.join(missing)} {is_or_are} missing; `{self.prog} --help` shows what to give")
        return found, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for an unknown choice; the message of argparse has no hint."""
        if action.choices is not None and value not in action.choices:
            raise ConfigError(f"{_shown(action)} is {value!r}; give one of {', '.join(map(str, action.choices))}")

    def error(self, message: str) -> NoReturn:
        for theirs, ours in ARGPARSE:
            message = re.sub(theirs, ours.replace("{prog}", self.prog), message)
        raise _UsageError(message, self.format_usage())


def _shown(action: argparse.Action) -> str:
    """Return the name of an option or an argument in messages."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest).upper()


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage of a command with its required arguments; its options are listed below it."""
    words = [parser.prog]
    for action in parser._actions:
        shown = str(action.metavar or action.dest).upper()
        if not action.option_strings:
            words.append(f"[{shown}]" if action.nargs == "?" else f"{shown} ..." if action.nargs == "+" else shown)
        elif action.required:
            words.append(f"{action.option_strings[0]} {shown}")
    return " ".join([*words, "[options]"])


class _Overview(_Parser):
    """The parser of the whole command, whose help lists commands in groups."""

    def format_help(self) -> str:
        lines = ["usage: hoploom COMMAND ...", "", str(hoploom.__doc__)]
        for group in dict.fromkeys(group for _, _, group in COMMANDS.values()):
            lines += ["", paint(group, "bold", sys.stdout)]
            lines += [f"  {name:<12}{text}" for name, (_, text, of_group) in COMMANDS.items() if of_group == group]
        lines += ["", "Run `hoploom COMMAND --help` to see the options of a command."]
        return "\n".join(lines) + "\n"


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = _Overview("hoploom", usage="hoploom COMMAND ...")
    parser.add_argument("--version", action="version", version=f"hoploom {hoploom.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser, prog="hoploom")
    if wanted in COMMANDS:
        module, text, _ = COMMANDS[wanted]
        subparser = subparsers.add_parser(wanted, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command: Command = import_module(f"hoploom.cli.{module}").COMMANDS[wanted]
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser
