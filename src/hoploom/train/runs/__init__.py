"""run.toml: its keys, how it is read and written, and how it becomes a trained model."""

from hoploom.train.runs.run import LoadedRun as LoadedRun
from hoploom.train.runs.run import run as run
from hoploom.train.runs.run_file import parse_run_file as parse_run_file
from hoploom.train.runs.run_file import read_run_file as read_run_file
