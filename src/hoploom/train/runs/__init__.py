"""From a recipe to a trained model: what it names is made and put together."""

from hoploom.train.runs.run import Result, run, summary

__all__ = ["Result", "run", "summary"]
