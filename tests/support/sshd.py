"""A real sshd for tests: Debian's, on a port of loopback, with throwaway keys and a configuration of its own."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

import pytest

from support.ports import free_ports

SSHD = "/usr/sbin/sshd"
PRIVILEGES = Path("/run/sshd")  # sshd insists on it where root starts it
STARTING = 20.0  # seconds
SERVER = """
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 50
"""
CLIENT = """
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  Port {port}
"""


@dataclass(frozen=True)
class Sshd:
    folder: Path
    port: int

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def known_as(self, key: Path) -> str:
        """The line of known_hosts by which this server has that key."""
        return f"[127.0.0.1]:{self.port},[localhost]:{self.port} {key.read_text()}"

    def another_client(self, folder: Path) -> "Sshd":
        """One whose keys and configuration a test may change."""
        folder.mkdir(mode=0o700)
        for name in ("user_key", "other_key", "other_key.pub", "known_hosts"):
            shutil.copy(self.folder / name, folder)
        client = Sshd(folder, self.port)
        client.config.write_text(CLIENT.format(folder=folder, port=self.port))
        return client


@contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    if not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd here: apt install openssh-server")
    folder.mkdir(mode=0o700)
    for name in ("host_key", "user_key", "other_key"):
        make_key(folder / name)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    with suppress(OSError):
        PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    (port,) = free_ports(1)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    sshd = Sshd(folder, port)
    sshd.config.write_text(CLIENT.format(folder=folder, port=port))
    (folder / "known_hosts").write_text(sshd.known_as(folder / "host_key.pub"))
    command = [SSHD, "-D", "-f", str(folder / "sshd_config"), "-p", str(port), "-E", str(folder / "log")]
    with subprocess.Popen(command, start_new_session=True) as server:
        try:
            _wait_for(server, sshd)
            yield sshd
        finally:
            server.kill()


def make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", getuser(), "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _wait_for(server: "subprocess.Popen[bytes]", sshd: Sshd) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline:
        if server.poll() is not None:
            pytest.skip(f"sshd does not run here: {(sshd.folder / 'log').read_text().strip()[-300:]}")
        done = subprocess.run(
            ["ssh", "-F", str(sshd.config), "-o", "BatchMode=yes", "127.0.0.1", "true"],
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        if done.returncode == 0:
            return
        if "refused" not in done.stderr:
            pytest.skip(f"sshd lets nobody in here: {done.stderr.strip()[-300:]}")
    pytest.skip("sshd does not answer here")
