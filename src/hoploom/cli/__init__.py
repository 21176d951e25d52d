"""The `hoploom` command. COMMANDS names a module for each subcommand; COMMANDS in that module has its functions.

The modules that define arguments do not import torch, so that help appears at once.
Exit codes: 0 done, 1 a check found problems or training failed, 2 the user's mistake (one line, no traceback),
130 interrupted, 141 the reader of a pipe has closed it.
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
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import hoploom
from hoploom.config.values import as_number, nearest, parse_count, parse_fanouts, parse_number, printable, split_address
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, TrainError
from hoploom.ranks import environment
from hoploom.system import keep_imports

if TYPE_CHECKING:
    from hoploom.schema import Schema  # brings torch, which many commands do without

Arguments = argparse.Namespace
NONE = "none"
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32}
Read = Callable[[str, str], Any]  # (flag, text) -> value; ConfigError names the flag
# name -> (module, help, group): only the module of the given command is imported.
COMMANDS = {
    "init": ("training", "write a commented run.toml or graph.toml to start from", "Data"),
    "build": ("stores", "make a store from tables, as a graph.toml describes", "Data"),
    "import": ("stores", "make a store from a downloaded data set", "Data"),
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
    "report": ("training", "write an HTML report about a run, or compare several runs", "Inspect and report"),
    "watch": ("training", "show the report of a run in the browser while it trains", "Inspect and report"),
}
PYG_SPEAKS = "ignore:`torch.jit.script` is deprecated:FutureWarning"  # on import, with torch 2.15
FAILURES = (TrainError, PeerError, BatchError)  # these are not mistakes in the command, so they exit with 1


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
    """Print an error on stderr, and return `code`. With --json, rank 0 also prints one object on stdout."""
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
    parser = _Overview("hoploom", usage="hoploom COMMAND ...")
    parser.add_argument("--version", action="version", version=f"hoploom {hoploom.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser, prog="hoploom")
    with _import_permanently() if is_process else nullcontext():
        if words and words[0] in COMMANDS:
            module, text, _ = COMMANDS[words[0]]
            subparser = subparsers.add_parser(words[0], help=text, description=f"{text[0].upper()}{text[1:]}.")
            command: Command = import_module(f"hoploom.cli.{module}").COMMANDS[words[0]]
            command.add_arguments(subparser)
            subparser.set_defaults(parser=subparser)
    _check_command(parser, words)
    words, behind = _split(words)
    arguments = parser.parse_args(_joined(words), argparse.Namespace(behind=behind))
    if command.doing is not None and (doing := command.doing(arguments)):
        say(doing)
    if is_process:
        imports = command.imports(arguments) if callable(command.imports) else command.imports
        if imports is not None:
            import_module(imports)
    if is_process and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, a command cleans up behind itself
    try:
        code = command.run(arguments)
    except ConfigError as error:
        text = str(error)  # may begin with the name of an argument; users know the option instead
        for action in arguments.parser._actions:
            if action.option_strings and re.match(rf"{action.dest} (is|has) ", text):
                text = text.replace(action.dest, _shown(action), 1)
        raise ConfigError(text) from error
    sys.stdout.flush()
    return code


@contextmanager
def _import_permanently() -> Iterator[None]:
    """Disable garbage collection and PyG's FutureWarning; later collections skip what was imported, to save time."""
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
    """Replace standard streams that the shell has closed (`>&-`) by the null device."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115  (to the end of the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: a lone surrogate is no error


def _output_fails() -> bool:
    """Return whether writing to standard output fails, for example because the disk is full."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Discard the text that standard output could not write. Otherwise, Python would report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- mistakes in the command line ----------------------------------------------------------------


