"""Launching on this host, with real processes: what is shown, how it ends, and that nothing is left running."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.launched import assert_nothing_is_left, await_programs, hoploom_launch, interrupt, launched, launching
from support.process_tree import runs
from support.until import until

from hoploom.cli import main
from hoploom.deploy.guarded import Failure
from hoploom.deploy.launch import View, first_of, without_noise

FOREVER = "sleep:100"
SERVER = ["note:SIGTERM", "serve:127.0.0.1:7700", FOREVER]


def test_trainers_start_when_servers_serve_and_servers_stop_when_trainers_have_ended(tmp_path: Path) -> None:
    slow = ["note:SIGTERM", "sleep:0.3", "print:not yet", *SERVER[1:]]
    code, out, _ = launched(tmp_path, {"a/server": slow, "a/trainers": ["print:trained"], "b/trainers": []})
    assert code == 0
    assert out.splitlines() == [
        "a/server   | not yet",
        'a/server   | {"ready": "127.0.0.1:7700", "parts": [0]}',
        "a/trainers | trained",
    ]
    assert (tmp_path / "a-server.SIGTERM").exists()
    assert_nothing_is_left(tmp_path)


def test_lines_are_whole_and_say_whose_they_are(tmp_path: Path) -> None:
    code, out, _ = launched(tmp_path, {f"{name}/trainers": ["chatter:500"] for name in "abc"})
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 1500
    for name in "abc":
        mine = [line for line in lines if line.startswith(f"{name}/trainers | ")]
        assert mine == [f"{name}/trainers | <{name}-trainers {i} {'x' * 300}>" for i in range(500)]


def test_the_first_failure_stands_on_top_and_ends_all_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    programs = {
        "a/server": SERVER,
        "a/trainers": ["await_file:b-trainers.pid", FOREVER],
        "b/trainers": ["await_file:a-trainers.pid", "complain:no such column", "exit:3"],
    }
    code, _, err = launched(tmp_path, programs)
    assert code == 3
    assert err.partition("\n\n")[2] == ("hoploom: first error: b/trainers ended with exit code 3\n  no such column\n")
    assert time.monotonic() - begin < 60
    assert (tmp_path / "a-server.SIGTERM").exists()
    assert_nothing_is_left(tmp_path)


def test_a_server_that_ends_before_it_serves_is_the_error(tmp_path: Path) -> None:
    code, _, err = launched(tmp_path, {"a/server": ["complain:port taken", "exit:2"], "a/trainers": [FOREVER]})
    assert code == 2
    assert err.endswith("first error: a/server ended with exit code 2\n  port taken\n")
    assert not (tmp_path / "a-trainers.pid").exists()


def test_a_server_that_is_lost_ends_the_training(tmp_path: Path) -> None:
    programs = {"a/server": [*SERVER[:2], "await_file:a-trainers.pid", "exit:0"], "a/trainers": [FOREVER]}
    code, _, err = launched(tmp_path, programs, parts={"a/server": [0]})
    assert code == 1
    assert "first error: a/server ended early, though with exit code 0" in err
    assert_nothing_is_left(tmp_path)


def test_a_server_that_is_lost_is_no_error_where_another_one_has_its_parts(tmp_path: Path) -> None:
    programs = {
        "a/server": [*SERVER[1:2], "await_file:a-trainers.pid", "die:SIGKILL"],
        "b/server": SERVER,
        "a/trainers": ["await_file:go", "print:trained"],
    }
    with launching(tmp_path, programs, parts={"a/server": [0], "b/server": [0, 1]}) as started:
        (pid,) = await_programs(tmp_path, "a-server")
        until(lambda: not runs(pid), "the end of the server")
        assert started.stderr is not None
        line = started.stderr.readline()
        (tmp_path / "go").write_text("")
        out, _ = started.communicate(timeout=30)
    assert line.startswith("hoploom: a/server was killed by SIGKILL")
    assert "other servers have its parts, so training goes on" in line
    assert started.returncode == 0
    assert "a/trainers | trained" in out


def test_a_python_that_runs_nothing_is_named(tmp_path: Path) -> None:
    code, _, err = launched(tmp_path, {"a/trainers": []}, python="/bin/false")
    assert code == 1
    assert "/bin/false ended with exit code 1 before it ran anything; give a working Python" in err


def test_torchruns_own_account_does_not_hide_the_error() -> None:
    said = ["", "*****", "Setting OMP_NUM_THREADS to 1", "*****", "trainer-1 | ValueError: no", "E1 torch/distributed/"]
    said[-1] += "elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    assert without_noise([*said, "Traceback"]) == ("trainer-1 | ValueError: no",)


def said_in_turn(*lines: str) -> View:
    """A view of torchrun's lines on a host with four ranks."""
    view = View(["a/trainers"])
    for line in lines:
        view.show("a/trainers", line, is_error=True)
    return view


