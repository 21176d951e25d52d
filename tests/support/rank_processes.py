"""Processes of Python that are ranks together."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support import TESTS


def run_ranks(words: Sequence[str], variables: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """The exit code and stderr of a process for each set of variables, which run together."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    started = [
        subprocess.Popen([sys.executable, *words], env=environment | own, stderr=subprocess.PIPE, text=True)
        for own in variables
    ]
    try:
        said = [process.communicate(timeout=180)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()