class _UsageError(ConfigError):
    """A command line that cannot be parsed; the usage is printed above the message."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Show the help and exit if the command is missing; report an unknown command with a hint."""
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
    """Return the error message, with a hint, for words that the command does not take."""
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
    """Return the words of `launch` before -- and after it; for any other command, all words and an empty list."""
    if words[0] != "launch":
        return words, []
    at = words.index("--") if "--" in words else len(words)
    if at == len(words) and not {"-h", "--help"} & set(words):
        raise ConfigError("there is no -- with a command behind it; write hoploom launch CLUSTER -- train run.toml")
    return words[:at], words[at + 1 :]


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words as argparse needs them: `--fanouts -1,5` is `--fanouts=-1,5`, and _ in options becomes -."""
    joined: list[str] = []
    for given in words:
        word = re.sub(r"^--[a-z_]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), given)
        if joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and re.match(r"-[0-9]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# --- the parser ----------------------------------------------------------------------------------


ARGPARSE = (  # messages of argparse, and the messages that replace them
    (r"argument (?:.*/)?(.+): expected .*one argument", r"\1 has no value; `{prog} --help` shows what to give"),
    (r"argument (?:.*/)?(.+): ignored explicit argument (.+)", r"\1 takes no value, but is given \2; leave that out"),
    (r"argument (.+): not allowed with argument (.+)", r"\1 and \2 exclude each other; give one of them"),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages show the usage, then a line with the wrong value and a hint."""

    def __init__(self, *given: Any, **described: Any) -> None:
        columns = partial(
            argparse.HelpFormatter, max_help_position=26, width=min(shutil.get_terminal_size().columns, 100) - 2
        )
        super().__init__(*given, **{"formatter_class": columns, "allow_abbrev": False, **described})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        required = [action for action in self._actions if action.required]
        self.usage = self.usage or _usage(self)
        for action in self._actions:
            action.required = False  # or argparse reports missing words before mistyped ones
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
        """Raise ConfigError with a hint for an unknown choice; the message of argparse has no hint."""
        if action.choices is not None and value not in action.choices:
            raise ConfigError(f"{_shown(action)} is {value!r}; give one of {', '.join(map(str, action.choices))}")

    def error(self, message: str) -> NoReturn:
        for theirs, ours in ARGPARSE:
            message = re.sub(theirs, ours.replace("{prog}", self.prog), message)
        raise _UsageError(message, self.format_usage())


def _shown(action: argparse.Action) -> str:
    """Return the name under which messages show an option or an argument: --out, STORE."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest).upper()


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage line of a command, with its required arguments; the help lists options below this line."""
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


# --- for the commands' modules ---------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A subcommand: the function that adds its arguments, the function that runs it, and what comes before the run."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int]
    doing: Callable[[Arguments], str] | None = None  # the line to show before a slow import
    # A module to import before any file is open: during the import, Ctrl-C ends the process at once.
    imports: Callable[[Arguments], str | None] | str | None = None


class _Reading(argparse.Action):
    """An argparse action that converts text with `read`; argparse's `type` would hide the message of a ConfigError."""

    def __init__(self, *, read: Read, appends: bool = False, **described: Any) -> None:
        super().__init__(**described)
        self._read, self._appends = read, appends

    def __call__(self, parser: object, found: Arguments, text: Any, flag: str | None = None) -> None:
        value = self._read(self.option_strings[0], text)
        setattr(found, self.dest, [*(getattr(found, self.dest) or ()), value] if self._appends else value)


def add_option(
    parser: argparse.ArgumentParser, flag: str, read: Read, *, default: str | None = None, **described: Any
) -> None:
    """Add an option to `parser`. `read(flag, text)` checks and converts the text that a user gives, or `default`."""
    value = default if default in (None, argparse.SUPPRESS) else read(flag, str(default))
    parser.add_argument(flag, action=_Reading, read=read, default=value, **described)


def read_positive(flag: str, text: str) -> int:
    """Return the count, at least 1, in a text such as 3, 10k, 1.5M or 1e6; raise ConfigError for other text."""
    return parse_count(flag, text, 1)


def read_up_to(most: int) -> Read:
    """Return a function for `add_option` that reads a count from 1 to `most`."""

    def read(flag: str, text: str) -> int:
        with suppress(ConfigError):
            if (count := parse_count(flag, text, 1)) <= most:
                return count
        raise ConfigError(f"{flag} is {text!r:.80}; give a whole number from 1 to {most}")

    return read


