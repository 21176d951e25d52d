"""run.toml: what may stand in it, how it is read and written, and how a trained model comes of it."""

from hoploom.train.runs.finished import LoadedRun, load_run
from hoploom.train.runs.reading import parse_run_file, read_run_file, to_toml
from hoploom.train.runs.run import Result, run, summary
from hoploom.train.runs.run_file import RunFile
from hoploom.train.runs.template import template, template_for

__all__ = [
    "LoadedRun",
    "Result",
    "RunFile",
    "load_run",
    "parse_run_file",
    "read_run_file",
    "run",
    "summary",
    "template",
    "template_for",
    "to_toml",
]
