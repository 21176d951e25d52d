"""The live page: who may look, what is new, and how it stops."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.run_folders import step_line, write_run

from hoploom import ConfigError
from hoploom.report.reading import RunReader
from hoploom.report.watch import LivePage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", result=None)


@pytest.fixture
def live(folder: Path) -> Iterator[LivePage]:
    with LivePage([RunReader(folder)]) as page:
        yield page


def get(url: str, path: str | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    connection.request("GET", f"{parts.path}?{parts.query}" if path is None else path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_page_is_for_those_who_have_its_token(live: LivePage) -> None:
    assert live.url.startswith("http://127.0.0.1:")
    assert get(live.url)[0] == 200
    for path in ("/", "/?token=", "/?token=guess", "/content", "/content?token=guess", "/../run.toml"):
        assert get(live.url, path)[0] == 403


def test_what_is_new_is_answered_once(live: LivePage, folder: Path) -> None:
    query = urlsplit(live.url).query
    status, content = get(live.url, f"/content?{query}&seen=")
    news = json.loads(content)
    assert (status, news["title"]) == (200, "run")
    seen = f"/content?{query}&seen={news['version']}"
    assert get(live.url, seen) == (204, b"")
    with (folder / "steps-rank0.jsonl").open("a") as file:
        file.write(json.dumps(step_line(31, loss=7.5)) + "\n")
    status, content = get(live.url, seen)
    assert json.loads(content)["charts"][0]["curves"][0]["data"][1][-1] == 7.5
    assert get(live.url, f"/steps-rank0.jsonl?{query}")[0] == 404


def test_a_folder_that_is_gone_and_other_faults_are_told(
    live: LivePage, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = urlsplit(live.url).query
    gone = folder.rename(folder.with_name("elsewhere"))
    status, text = get(live.url, f"/content?{query}&seen=")
    assert (status, b"run is gone" in text) == (410, True)
    gone.rename(folder)
    assert get(live.url)[0] == 200

    def fail(runs: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("hoploom.report.watch.run_page", fail)
    assert get(live.url)[0] == 500
    live.close()
    assert "ValueError: a fault of ours" in capfd.readouterr().err


def test_a_port_is_free_again_at_once(folder: Path) -> None:
    with LivePage([RunReader(folder)]) as live:
        port = urlsplit(live.url).port
        assert get(live.url)[0] == 200  # the server closes first, so its end of the connection lingers
    with LivePage([RunReader(folder)], f"127.0.0.1:{port}") as live:
        assert get(live.url)[0] == 200


def test_it_listens_on_this_host_only(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reached from other hosts, and nothing protects it; .*ssh -L 8000"):
        LivePage([RunReader(folder)], "0.0.0.0:0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_cleanly(folder: Path, number: int) -> None:
    command = [sys.executable, "-m", "hoploom", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert get(process.stdout.readline().strip())[0] == 200
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
