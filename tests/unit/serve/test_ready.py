"""The line by which a server says that it is ready: what is written is read, and nothing else is taken for it."""

import json

import pytest

from hoploom.serve import Ready


@pytest.mark.parametrize("ready", [Ready("10.0.0.1:7700", (0, 3)), Ready("[::1]:7700", (), "[::1]:9400")])
def test_what_a_server_writes_is_read(ready: Ready) -> None:
    assert "\n" not in ready.line()
    assert ready.line().startswith('{"ready": "')  # what a shell script looks for
    assert Ready.read(ready.line() + "\n") == ready


def test_the_line_is_json_that_other_programs_read() -> None:
    line = Ready("gpu1:7700", (1,), "gpu1:9400").line()
    assert json.loads(line) == {"ready": "gpu1:7700", "parts": [1], "metrics": "gpu1:9400"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        '{"ready": "127.0.0.1:7700", "parts": [0]',
        '{"ready": 7700, "parts": [0]}',
        '{"ready": "127.0.0.1:7700", "parts": ["0"]}',
        '{"ready": "127.0.0.1:7700", "parts": [0], "metrics": 9400}',
        '["ready", "parts"]',
        "[" * 100_000,
    ],
)
def test_another_line_says_nothing(line: str) -> None:
    assert Ready.read(line) is None
