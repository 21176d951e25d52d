"""Certificates that are renewed while requests go on, and files that cannot be used."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.batch_servers import listening
from support.certificates import certificates, token_file
from support.wires import over_tcp

from hoploom.serve.client import Peer, read_message
from hoploom.serve.security import Reloading, read_client_security, read_server_security
from hoploom.serve.wire import Message

pytestmark = pytest.mark.timeout(180)
INFO = Message({"ask": "info"})


@pytest.mark.filterwarnings("ignore:.*the old one stays in use")  # of a certificate beside another's key
def test_certificates_are_swapped_while_requests_go_on(ring_path: Path, tmp_path: Path) -> None:
    """Both sides take the new ones for their next connection, and no request fails."""
    folder = tmp_path / "certs"
    folder.mkdir()

    def put(made: dict[str, bytes]) -> None:
        trusted = certificates()["ca.pem"] + certificates(which=1)["ca.pem"]
        for name, text in {**made, "ca.pem": trusted}.items():
            token_file(folder / f"{name}.new", text).rename(folder / name)

    put(certificates())
    server_of = read_server_security(cert=folder / "server.pem", key=folder / "server.key", client_ca=folder / "ca.pem")
    client_of = read_client_security(None, folder / "ca.pem", folder / "client.pem", folder / "client.key")
    with listening(ring_path, security=server_of) as server, ThreadPoolExecutor(2) as pool:
        renewed, over = Reloading(client_of), threading.Event()

        def ask() -> int:
            count = 0
            while not over.is_set() or count < 3:
                with Peer(server.address, renewed, 30.0) as peer:
                    for _ in range(3):
                        assert "identity" in peer.request(INFO, read_message).header
                count += 1
            return count

        shown = []
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for which in (0, 1, 0):
                put(certificates(which=which))
                with over_tcp(server.address, client_of) as connection:
                    socket_of: Any = connection._socket
                    shown.append(socket_of.getpeercert(binary_form=True))
        finally:
            over.set()
        assert all(one.result(60) > 0 for one in asking)
    assert shown[0] == shown[2] != shown[1]


def test_files_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    made = certificates()
    cert, key = (token_file(tmp_path / name, made[name]) for name in ("server.pem", "server.key"))
    renewed = Reloading(read_server_security(cert=cert, key=key))
    security, context = renewed.now()
    for half in (made["server.pem"][:200], b"", certificates(which=1)["server.pem"]):
        token_file(cert, half)
        with pytest.warns(UserWarning, match="the old one stays in use"):
            assert renewed.now() == (security, context)
        assert renewed.now() == (security, context)  # which is said once
    cert.unlink()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert renewed.now() == (security, context)
    token_file(cert, certificates(which=1)["server.pem"])
    token_file(key, certificates(which=1)["server.key"])
    assert renewed.now()[0].certificate == certificates(which=1)["server.pem"]
