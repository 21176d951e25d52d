"""The command that prints a completion script for a shell, made from the same parsers that read the command line."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping

from hoploom.cli.command import Arguments, Command

SHELLS = ("bash", "zsh", "fish")
Parsers = Mapping[str, argparse.ArgumentParser]  # by command


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.epilog = (
        'In ~/.bashrc write: eval "$(hoploom completion bash)". In ~/.zshrc, below compinit: '
        'eval "$(hoploom completion zsh)". In ~/.config/fish/config.fish: hoploom completion fish | source.'
    )


def _completion(arguments: Arguments) -> int:
    make = {"bash": as_bash, "zsh": as_zsh, "fish": as_fish}[arguments.shell]
    print(make(arguments.parsers()))
    return 0


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What begins with dashes, that of all kinds of a command included."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from (option for option in options_of(inner) if "--help" not in option.option_strings)
        elif action.option_strings:
            yield action


def _kinds(parser: argparse.ArgumentParser) -> list[str]:
    """The words that may stand first: kinds of a command, or the choices of an argument."""
    first = next((action for action in parser._actions if not action.option_strings), None)
    return [] if first is None or first.choices is None else list(map(str, first.choices))


def _long(action: argparse.Action) -> str:
    return action.option_strings[-1]


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _help(action: argparse.Action) -> str:
    """A description that no shell reads as anything but text."""
    return re.sub(r"[^\w .,;/=-]", "", action.help or "").replace("%%", "%")


# --- shells --------------------------------------------------------------------------------------


def as_bash(parsers: Parsers) -> str:
    """For bash; files where nothing else fits."""
    lines = [
        "_hoploom() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" words=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(parsers)} --help --version" -- "$cur")); return',
        "  fi",
        '  case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
    ]
    for name, parser in parsers.items():
        lines += [f'    "{name} {_long(o)}") words="{_choices(o)}" ;;' for o in options_of(parser) if o.choices]
        if kinds := _kinds(parser):
            lines.append(f'    "{name} {name}") words="{" ".join(kinds)}" ;;')
    lines += ["  esac", '  case "${COMP_WORDS[1]} $cur" in']
    for name, parser in parsers.items():
        options = " ".join(dict.fromkeys(map(_long, options_of(parser))))
        lines.append(f'    "{name} -"*) words="{options}" ;;')
    lines += ["  esac", '  COMPREPLY=($(compgen -W "$words" -- "$cur"))', "}"]
    return "\n".join([*lines, "complete -o default -F _hoploom hoploom"])


def as_zsh(parsers: Parsers) -> str:
    """For zsh, with descriptions."""
    described = " ".join(shlex.quote(f"{name}:{parser.description}") for name, parser in parsers.items())
    lines = ["#compdef hoploom", "_hoploom() {", f"  local -a commands=({described})"]
    lines += ["  if (( CURRENT == 2 )); then _describe command commands; return; fi", "  case $words[2] in"]
    for name, parser in parsers.items():
        words = [f"'{_long(o)}[{_help(o)}]{_zsh_value(o)}'" for o in options_of(parser)]
        kinds = _kinds(parser)
        words += [f"'1:kind:({' '.join(kinds)})'"] * bool(kinds) + ["'*:file:_files'"]
        lines.append(f"    {name}) shift words; (( CURRENT-- )); _arguments {' '.join(dict.fromkeys(words))} ;;")
    return "\n".join([*lines, "  esac", "}", "compdef _hoploom hoploom"])


def _zsh_value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return f":value:({_choices(action)})" if action.choices else ":value:_files"


def as_fish(parsers: Parsers) -> str:
    """For fish, with descriptions."""
    lines = []
    for name, parser in parsers.items():
        about = shlex.quote(str(parser.description))
        lines.append(f"complete -c hoploom -f -n __fish_use_subcommand -a {name} -d {about}")
        seen = f"complete -c hoploom -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -a '{' '.join(kinds)}'"] if (kinds := _kinds(parser)) else []
        for option in options_of(parser):
            value = "" if option.nargs == 0 else f" -x -a '{_choices(option)}'" if option.choices else " -r"
            lines.append(f"{seen} -l {_long(option)[2:]}{value} -d '{_help(option)}'")
    return "\n".join(dict.fromkeys(lines))


COMMANDS = {"completion": Command(_completion_arguments, _completion)}
