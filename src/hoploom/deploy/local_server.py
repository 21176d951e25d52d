"""The graph server beside the trainers of a host: a process under a keeper, for as long as the trainers need it.

It listens for the other hosts' ranks with a token that only this run knows, and that is in no file. It does not hear
the terminal's Ctrl-C, as trainers still fetch rows for their last step then; if this process dies, its keeper ends it.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from hoploom.deploy.cluster_file import Host, Process
from hoploom.deploy.programs import ServerCommand
from hoploom.deploy.supervise import Local, Supervisor
from hoploom.errors import PeerError
from hoploom.ranks.environment import own_server
from hoploom.serve.ready import FOR_PEOPLE

AFTER_TERMINATE = 10.0  # seconds between SIGTERM and SIGKILL


class LocalServer:
    """A running `hoploom serve`. Its errors and warnings are shown as they are.

    `before_close` waits for other hosts, which may still fetch rows for their last step; not after an error.
    """

    def __init__(
        self,
        command: ServerCommand,
        seconds: float,
        python: str = sys.executable,
        *,
        token: str | None = None,
        before_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_close = before_close
        host = Host("here", python=sys.executable, folder=os.getcwd())
        process = Process("here/server", host, command.words(python), own_server(token), host.folder)
        self._supervisor = Supervisor(Local(), _show, lambda event: None)
        try:
            (kept,) = self._supervisor.start([process])
            if not self._supervisor.until(lambda: kept.ready is not None or kept.code is not None, seconds):
                raise PeerError("the graph server of this host was not ready in time; give hoploom.init more timeout")
            if kept.ready is None:
                message = f"the graph server of this host ended with exit code {kept.code}; its own words are above"
                raise PeerError(message)
        except BaseException:
            self._supervisor.close()
            raise
        self.address = kept.ready.address

    def close(self) -> None:
        """Ask it to stop, then make it."""
        try:
            self._supervisor.stop("TERM", AFTER_TERMINATE)
        finally:
            self._supervisor.close()

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._before_close()
        self.close()


def _show(label: str, line: str, *, is_error: bool) -> None:
    """By the file's number: a thread may still write while the interpreter ends."""
    if not is_error or line.startswith(FOR_PEOPLE):
        return
    rest = f"{line}\n".encode()
    with suppress(OSError):  # nobody reads any more, or nobody reads in time: the server's later lines are still taken
        while rest:
            rest = rest[os.write(2, rest) :]
