"""run.toml: what may stand in it, how it is read and written, and how a trained model comes of it."""

from hoploom.train.runs.read_run_file import parse_recipe, read_recipe
from hoploom.train.runs.run import Result, run, summary
from hoploom.train.runs.run_file import RunFile, to_toml
from hoploom.train.runs.template import template, template_for

__all__ = [
    "Result",
    "RunFile",
    "parse_recipe",
    "read_recipe",
    "run",
    "summary",
    "template",
    "template_for",
    "to_toml",
]
