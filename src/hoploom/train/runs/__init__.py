"""run.toml: its keys, how it is read and written, and how it becomes a trained model."""

from hoploom.train.runs.first_run_file import template, template_for
from hoploom.train.runs.run import LoadedRun, Result, load_run, run, summary
from hoploom.train.runs.run_file import RunFile, parse_run_file, read_run_file, to_toml

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
