"""A Spark session, in the Spark that this process has already or else in one of our own; Spark's errors as ours."""

import base64
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from hoploom import errors
from hoploom.errors import ConfigError, DataError, HoploomError
from hoploom.ingest.spark.checks import (
    check_executors,
    check_java,
    check_master,
    check_session,
    python_problem,
    reason_of,
    unreadable_file,
)
from hoploom.ranks.environment import spark_driver_options

STATIC = {  # of a process
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",  # no Hive: nothing is written into the folder we are in
}
SETTINGS = {  # of a session
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.legacy.parquet.nanosAsLong": "true",  # else such columns are refused
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",  # small frames that are kept: fewer tasks
    # a frame without rows keeps its partitions: each has a task that writes an empty piece
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
QUICK_JAVA = "-XX:TieredStopAtLevel=1"  # a driver only plans: to compile that well takes longer than to run it
PYTHON = "spark.pyspark.python"  # what executors run
MARK = re.compile(r"hoploom-error:([A-Za-z0-9+/=]+):")


@contextmanager
def spark_session(folder: Path, memory: int, master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session with the settings that the same bytes need. `folder` is for what one process keeps on its disk."""
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:  # begun by another thread
        active = SparkSession.builder.getOrCreate()
    if active is None:
        check_java()
        check_master(master)
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module="pyspark"
        )  # of pandas, which nothing here uses
        with explained(f"Spark at {master!r} does not start", ConfigError):
            started = _started(folder, memory, master, conf) if active is None else active
            if active is None:
                stack.callback(started.stop)
            check_session(started)
            session = started.newSession()
            _set_python(session)
            for name, value in SETTINGS.items():
                session.conf.set(name, value)
        if not str(session.sparkContext.master).startswith("local"):
            check_executors(session)
        yield session


def _started(folder: Path, memory: int, master: str, conf: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("hoploom")
    settings = dict(STATIC)
    if master.startswith("local"):  # all in one process: no name service, no folders but this one
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        settings |= {"spark.local.dir": str(folder), "spark.sql.shuffle.partitions": "8"}
        settings |= {"spark.driver.memory": f"{max(512, memory >> 20)}m"}
    settings |= {"spark.sql.warehouse.dir": str(folder / "warehouse")}
    for name, value in (settings | dict(conf)).items():
        builder = builder.config(name, value)
    with nullcontext() if master.startswith("local") else spark_driver_options(QUICK_JAVA):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")  # what goes wrong is raised here
    return session


def _set_python(session: SparkSession) -> None:
    """What executors run as Python: on this machine our own, unless the user says something else."""
    context = session.sparkContext
    ours = sys.executable if str(context.master).startswith("local") and context.pythonExec == "python3" else None
    python = context.getConf().get(PYTHON) or ours  # Spark itself obeys the setting only where spark-submit started it
    if python is not None:
        context.pythonExec = python


# --- errors --------------------------------------------------------------------------------------


class DamagedFileError(DataError):
    """Spark cannot read a file."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} cannot be read; it is damaged or cut short, so write it again")
        self.path = path


def sent(error: HoploomError) -> RuntimeError:
    """An error of ours on an executor, so that it survives Spark's traces."""
    told = json.dumps([type(error).__name__, str(error)]).encode()
    return RuntimeError(f"hoploom-error:{base64.b64encode(told).decode()}:")


def received(error: BaseException) -> HoploomError | None:
    """The error that an executor sent; None where Spark itself failed."""
    found = MARK.search(str(error))
    if found is None:
        return None
    name, message = json.loads(base64.b64decode(found[1]))
    kinds: dict[str, Any] = {kind.__name__: kind for kind in _kinds(HoploomError)}
    return kinds.get(name, errors.DataError)(message)  # type: ignore[no-any-return]


def _kinds(kind: type[HoploomError]) -> Iterator[type[HoploomError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


@contextmanager
def explained(what: str, kind: type[HoploomError]) -> Iterator[None]:
    """Spark's errors as ours."""
    try:
        yield
    except HoploomError:
        raise
    except Exception as error:  # Py4J's, Spark's and Java's have no common base
        file = unreadable_file(error)
        told = received(error) or python_problem(error) or (file and DamagedFileError(file))
        raise told or kind(f"{what}: {reason_of(error)}") from error
