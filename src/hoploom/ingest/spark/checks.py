"""What must hold before a build on Spark: Java runs it, its master answers, its executors have the same Hoploom.

Costs a second and one small job. Without these checks, a mistake shows after minutes, as a trace of Java's.
"""

import importlib
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import hoploom
from hoploom.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA, LEAST_SPARK = 17, 4
ANSWER_SECONDS = 5.0
EXECUTOR_SECONDS = 180.0  # a cluster may start hosts first
JAVA = '"${JAVA_HOME:+$JAVA_HOME/bin/}java" -version'  # the one that Spark starts
GET_JAVA = f"install Java {LEAST_JAVA} or later, and set JAVA_HOME to its folder if it is not the `java` on your PATH"
NOT_BEGUN = re.compile(
    r"java\.io\.EOFException(\s+at \S+){0,9}\s+at org\.apache\.spark\.api\.python\."
)  # it had no pid yet
UNREADABLE_FILE = re.compile(r"while reading file (\S+?)\.(?:\s|$)")
UNTOLD = (
    "An error occurred while",
    "An exception was thrown",
    "Traceback (",
    "Driver stacktrace",
    "Caused by",
    "SQLSTATE",
)
SHIP = (
    "install it on every host, or ship an environment that has it: pack one with venv-pack or conda-pack, and give "
    "--conf spark.archives=environment.tar.gz#environment --conf spark.pyspark.python=./environment/bin/python"
)


def check_java() -> None:
    """ConfigError where there is no Java, or one that is too old for Spark."""
    done = subprocess.run(["/bin/sh", "-c", JAVA], capture_output=True, text=True, timeout=60, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)[^"]*"', done.stderr)
    if done.returncode or version is None:
        reason = done.stderr.strip().split("\n")[-1].removeprefix("/bin/sh: 1: ")
        raise ConfigError(f"Spark needs Java, which does not start ({reason}); {GET_JAVA}")
    if int(version[1]) < LEAST_JAVA:
        raise ConfigError(f"Spark needs Java {LEAST_JAVA} or later, and finds {version[0]}; {GET_JAVA}")


def check_session(session: "SparkSession") -> None:
    """ConfigError where a session of the user's is too old, or reaches its cluster through Spark Connect."""
    if int(session.version.split(".")[0]) < LEAST_SPARK:
        raise ConfigError(f"this session has Spark {session.version}; Hoploom needs Spark {LEAST_SPARK} or later")
    if not hasattr(session, "_sc"):
        what = "this session is one of Spark Connect, which gives no access to the tasks of its jobs"
        raise ConfigError(f"{what}; take a cluster with dedicated access, or start Hoploom with spark-submit")


def check_master(master: str) -> None:
    """ConfigError where no master of a standalone cluster can be reached; Spark itself tries for a minute."""
    if not master.startswith("spark://"):
        return
    reason = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        except ValueError:
            reason = "it has no port, which is 7077 in most clusters"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
    raise ConfigError(f"no Spark master answers at {master} ({reason}); start it, or give another one with --master")


def check_executors(session: "SparkSession") -> None:
    """ConfigError where executors have another Hoploom than this process, or none, or cannot run Python at all."""
    tasks, tag = max(2, session.sparkContext.defaultParallelism), f"hoploom-{secrets.token_hex(8)}"
    asked = session.range(tasks, numPartitions=tasks).mapInArrow(_asked(), "python string, has string, lacks string")
    late = threading.Event()

    def give_up() -> None:
        late.set()
        session.sparkContext.cancelJobsWithTag(tag)

    timer = threading.Timer(EXECUTOR_SECONDS, give_up)
    timer.start()
    session.sparkContext.addJobTag(tag)
    try:
        rows = asked.collect()
    except Exception as error:  # Py4J's, Spark's and Java's have no common base
        if late.is_set():
            what = f"the cluster gave no executor that runs a task within {EXECUTOR_SECONDS:.0f} s"
            way_out = "its page shows which cores and memory are free; ask for less with spark.executor.memory"
            raise ConfigError(f"{what}; {way_out}") from error
        raise python_problem(error) or ConfigError(f"Spark's executors run no tasks: {reason_of(error)}") from error
    finally:
        timer.cancel()
        session.sparkContext.removeJobTag(tag)
    for row in rows:
        if row["lacks"]:
            raise _lacking(row["lacks"], f" (it is {row['python']})")
        if row["has"] != hoploom.__version__:
            what = f"Spark's executors have Hoploom {row['has']}, but you run Hoploom {hoploom.__version__}"
            raise ConfigError(f"{what}; give both the same version ({row['python']} is the executors' Python)")


def _asked() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task answers. It is no function of the module: Spark ships its code, which needs no Hoploom to run."""

    def answer(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        told = {"python": sys.executable, "has": "", "lacks": ""}
        try:
            import hoploom

            told["has"] = hoploom.__version__
            importlib.import_module("hoploom.ingest.stream")
        except ImportError as error:
            told["lacks"] = error.name or str(error)
        for _ in batches:
            pass
        yield pyarrow.RecordBatch.from_pylist([told])

    return answer


def python_problem(error: Exception) -> ConfigError | None:
    """What is wrong with the Python of executors, by the error of a job; None if it is something else."""
    text = str(error)
    if missing := re.search(r"ModuleNotFoundError: No module named '(\w+)", text):
        return _lacking(missing[1])
    if program := re.search(r'Cannot run program "([^"]*)"', text):
        return ConfigError(
            f"Spark's executors have no Python at {program[1]}; set PYSPARK_PYTHON to where they have it"
        )
    if versions := re.search(r"different version: ([\d.]+\d) than that in driver: ([\d.]+\d)", text):
        return ConfigError(f"Spark's executors have Python {versions[1]}, but you run Python {versions[2]}; {SHIP}")
    if "Python worker exited unexpectedly" in text or NOT_BEGUN.search(text):
        what = "the Python process of a task was ended, as it is where memory runs out"
        return ConfigError(f"{what}; give executors more of it (spark.executor.memoryOverhead), or lower --memory")
    return None


def unreadable_file(error: Exception) -> str | None:
    """The file that Spark could not read; None if something else went wrong."""
    found = next((at for text in (str(error), *_causes(error)) if (at := UNREADABLE_FILE.search(text))), None)
    return None if found is None else unquote(found[1]).removeprefix("file://")


def _causes(error: Exception) -> Iterator[str]:
    """What Java says of an error, from the outermost to the first."""
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while cause is not None:
        yield str(cause.toString())
        cause = cause.getCause()


def reason_of(error: Exception) -> str:
    """The line of a trace, Java's or Python's, that says what went wrong."""
    lines = [line for line in str(error).splitlines() if line[:1] not in ("", " ", "\t")]
    told = [line for line in lines if not line.startswith(UNTOLD)] or lines or [type(error).__name__]
    return told[-1 if "Traceback (" in str(error) else 0].removeprefix(": ")


def _lacking(module: str, where: str = "") -> ConfigError:
    return ConfigError(f"the Python of Spark's executors has no {module}{where}; {SHIP}")
