"""The graph server beside the trainers of a host: a child process, for as long as the trainers need it.

It listens for the other hosts' ranks with a token that only this run knows. It does not hear the terminal's Ctrl-C,
as trainers still fetch rows for their last step then; if this process dies, its stdin ends, and it with that.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from hoploom.errors import ConfigError, PeerError
from hoploom.serve.ready import Ready

AFTER_TERMINATE = 10.0  # seconds between SIGTERM and SIGKILL
UNDER_THIS = (
    "import runpy; from hoploom.dist.stopping import die_with_stdin; die_with_stdin(); "
    "runpy.run_module('hoploom', run_name='__main__', alter_sys=True)"
)


class Beside:
    """A running `hoploom serve`."""

    def __init__(self, words: Sequence[str], seconds: float) -> None:
        line = [sys.executable, "-c", UNDER_THIS, "serve", *words]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            self.address = self._ready(time.monotonic() + seconds).address
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _ready(self, deadline: float) -> Ready:
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        while b"\n" not in line:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerError("the graph server of this host was not ready in time; give hoploom.init more timeout")
            more = os.read(pipe, 4096)
            if not more:
                code = self._process.wait(AFTER_TERMINATE)
                raise PeerError(f"the graph server of this host ended with exit code {code}; its own words are above")
            line += more
        ready = Ready.read(line.decode(errors="replace").splitlines()[0])
        if ready is None:
            raise PeerError(f"the graph server of this host says {line!r:.200}, not that it is ready; see its output")
        return ready

    def close(self) -> None:
        """Ask it to stop, then make it."""
        self._process.send_signal(signal.SIGTERM)  # no error where it has ended
        try:
            self._process.wait(AFTER_TERMINATE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(AFTER_TERMINATE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> "Beside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def token_in_file(token: str) -> Iterator[Path]:
    """A file that holds a token and that only this user may read, while it is needed."""
    with tempfile.TemporaryDirectory(prefix="hoploom-") as folder:
        path = Path(folder, "token")
        path.touch(mode=0o600)
        path.write_text(token)
        yield path


def address_towards(host: str, port: int) -> str:
    """The address of this host that packets to another one leave from. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from this host to {host}: {error}; check the network's set-up") from error