LOST = [f"[default{rank}]:[rank{rank}]: hoploom.errors.PeerError: rank 2 ended with ValueError" for rank in (0, 1, 3)]
REPORT = "E1121 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: 2 (pid: 9)"


def test_of_several_ranks_the_one_that_failed_first_is_shown() -> None:
    """Three tell of the fourth's end; nothing but that one's lines is shown, be they before theirs or behind."""
    error = ["[default2]:[rank2]: Traceback (most recent call last):", "[default2]:[rank2]: ValueError: loss is nan"]
    warning, report = "[default1]:a warning that is no error", REPORT.format(1)
    shown = (
        "a/trainer-2 | [rank2]: Traceback (most recent call last):",
        "a/trainer-2 | [rank2]: ValueError: loss is nan",
    )
    for lines in ([warning, *error, *LOST, report], [warning, *LOST, *error, report]):
        tail = said_in_turn(*lines).tail("a/trainers")
        assert tail == shown
        assert not Failure("a", "ended", tail).is_consequence
    later = "[default1]:RuntimeError: also"
    assert said_in_turn(*error, later, report).tail("a/trainers") == shown


def test_a_rank_that_was_killed_is_named_by_torchruns_account() -> None:
    ended = "[default3]:hoploom: interrupted"  # by torchrun's SIGTERM
    tail = said_in_turn(*LOST, ended, REPORT.format(-9)).tail("a/trainers")
    assert tail == (REPORT.format(-9),)


def test_a_host_whose_ranks_all_tell_of_another_ones_end_did_not_fail_first() -> None:
    tail = said_in_turn(*LOST, REPORT.format(1)).tail("a/trainers")
    assert tail == (LOST[0].replace("[default0]:", "a/trainer-0 | "),)
    cause = Failure("b", "ended", ("ValueError: no",))
    assert first_of([Failure("a", "ended", tail), cause]) == cause


def test_only_the_last_lines_are_kept() -> None:
    tail = said_in_turn(*(f"line {i}" for i in range(5000))).tail("a/trainers")
    assert tail == tuple(f"line {i}" for i in range(4800, 5000))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_reaches_every_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    programs = {"a/server": SERVER, **{f"{name}/trainers": [f"note:{number.name}", FOREVER] for name in "ab"}}
    with launching(tmp_path, programs) as started:
        await_programs(tmp_path, "a-trainers", "b-trainers")
        interrupt(started, number)
        started.communicate(timeout=30)
    assert started.returncode == code
    for name in ("a-trainers", "b-trainers"):
        assert (tmp_path / f"{name}.{number.name}").exists()
    assert (tmp_path / "a-server.SIGTERM").exists()
    assert_nothing_is_left(tmp_path)


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    deaf = ["ignore:SIGINT", "ignore:SIGTERM"]
    plan = {"a/server": [*deaf, *SERVER[1:]], "a/trainers": [*deaf, FOREVER], "b/trainers": ["note:SIGINT", FOREVER]}
    with launching(tmp_path, plan) as started:
        await_programs(tmp_path, "a-trainers", "b-trainers")
        interrupt(started)
        until((tmp_path / "b-trainers.SIGINT").exists, "the first interrupt")
        begin = time.monotonic()
        interrupt(started)
        started.communicate(timeout=30)
    assert started.returncode == 130
    assert time.monotonic() - begin < 30
    assert_nothing_is_left(tmp_path)


