"""Our end of the pipe to a peer library in a venv of its own; the one place that reads HOPLOOM_PEERS.

HOPLOOM_PEERS names one folder or several, as PATH does: libraries that need other versions of torch have their own.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hoploom.store import Store
from hoploom.store import format as layout

SCRIPTS = Path(__file__).parent / "peers"
PEERS = ("torch-sparse", "pyg-lib", "DGL", "GraphBolt", "GLT")
DEADLINE = 600.0  # seconds that one answer may take
NAME = "PyG, torch-sparse"


class PeerError(Exception):
    """The peer has ended, or does not answer."""


class Peer:
    """A library in another process, one request at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._unread = process, b""
        greeting = self._answer()
        self.present: list[str] = greeting.get("present", [])
        self.versions = f"peer: {greeting['versions']}"

    def read(self, folder: Path, store: Store) -> None:
        """Let it build its own copy of a store's graph."""
        self.ask("read", **files_of(folder, store))

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ask": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], DEADLINE)[0]:
                raise PeerError(f"the peer did not answer within {DEADLINE:g} s")
            more = os.read(pipe, 1 << 16)
            if not more:
                raise PeerError("the peer has ended; its own message stands above")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def files_of(folder: Path, store: Store) -> dict[str, Any]:
    """The files that a peer reads the graph from."""
    (node_type,), (relation,) = store.schema.node_types, store.schema.relations
    columns = {name: str(folder / layout.topology_file(0, relation, name)) for name in ("indptr", "indices")}
    fields = {name: str(folder / layout.node_file(0, node_type.name, name)) for name in node_type.fields}
    return {**columns, "fields": fields}


@contextmanager
def pyg(library: str = "torch-sparse") -> Iterator[Peer | None]:
    """PyG with torch-sparse or pyg-lib, or None where no venv can import it."""
    with _first_that_starts("torch_sparse_peer.py", library) as peer:
        yield peer


@contextmanager
def loader_of(library: str) -> Iterator[Peer | None]:
    """The loader of one library, or None where no venv can import it."""
    with _first_that_starts("loader_peer.py", library) as peer:
        yield peer


@contextmanager
def typed_loader() -> Iterator[Peer | None]:
    """PyG's loaders with pyg-lib over a graph of several types, or None where no venv can import them."""
    with _first_that_starts("typed_loader_peer.py") as peer:
        yield peer


@contextmanager
def layers(library: str) -> Iterator[Peer | None]:
    """The layers of PyG with pyg-lib or of DGL, or None where no venv can import them."""
    with _first_that_starts("edge_layers_peer.py", library) as peer:
        yield peer


@contextmanager
def glt_cluster() -> Iterator[Peer | None]:
    """GLT's distributed loaders, or None where no venv can import it."""
    with _first_that_starts("glt_cluster_peer.py") as peer:
        yield peer


@contextmanager
def layer_of(module: str) -> Iterator[Peer | None]:
    """A layer of "hoploom.nn", or of "torch_geometric.nn" with pyg-lib, or None where no venv can import these."""
    ours = [Path(sys.executable)] if module == "hoploom.nn" else None
    with _first_that_starts("relation_layers_peer.py", module, interpreters=ours) as peer:
        yield peer


@contextmanager
def _first_that_starts(script: str, *arguments: str, interpreters: list[Path] | None = None) -> Iterator[Peer | None]:
    """The script in the first venv that has what it imports."""
    with ExitStack() as running:
        for python in pythons() if interpreters is None else interpreters:
            command = [str(python), str(SCRIPTS / script), *arguments]
            process = running.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            running.callback(_end, process)
            with suppress(PeerError):  # it ended while it imported its library
                found = Peer(process)
                break
        else:
            found = None
        yield found


def pythons() -> list[Path]:
    """The interpreter of every venv in HOPLOOM_PEERS."""
    folders = filter(None, os.environ.get("HOPLOOM_PEERS", "").split(os.pathsep))
    return [python for folder in folders if (python := Path(folder, "bin", "python")).exists()]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It ends by itself when its input does."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()


def absent(peer: Peer | None) -> list[str]:
    """The peers that cannot be imported."""
    return [name for name in PEERS if peer is None or name not in peer.present]
