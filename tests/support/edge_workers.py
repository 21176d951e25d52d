"""A run that reads fields of edges, on any number of ranks."""

from collections.abc import Sequence
from pathlib import Path

from hoploom.ranks.context import Context
from hoploom.train.runs.run import run
from hoploom.train.runs.run_file import read_run_file


def trained(context: Context, folder: str, overrides: Sequence[str] = ()) -> None:
    chosen = [f"output.folder={folder}/of-{context.world_size}", *overrides]
    run(read_run_file(Path(folder) / "run.toml", chosen), context)
