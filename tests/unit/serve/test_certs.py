"""hoploom certs: what it writes, who accepts it, and what it refuses."""

import argparse
import os
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest

from hoploom import ConfigError
from hoploom.cli.clusters import COMMANDS
from hoploom.serve.certs import check_hosts, write_certificates
from hoploom.serve.security import check_pair

HOSTS = ("host1", "node.example.org", "10.0.0.1", "fd00::1")

FILES = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    return tmp_path / "certs"


def context(made: Path, name: str, *, server: bool) -> ssl.SSLContext:
    """One side, as strict as the standard library can be."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    found.load_cert_chain(made / f"{name}.pem", made / f"{name}.key")
    found.load_verify_locations(made / "ca.pem")
    found.verify_mode = ssl.CERT_REQUIRED
    found.verify_flags |= ssl.VERIFY_X509_STRICT
    return found


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A mutual handshake in memory; raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert sides[0].version() == sides[1].version() == "TLSv1.3"


def test_both_sides_accept_what_it_writes_at_every_host(folder: Path) -> None:
    write_certificates(folder, HOSTS)
    server = context(folder, "server", server=True)
    for host in HOSTS:
        shake_hands(server, context(folder, "client", server=False), host)
        shake_hands(server, context(folder, "server", server=False), host)  # a server asks its peers
    for other in ("host2", "10.0.0.2", "fd00::2", "example.org"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake_hands(server, context(folder, "client", server=False), other)


def test_a_client_cannot_pose_as_a_server(folder: Path) -> None:
    write_certificates(folder, ["host1"])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unsuit|purpose"):
        shake_hands(context(folder, "client", server=True), context(folder, "client", server=False), "host1")


def test_it_writes_five_files_and_keys_that_others_never_see(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    really = os.open

    def watch(path: Any, flags: int, permissions: int = 0o777, **more: Any) -> int:
        descriptor = really(path, flags, permissions, **more)
        if str(path).endswith(".key"):
            opened.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watch)
    before = os.umask(0)  # the mode is not left to the umask
    try:
        paths = write_certificates(folder, ["host1"])
    finally:
        os.umask(before)
    assert [path.name for path in paths] == list(FILES)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert opened == [0o600, 0o600]
    assert [mode(folder / name) for name in ("server.key", "client.key")] == [0o600, 0o600]
    assert mode(folder) == 0o700


def test_the_key_of_the_ca_is_not_kept(folder: Path) -> None:
    write_certificates(folder, ["host1"])
    texts = [path.read_text() for path in folder.iterdir()]
    assert sum("PRIVATE KEY" in text for text in texts) == 2
    server, client = ((folder / name).read_bytes() for name in ("server.key", "client.key"))
    for key in (server, client):
        with pytest.raises(ConfigError, match="is not the key of"):
            check_pair((folder / "ca.pem").read_bytes(), key)


def test_nothing_is_overwritten(folder: Path) -> None:
    write_certificates(folder, ["host1"])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"certs exists, and certificates are not overwritten; give a new folder"):
        write_certificates(folder, ["host2"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    dangling = folder.parent / "link"
    dangling.symlink_to(folder.parent / "nowhere")
    with pytest.raises(ConfigError, match="exists"):
        write_certificates(dangling, ["host2"])


@pytest.mark.parametrize(
    "hosts", ["", ",", "host1:9000", "a b", "-x", "x..y", "10.0.0", "300.1.1.1", "[::1", "h/", "ü", "x" * 64, "a,b\n;"]
)
def test_what_is_no_host_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts .* give .*, e\.g\. host1,10\.0\.0\.1"):
        check_hosts(hosts.split(","))


def test_hosts_are_told_apart_by_what_they_are() -> None:
    assert check_hosts([" Host1", "host1", "[::1]", "0:0::1", "*.pods.svc", ""]) == ("host1", "::1", "*.pods.svc")


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_days_out_of_range_are_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match=f"days is {days}; give 1 to 3650"):
        write_certificates(tmp_path / "certs", ["host1"], days)


def test_the_command_says_what_it_wrote_and_how_to_use_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS["certs"].add_arguments(parser)
    arguments = parser.parse_args([str(folder), "--hosts", "host1,10.0.0.1", "--days", "2"])
    assert COMMANDS["certs"].run(arguments) == 0
    out = capsys.readouterr().out
    for name in FILES:
        assert f"{folder / name}: " in out
    assert "server.pem: the servers' certificate, for host1,10.0.0.1\n" in out
    assert "they are valid for 2 days\n" in out
    assert f"--cert {folder}/server.pem --key {folder}/server.key" in out
    assert "PRIVATE" not in out
