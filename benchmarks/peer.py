"""Our end of the pipe to a peer library in a venv of its own; the one place that reads HOPLOOM_PEERS."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hoploom.store import Store
from hoploom.store import format as layout

SCRIPT = Path(__file__).parent / "peers" / "torch_sparse_peer.py"
PEERS = ("torch-sparse", "pyg-lib", "DGL", "GraphBolt", "GLT")
DEADLINE = 600.0  # seconds that one answer may take
NAME = "PyG, torch-sparse"


class PeerError(Exception):
    """The peer has ended, or does not answer."""


class Peer:
    """PyG with torch-sparse in another process, one request at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._unread = process, b""
        greeting = self._answer()
        self.present: list[str] = greeting["present"]
        self.versions = f"peer: PyG {greeting['torch_geometric']}, torch {greeting['torch']}"

    def read(self, folder: Path, store: Store) -> None:
        """Let it build its own copy of a store's graph."""
        (node_type,), (relation,) = store.schema.node_types, store.schema.relations
        columns = {name: str(folder / layout.topology_file(0, relation, name)) for name in ("indptr", "indices")}
        fields = {name: str(folder / layout.node_file(0, node_type.name, name)) for name in node_type.fields}
        self.ask("read", **columns, fields=fields)

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


@contextmanager
def torch_sparse() -> Iterator[Peer | None]:
    """The peer, or None where its venv is missing or cannot import torch-sparse."""
    python = Path(os.environ.get("HOPLOOM_PEERS", ""), "bin", "python")
    if "HOPLOOM_PEERS" not in os.environ or not python.exists():
        yield None
        return
    with subprocess.Popen([str(python), str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield _greeted(process)
        finally:
            _end(process)


def _greeted(process: "subprocess.Popen[bytes]") -> Peer | None:
    try:
        peer = Peer(process)
    except PeerError:  # it ended while it imported torch and PyG
        return None
    return peer if "torch-sparse" in peer.present else None


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