def read_seconds(flag: str, text: str) -> float:
    """Return the number of seconds in a text; raise ConfigError unless it is a number of 0 or more."""
    return as_number(flag, parse_number(flag, text), "give a number of seconds, 0 or more")


def read_address(flag: str, text: str) -> str:
    """Return the text of an address; raise ConfigError unless it has the form HOST:PORT."""
    with suppress(ConfigError):
        split_address(text)
        return text
    raise ConfigError(f"{flag} is {text!r:.100}; give HOST:PORT, e.g. 127.0.0.1:7000")


def fanouts_or_none(flag: str, text: str) -> list[int] | None:
    """Return the fanouts in a text such as 15,10,5; None for the text "none", with which nothing is sampled."""
    return None if text == NONE else list(parse_fanouts(flag, text))


def seeds_of(schema: "Schema", text: str | None) -> str | tuple[str, str] | None:
    """Return the loader's `input_nodes` for SPLIT, TYPE:SPLIT or "none"; by default the only `train`, else None."""
    if text == NONE:
        return None
    known = {
        f"{t.name}:{split}": (t.name, split) for t in schema.node_types for split, count in t.splits.items() if count
    }
    found = [pair for name, pair in known.items() if (text or "train") in (name, pair[1])]
    if len(found) == 1:
        return found[0][1] if schema.homogeneous else found[0]
    if text is None:
        return None
    if found:
        types = " and ".join(node_type for node_type, _ in found)
        raise ConfigError(f"--seeds is {text!r}, a split of {types}; give one, e.g. {found[0][0]}:{text}")
    close = nearest(text, [*known, *(split for _, split in known.values())])
    hint = f"did you mean {close}?" if close else f"give one of {', '.join(known)}, or none" if known else "give none"
    raise ConfigError(f"--seeds is {text!r}, but there is no such split with members; {hint}")


def check_writable(flag: str, path: Path | None, *suffixes: str) -> None:
    """Raise ConfigError, before long work, if a file cannot be written or does not end in one of `suffixes`."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        file = path / f"{flag[2:]}{suffixes[0] if suffixes else '.out'}"
        raise ConfigError(f"{flag} is {path}, which is a directory; give a file, e.g. {file}")
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}, but there is no folder {path.parent}; make it first")
    held = path if path.exists() else folder
    if not (os.access(held, os.W_OK) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"{flag} is {path}, but {held} may not be written; give another path, or change its mode")
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} is {path}; give a file that ends in {' or '.join(suffixes)}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json, with which a command prints one JSON object for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object; text for people goes to stderr")


def for_people(arguments: Arguments) -> TextIO:
    """Return the stream for text that people read: stdout, or stderr if --json is given."""
    return sys.stderr if arguments.json else sys.stdout


def say(text: str) -> None:
    """Print a line about what the command is doing, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(paint(text, "dim", sys.stderr), file=sys.stderr, flush=True)


def complaint(text: str) -> str:
    """Return an error message for stderr. On a narrow terminal, lines are broken at semicolons first."""
    lines, width = ["hoploom:"], shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
    for part in re.split(r"(?<=;) ", printable(text, "\n")):
        fits = len(lines[-1]) + 1 + len(part) <= width
        lines = [*lines[:-1], f"{lines[-1]} {part}"] if fits or lines == ["hoploom:"] else [*lines, f"  {part}"]
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    pieces = [textwrap.wrap(line, width, tabsize=1, **options) if len(line) > width else [line] for line in lines]
    first, *others = chain.from_iterable(pieces)
    return "\n".join([paint("hoploom:", "red", sys.stderr) + first.removeprefix("hoploom:"), *others])


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in a style of STYLES if the stream shows colours, else the plain text."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if environment.wants_colour(stream.isatty()) else text


@contextmanager
def node_progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a function show(done, total) that draws a progress bar of nodes, on stderr if that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=" nodes", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def stage_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a stage's name and the elapsed time in one line, on stderr if that is a terminal."""
    from tqdm import tqdm

    with tqdm(bar_format="{elapsed}  {desc}", disable=None, leave=False) as line:
        yield lambda text: line.set_description_str(printable(text))
