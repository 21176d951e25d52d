"""run.toml: what may stand in it, how it is read, checked, written and drafted."""

from hoploom.train.recipes.reader import parse_recipe, read_recipe
from hoploom.train.recipes.sections import Recipe
from hoploom.train.recipes.template import template, template_for
from hoploom.train.recipes.writer import to_toml

__all__ = ["Recipe", "parse_recipe", "read_recipe", "template", "template_for", "to_toml"]