def test_an_interrupt_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    """As in a shell's background job, which the terminal's Ctrl-C is not for; SIGTERM ends it."""
    with launching(tmp_path, {"a/trainers": ["note:SIGINT", "note:SIGTERM", FOREVER]}, ignored="INT") as started:
        await_programs(tmp_path, "a-trainers")
        interrupt(started)
        interrupt(started, signal.SIGTERM)
        started.communicate(timeout=30)
    assert started.returncode == 143
    assert not (tmp_path / "a-trainers.SIGINT").exists()
    assert (tmp_path / "a-trainers.SIGTERM").exists()
    assert_nothing_is_left(tmp_path)


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    with launching(tmp_path, {"a/trainers": ["print:first", "await_file:go", "chatter:2000", FOREVER]}) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "a/trainers | first\n"
        started.stdout.close()
        (tmp_path / "go").write_text("")
        started.wait(timeout=30)
    assert started.returncode == 141
    assert_nothing_is_left(tmp_path)


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    left = "leave:ignore:SIGTERM+sleep:100"
    with launching(tmp_path, {"a/server": SERVER, "a/trainers": [left, FOREVER]}) as started:
        await_programs(tmp_path, "a-server", "a-trainers", "a-trainers-left")
        started.kill()
        started.wait(timeout=30)
        assert_nothing_is_left(tmp_path)


def test_what_a_process_leaves_behind_is_ended_first(tmp_path: Path) -> None:
    code, _, _ = launched(tmp_path, {"a/trainers": ["leave:sleep:100", "exit:0"]})
    assert code == 0
    assert (tmp_path / "a-trainers-left.pid").exists()
    assert_nothing_is_left(tmp_path, seconds=0)


def test_a_killed_guard_takes_its_process_along(tmp_path: Path) -> None:
    with launching(tmp_path, {"a/trainers": [FOREVER]}) as started:
        (pid,) = await_programs(tmp_path, "a-trainers")
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        os.kill(int(stat.rpartition(b")")[2].split()[1]), signal.SIGKILL)
        _, err = started.communicate(timeout=30)
    assert started.returncode == 1
    assert "first error: a/trainers was killed by SIGKILL" in err
    assert_nothing_is_left(tmp_path)


SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if sys.argv[1:] == ["fail"] and rank == 1:
    raise ValueError("the missing column")
if sys.argv[1:] == ["fail"]:
    import time; time.sleep(100)
"""
TWO = """
[hosts."127.0.0.1"]
devices = [0, 1]
[hosts.localhost]
devices = [2]
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(TWO)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
def test_a_failed_rank_is_the_first_error(two_hosts: Path) -> None:
    done = hoploom_launch(two_hosts, "cluster.toml", "--", "script.py", "fail")
    assert done.returncode == 1
    summary = done.stderr.rpartition("\n\n")[2].splitlines()
    assert summary[0] == "hoploom: first error: 127.0.0.1/trainers ended with exit code 1"
    assert summary[-1] == "  127.0.0.1/trainer-1 | ValueError: the missing column"


def test_a_dry_run_prints_every_command_and_starts_nothing(
    two_hosts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two_hosts)
    options = ["--executor", "ssh", "cluster.toml", "--dry-run", "--master_port", "4000"]
    assert main(["launch", *options, "--", "script.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# 127.0.0.1/trainers", "# localhost/trainers"]
    assert lines[1].startswith(f"ssh -- 127.0.0.1 'cd {two_hosts} && ")
    assert "CUDA_VISIBLE_DEVICES=2 " in lines[3]
    assert "--master-addr 127.0.0.1 --master-port 4000 " in lines[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.toml", "train", "run.toml"], "there is no -- with a command behind it"),
        (["cluster.toml", "--"], "there is no command behind --"),
        (["gone.toml", "--", "train", "run.toml"], "gone.toml does not exist"),
        (["cluster.toml", "--master-port", "0", "--", "x.py"], "--master-port is '0'; give a whole number from 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    two_hosts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(two_hosts)
    assert main(["launch", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
