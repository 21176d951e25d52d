"""The supervisor by itself: what has happened to a process is handled before anybody is told that it ended."""

import sys
from pathlib import Path

from support.launched import until

from hoploom.deploy.cluster_file import Host, Process
from hoploom.deploy.supervise import Local, ProcessEvent, Supervisor


def test_a_process_counts_as_ended_once_its_end_was_handled(tmp_path: Path) -> None:
    host = Host("here", "127.0.0.1", "127.0.0.1", python=sys.executable)
    process = Process("here/trainers", host, (sys.executable, "-S", "-c", "raise SystemExit(3)"), {}, str(tmp_path))
    handled: list[ProcessEvent] = []
    supervisor = Supervisor(Local(), lambda label, line, *, is_error: None, handled.append)
    try:
        (kept,) = supervisor.start([process])
        until(lambda: supervisor.events.qsize() == 2, "its beginning and its end")
        assert kept.code is None
        assert supervisor.until(lambda: not supervisor.living(), seconds=30)
        assert [event.what for event in handled] == ["began", "ended"]
        assert kept.code == 3
    finally:
        supervisor.close()
