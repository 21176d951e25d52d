"""Open a Spark session, in this process's Spark or a new one, and check that executors can work.

Checks cost a second and one small job: Java runs, the master answers, executors have this version of Hoploom. Without
the checks, a mistake shows after minutes, as a Java stack trace. Spark's errors are raised as Hoploom's.
"""

import base64
import importlib
import json
import re
import secrets
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyspark import SparkContext
from pyspark.sql import SparkSession

import hoploom
from hoploom.errors import ConfigError, DataError, HoploomError
from hoploom.ranks.environment import spark_driver_options

STATIC = {  # settings of a process
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",  # no Hive: nothing is written into the working directory
}
SETTINGS = {  # of a session
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.legacy.parquet.nanosAsLong": "true",  # else such columns are refused
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",  # fewer tasks for small frames that are kept
    # a frame without rows keeps its partitions: each has a task that writes an empty piece
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
QUICK_JAVA = "-XX:TieredStopAtLevel=1"  # a driver only plans: compiling better takes longer than it saves
PYTHON = "spark.pyspark.python"  # the Python of executors
LEAST_JAVA, LEAST_SPARK = 17, 4
ANSWER_SECONDS = 5.0
EXECUTOR_SECONDS = 180.0  # a cluster may start hosts first
JAVA = '"${JAVA_HOME:+$JAVA_HOME/bin/}java" -version'  # the one that Spark starts
GET_JAVA = f"install Java {LEAST_JAVA} or later, and set JAVA_HOME to its folder if it is not the `java` on your PATH"
SHIP = (
    "install it on every host, or ship an environment that has it: pack one with venv-pack or conda-pack, and give "
    "--conf spark.archives=environment.tar.gz#environment --conf spark.pyspark.python=./environment/bin/python"
)
MARK = re.compile(r"hoploom-error:([A-Za-z0-9+/=]+):")
NOT_BEGUN = re.compile(  # a Python process that ended before it had a pid
    r"java\.io\.EOFException(\s+at \S+){0,9}\s+at org\.apache\.spark\.api\.python\."
)
UNREADABLE_FILE = re.compile(r"while reading file (\S+?)\.(?:\s|$)")
NO_REASON = (  # lines of a trace that do not say what went wrong
    "An error occurred while",
    "An exception was thrown",
    "Traceback (",
    "Driver stacktrace",
    "Caused by",
    "SQLSTATE",
)


def active_session() -> SparkSession | None:
    """Return the Spark session of this process, even if another thread began it; None if there is none."""
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:
        active = SparkSession.builder.getOrCreate()
    return active


@contextmanager
def spark_session(folder: Path, memory: int, master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a Spark session, set up such that all clusters build equal stores. Spark's local files go to `folder`."""
    active = active_session()
    if active is None:
        check_java()
        check_master(master)
    with warnings.catch_warnings(), ExitStack() as stack:
        # pyspark warns of pandas, which is not used here
        warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
        with explained(f"Spark at {master!r} does not start", ConfigError):
            started = _started(folder, memory, master, conf) if active is None else active
            if active is None:
                stack.callback(started.stop)
            if int(started.version.split(".")[0]) < LEAST_SPARK:
                what = f"this session has Spark {started.version}"
                raise ConfigError(f"{what}; Hoploom needs Spark {LEAST_SPARK} or later")
            if not hasattr(started, "_sc"):
                what = "this session is one of Spark Connect, which gives no access to the tasks of its jobs"
                raise ConfigError(f"{what}; take a cluster with dedicated access, or start Hoploom with spark-submit")
            session = started.newSession()
            context = session.sparkContext
            is_local = str(context.master).startswith("local")
            ours = sys.executable if is_local and context.pythonExec == "python3" else None
            # Spark itself obeys this setting only if spark-submit started it.
            context.pythonExec = context.getConf().get(PYTHON) or ours or context.pythonExec
            for name, value in SETTINGS.items():
                session.conf.set(name, value)
        if not is_local:
            check_executors(session)
        yield session


def _started(folder: Path, memory: int, master: str, conf: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("hoploom")
    settings = dict(STATIC)
    if master.startswith("local"):  # all in one process: no name service, no other folders
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        settings |= {"spark.local.dir": str(folder), "spark.sql.shuffle.partitions": "8"}
        settings |= {"spark.driver.memory": f"{max(512, memory >> 20)}m"}
    settings |= {"spark.sql.warehouse.dir": str(folder / "warehouse")}
    for name, value in (settings | dict(conf)).items():
        builder = builder.config(name, value)
    with nullcontext() if master.startswith("local") else spark_driver_options(QUICK_JAVA):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")  # errors are raised here
    return session


def spark_page(session: SparkSession) -> str:
    """Return text for the end of a progress line: the address of the page that shows Spark's tasks, or nothing."""
    page = session.sparkContext.uiWebUrl
    return f"; {page} shows Spark's tasks" if page else ""


# --- checks --------------------------------------------------------------------------------------


def check_java() -> None:
    """Raise ConfigError if there is no Java, or one that is too old for Spark."""
    done = subprocess.run(["/bin/sh", "-c", JAVA], capture_output=True, text=True, timeout=60, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)[^"]*"', done.stderr)
    if done.returncode or version is None:
        reason = done.stderr.strip().split("\n")[-1].removeprefix("/bin/sh: 1: ")
        raise ConfigError(f"Spark needs Java, which does not start ({reason}); {GET_JAVA}")
    if int(version[1]) < LEAST_JAVA:
        raise ConfigError(f"Spark needs Java {LEAST_JAVA} or later, and finds {version[0]}; {GET_JAVA}")


def check_master(master: str) -> None:
    """Raise ConfigError if no master of a standalone cluster can be reached; Spark itself tries for a minute."""
    if not master.startswith("spark://"):
        return
    reason = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            return socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        except ValueError:
            reason = "it has no port, which is 7077 in most clusters"
        except OSError as error:
            reason = error.strerror or str(error)
    raise ConfigError(f"no Spark master answers at {master} ({reason}); start it, or give another one with --master")


def check_executors(session: SparkSession) -> None:
    """Raise ConfigError if executors have no Hoploom, another version than this process, or cannot run Python."""
    tasks, tag = max(2, session.sparkContext.defaultParallelism), f"hoploom-{secrets.token_hex(8)}"
    asked = session.range(tasks, numPartitions=tasks).mapInArrow(_reported(), "python string, has string, lacks string")
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


def _reported() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a task that reports an executor's Python and Hoploom. Nested, so that it also runs without Hoploom."""

    def report(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        found = {"python": sys.executable, "has": "", "lacks": ""}
        try:
            import hoploom

            found["has"] = hoploom.__version__
            importlib.import_module("hoploom.ingest.stream")
        except ImportError as error:
            found["lacks"] = error.name or str(error)
        for _ in batches:
            pass
        yield pyarrow.RecordBatch.from_pylist([found])

    return report


# --- errors --------------------------------------------------------------------------------------


@contextmanager
def explained(what: str, kind: type[HoploomError]) -> Iterator[None]:
    """Raise an error of Spark in this block as one of Hoploom: of type `kind`, unless a more exact error is known."""
    try:
        yield
    except HoploomError:
        raise
    except Exception as error:  # Py4J's, Spark's and Java's have no common base
        known = _received(error) or python_problem(error) or _unreadable_file(error)
        raise known or kind(f"{what}: {reason_of(error)}") from error


def sendable(error: HoploomError) -> RuntimeError:
    """Encode an executor's error in the text of a RuntimeError, which reaches the driver as part of Spark's trace."""
    encoded = json.dumps([type(error).__name__, str(error)]).encode()
    return RuntimeError(f"hoploom-error:{base64.b64encode(encoded).decode()}:")


def _received(error: BaseException) -> HoploomError | None:
    """Return the error that an executor encoded with `sendable`; None if Spark itself failed."""
    found = MARK.search(str(error))
    if found is None:
        return None
    name, message = json.loads(base64.b64decode(found[1]))
    kinds: list[type[HoploomError]] = [HoploomError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    by_name: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    return by_name.get(name, DataError)(message)  # type: ignore[no-any-return]


def python_problem(error: Exception) -> ConfigError | None:
    """Return an error that explains what is wrong with the executors' Python; None if something else failed."""
    text = str(error)
    if missing := re.search(r"ModuleNotFoundError: No module named '(\w+)", text):
        return _lacking(missing[1])
    if program := re.search(r'Cannot run program "([^"]*)"', text):
        way_out = "set PYSPARK_PYTHON to where they have it"
        return ConfigError(f"Spark's executors have no Python at {program[1]}; {way_out}")
    if versions := re.search(r"different version: ([\d.]+\d) than that in driver: ([\d.]+\d)", text):
        return ConfigError(f"Spark's executors have Python {versions[1]}, but you run Python {versions[2]}; {SHIP}")
    if "Python worker exited unexpectedly" in text or NOT_BEGUN.search(text):
        what = "the Python process of a task was ended, as it is where memory runs out"
        return ConfigError(f"{what}; give executors more of it (spark.executor.memoryOverhead), or lower --memory")
    return None


def _unreadable_file(error: Exception) -> DataError | None:
    """Return an error that names the file that Spark could not read; None if something else went wrong."""
    texts, cause = [str(error)], getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while cause is not None:  # from the outermost exception of Java's to the first
        texts.append(str(cause.toString()))
        cause = cause.getCause()
    found = next((at for text in texts if (at := UNREADABLE_FILE.search(text))), None)
    path = "" if found is None else unquote(found[1]).removeprefix("file://")
    return DataError(f"{path} cannot be read; it is damaged or cut short, so write it again") if path else None


def reason_of(error: Exception) -> str:
    """Return the line of a Java or Python stack trace that gives the reason."""
    lines = [line for line in str(error).splitlines() if line[:1] not in ("", " ", "\t")]
    reasons = [line for line in lines if not line.startswith(NO_REASON)] or lines or [type(error).__name__]
    return reasons[-1 if "Traceback (" in str(error) else 0].removeprefix(": ")


def _lacking(module: str, where: str = "") -> ConfigError:
    return ConfigError(f"the Python of Spark's executors has no {module}{where}; {SHIP}")
