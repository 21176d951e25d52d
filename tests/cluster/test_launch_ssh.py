"""Launching through a real sshd on loopback: keys, host keys, signals, and that nothing is left over there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import assert_nothing_is_left, await_programs, hoploom_launch, interrupt, launched, launching
from support.ports import free_ports
from support.process_tree import runs
from support.sshd import Sshd, running_sshd
from support.until import until

from hoploom.deploy import guard
from hoploom.deploy.guarded import BOOT

FOREVER = "sleep:100"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd") / "etc") as running:
        yield running


@pytest.fixture
def client(sshd: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Sshd:
    """Of the same server, for a test that changes its keys."""
    return sshd.another_client(tmp_path_factory.mktemp("client") / "etc")


def test_processes_run_over_there_and_are_seen_here(sshd: Sshd, tmp_path: Path) -> None:
    programs = {
        "a/server": ["note:SIGTERM", "serve:127.0.0.1:7700", FOREVER],
        "a/trainers": ["keep:API_KEY", "keep:SSH_CONNECTION", "complain:a warning", "print:trained"],
    }
    code, out, err = launched(tmp_path, programs, ssh=str(sshd.config), environment={"API_KEY": 'it\'s "top" $ecret'})
    assert code == 0, err
    assert out.splitlines()[1:] == ["a/trainers | trained"]
    assert err.splitlines() == ["a/trainers | a warning"]
    assert (tmp_path / "a-trainers.variable").read_text()  # sshd's own variable: it was there
    assert (tmp_path / "a-server.SIGTERM").exists()
    assert_nothing_is_left(tmp_path)


def test_a_secret_is_on_no_command_line(sshd: Sshd, tmp_path: Path) -> None:
    programs = {"a/trainers": ["keep:API_KEY", "await_file:seen"]}
    with launching(tmp_path, programs, ssh=str(sshd.config), environment={"API_KEY": 'it\'s "top" $ecret'}) as started:
        until((tmp_path / "a-trainers.variable").exists, "the variable")
        shown = subprocess.run(["ps", "-e", "-ww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        (tmp_path / "seen").write_text("")
        started.communicate(timeout=30)
    assert (tmp_path / "a-trainers.variable").read_text() == 'it\'s "top" $ecret'
    assert "BatchMode=yes" in shown
    assert "$ecret" not in shown


def test_an_interrupt_reaches_the_other_host(sshd: Sshd, tmp_path: Path) -> None:
    with launching(tmp_path, {"a/trainers": ["note:SIGINT", FOREVER]}, ssh=str(sshd.config)) as started:
        await_programs(tmp_path, "a-trainers")
        interrupt(started)
        started.communicate(timeout=30)
    assert started.returncode == 130
    assert (tmp_path / "a-trainers.SIGINT").exists()
    assert_nothing_is_left(tmp_path)


def test_a_killed_launcher_leaves_nothing_on_the_other_host(sshd: Sshd, tmp_path: Path) -> None:
    programs = {"a/trainers": ["leave:ignore:SIGTERM+sleep:100", FOREVER], "b/trainers": [FOREVER]}
    with launching(tmp_path, programs, ssh=str(sshd.config)) as started:
        await_programs(tmp_path, "a-trainers", "a-trainers-left", "b-trainers")
        started.kill()
        started.wait(timeout=30)
        assert_nothing_is_left(tmp_path)


def test_a_connection_that_breaks_leaves_nothing_and_is_an_error(sshd: Sshd, tmp_path: Path) -> None:
    with launching(tmp_path, {"a/trainers": [FOREVER]}, ssh=str(sshd.config)) as started:
        (pid,) = await_programs(tmp_path, "a-trainers")
        keeping = parent(pid)
        os.kill(parent(keeping), signal.SIGKILL)  # sshd's process of this connection
        _, err = started.communicate(timeout=30)
        assert started.returncode == 1
        assert "first error: a/trainers ended with exit code 255, or the connection to its host broke" in err
        assert_nothing_is_left(tmp_path)
        assert not runs(keeping)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def test_a_guard_without_heartbeats_ends_its_program(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the one that was meant')")
    source = Path(guard.__file__).read_text()
    job = {"words": ["sleep", "100"], "folder": str(tmp_path), "environment": {}, "silence": 0.5}
    command, pipe = [sys.executable, *BOOT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=tmp_path) as kept:
        assert kept.stdin is not None
        kept.stdin.write(f"{json.dumps(source)}\n{json.dumps(job)}\n".encode())
        kept.stdin.flush()
        assert kept.wait(timeout=30) == 128 + signal.SIGTERM


def refused(tmp_path: Path, sshd: Sshd, **more: str) -> str:
    code, _, err = launched(tmp_path, {"a/trainers": []}, ssh=str(sshd.config), **more)
    assert code == (2 if more else 1)
    return next(line for line in err.splitlines() if line.startswith("hoploom: first error: "))


def test_a_key_that_is_not_accepted_is_named_with_the_way_out(client: Sshd, tmp_path: Path) -> None:
    shutil.copy(client.folder / "other_key", client.folder / "user_key")
    said = refused(tmp_path, client)
    assert "a/trainers: 127.0.0.1 accepts none of your keys; add one to its authorized_keys (ssh-copy-id)" in said


def test_a_host_key_that_has_changed_is_named_with_the_way_out(client: Sshd, tmp_path: Path) -> None:
    (client.folder / "known_hosts").write_text(client.known_as(client.folder / "other_key.pub"))
    said = refused(tmp_path, client)
    assert "127.0.0.1 has another host key than the known one; if it was set up anew, forget the old key with" in said
    assert f'`ssh-keygen -f "{client.folder}/known_hosts" -R "[127.0.0.1]:{client.port}"`' in said


def test_a_host_that_is_not_known_is_named_with_the_way_out(client: Sshd, tmp_path: Path) -> None:
    (client.folder / "known_hosts").write_text("")
    said = refused(tmp_path, client)
    assert f"has a host key that is not known yet; log in once with `ssh -F {client.config} 127.0.0.1 true`" in said


def test_a_host_that_cannot_be_reached_is_named_with_the_way_out(client: Sshd, tmp_path: Path) -> None:
    client.config.write_text(client.config.read_text().replace(f"Port {client.port}", f"Port {free_ports(1)[0]}"))
    assert "127.0.0.1 cannot be reached; see whether it is up, and whether `ssh -F " in refused(tmp_path, client)


def test_a_python_that_is_not_there_is_named_with_the_way_out(sshd: Sshd, tmp_path: Path) -> None:
    said = refused(tmp_path, sshd, python="/no/python")
    assert "python is /no/python, which 127.0.0.1 cannot run; give the path of one with hoploom installed" in said


def test_a_folder_that_is_not_there_is_named_with_the_way_out(sshd: Sshd, tmp_path: Path) -> None:
    code, _, err = launched(tmp_path, {"a/trainers": []}, ssh=str(sshd.config), working_folder=f"{tmp_path}/gone")
    assert code == 2
    assert f"hoploom: folder is {tmp_path}/gone, which is no directory on this host; make it first" in err


CLUSTER = """
executor = "ssh"
hosts = ["127.0.0.1", "localhost"]
folder = "{folder}"
ssh.config = "{config}"
"""


@pytest.mark.slow
def test_torchrun_meets_over_ssh(tmp_path: Path, sshd: Sshd) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(config=sshd.config, folder=tmp_path))
    (tmp_path / "script.py").write_text("import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    done = hoploom_launch(tmp_path, "cluster.toml", "--master-port", str(free_ports(1)[0]), "--", "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["127.0.0.1/trainers | 0 of 2", "localhost/trainers | 1 of 2"]
