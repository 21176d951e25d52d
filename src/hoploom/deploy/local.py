"""Start processes on this host: under a keeper each, which ends them when this process is gone, however it ended."""

import shlex
from collections.abc import Sequence

from hoploom.deploy.cluster_file import Process
from hoploom.deploy.failure import Failure
from hoploom.deploy.programs import without_logs

# Runs what the first line of stdin holds. -I: a json.py in the working directory is none of its business.
BOOT = ("-I", "-c", 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))')


class Local:
    """The executor of this host."""

    silence: float | None = None  # the end of a pipe is never missed on one host

    def arguments(self, process: Process) -> list[str]:
        """What starts the keeper."""
        return [process.host.python, *BOOT]

    def shown(self, process: Process) -> str:
        """The same by hand."""
        return by_hand(process)

    def begin_deadline(self) -> float:
        """Seconds until the keeper must have begun."""
        return 60.0

    def refusal(self, process: Process, code: int, tail: Sequence[str]) -> Failure | None:
        """What is wrong where no keeper began."""
        message = f"{process.host.python} ended with exit code {code} before it ran anything; give a working Python"
        return Failure(process.label, message, tuple(tail), 1)


def by_hand(process: Process) -> str:
    """A line for a shell on the process' host."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in process.environment.items()]
    return " ".join([f"cd {shlex.quote(process.folder)} &&", *variables, shlex.join(without_logs(process.words))])
