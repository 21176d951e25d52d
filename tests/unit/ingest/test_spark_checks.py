"""What is wrong around Spark is said before Spark starts, in one line: Java, the master, the Python of executors."""

import re
import socket
from pathlib import Path

import pytest

from hoploom.errors import ConfigError
from hoploom.ingest.spark.session import check_java, check_master, python_problem, reason_of

OLD = """#!/bin/sh
echo 'openjdk version "1.8.0_392"' >&2
echo 'OpenJDK Runtime Environment (build 1.8.0_392-b08)' >&2
"""


def java_that_is(script: str, folder: Path) -> str:
    (folder / "bin").mkdir()
    (folder / "bin" / "java").write_text(script)
    (folder / "bin" / "java").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("1.8.0_392", False), ("11.0.21", False), ("16", False), ("17.0.15", True), ("21-ea", True), ("25", True)],
)
def test_java_must_be_17_or_later(
    version: str, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = OLD.replace('1.8.0_392"', f'{version}" 2023-10-17').replace("echo", "echo 'Picked up X' >&2; echo", 1)
    monkeypatch.setenv("JAVA_HOME", java_that_is(script, tmp_path))
    if accepted:
        check_java()
    else:
        message = f'Spark needs Java 17 or later, and finds version "{version}"; install Java 17'
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_java()


def test_a_java_that_is_missing_or_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"Java, which does not start \(.*nowhere/bin/java: not found\); install"):
        check_java()
    broken = java_that_is("#!/bin/sh\necho 'Could not create the Java Virtual Machine.' >&2\nexit 1\n", tmp_path)
    monkeypatch.setenv("JAVA_HOME", broken)
    with pytest.raises(ConfigError, match=r"does not start \(Could not create the Java Virtual Machine\.\); install"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"start \(java: not found\)"):
        check_java()


def test_a_master_that_does_not_answer_is_named_at_once() -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"answers at spark://127.0.0.1:{port} \(Connection refused\); start it"):
            check_master(f"spark://127.0.0.1:{port}")
        with socket.create_server(("127.0.0.1", 0)) as answering:
            check_master(f"spark://127.0.0.1:{port},127.0.0.1:{answering.getsockname()[1]}")
    with pytest.raises(ConfigError, match="it has no port, which is 7077 in most clusters"):
        check_master("spark://127.0.0.1")
    for master in ("local[*]", "yarn", "k8s://https://127.0.0.1:1"):
        check_master(master)


def test_what_executors_lack_is_found_in_their_errors() -> None:
    for text, said in (
        (
            "Traceback ...\nModuleNotFoundError: No module named 'pyarrow'",
            "executors has no pyarrow; install it on every",
        ),
        (
            "ModuleNotFoundError: No module named 'hoploom.ingest'",
            "has no hoploom; .* spark.archives=environment.tar.gz#environment",
        ),
        (
            'java.io.IOException: Cannot run program "/x/python": error=2',
            "have no Python at /x/python; set PYSPARK_PYTHON",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark",
            "executors have Python 3.12, but you run Python 3.11",
        ),
        (
            "Lost task 0.3 (executor 1): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
            "the Python process of a task was ended, as it is where memory runs out; give executors more",
        ),
        (
            "Lost task 0.3 (executor 1): java.io.EOFException\n\tat java.base/java.io.DataInputStream.readInt(D:3)\n"
            "\tat org.apache.spark.api.python.PythonWorkerFactory.create(Made.scala:153)",
            "the Python process of a task was ended, as it is where memory runs out; give executors more",
        ),
    ):
        error = python_problem(RuntimeError(text))
        assert error is not None
        assert re.search(said, str(error))
        assert "\n" not in str(error)
    assert python_problem(RuntimeError("an executor was lost")) is None
    assert python_problem(RuntimeError("java.io.EOFException\n\tat org.apache.spark.io.Block.read(B.java:1)")) is None


JAVA_TRACE = """An error occurred while calling o49.collectToPython.
: org.apache.spark.SparkException: Job aborted: java.io.IOException: No space left on device
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
Caused by: java.io.IOException: err
"""
PYTHON_TRACE = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "tasks.py", line 3, in write
    file.write(values)
OSError: [Errno 28] No space left on device
"""


def test_of_a_trace_one_line_is_shown() -> None:
    assert reason_of(RuntimeError(JAVA_TRACE)).endswith("Job aborted: java.io.IOException: No space left on device")
    assert reason_of(RuntimeError(PYTHON_TRACE)) == "OSError: [Errno 28] No space left on device"
    inner = JAVA_TRACE.replace("java.io.IOException: No space", "PythonException: " + PYTHON_TRACE + "\n\tat x\n", 1)
    assert reason_of(RuntimeError(inner)).startswith("OSError: [Errno 28]")
    plan = "[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03;\n'Project [*]\n"
    assert reason_of(RuntimeError(plan)).startswith("[PATH_NOT_FOUND]")
    assert reason_of(RuntimeError()) == "RuntimeError"
