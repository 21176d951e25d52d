"""run.toml: what may stand in it, how it is read and written, and how a trained model comes of it."""

from hoploom.train.runs.read_run_file import parse_recipe, read_recipe
from hoploom.train.runs.run import Result, run, summary
from hoploom.train.runs.run_file import Recipe
from hoploom.train.runs.template import template, template_for
from hoploom.train.runs.write_run_file import to_toml

__all__ = [
    "Recipe",
    "Result",
    "parse_recipe",
    "read_recipe",
    "run",
    "summary",
    "template",
    "template_for",
    "to_toml",
]
