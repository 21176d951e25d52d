"""Loggers, which get a run's numbers besides its journal: TensorBoard, W&B, MLflow, or your own.

Each logger has a thread of its own, so that a slow network holds up no step. Training waits for it before the first
step and after the last, a minute at most. One that fails is left out for the rest of the run, with one warning: the
journal has all numbers anyway.
"""

import queue
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from hoploom.config.extras import check_installed
from hoploom.errors import ConfigError

NAMES = ("tensorboard", "wandb", "mlflow")  # also those of their packages
MOST_WAITING = 100_000  # entries that a slow logger may be behind
BEGIN_SECONDS, POLL_SECONDS = 60.0, 0.5  # that training waits for a logger to begin, and between looks at signals
CLOSE_SECONDS, FAILED_SECONDS = 60.0, 10.0  # that it waits for a logger to end; if training failed
METHODS = ("begin", "log", "close")
SEND_SECONDS, MOST_SENT = 1.0, 500  # MLflow takes many numbers in one request

Values = Mapping[str, float]


class Logger(Protocol):
    """A receiver of numbers. Rank 0 calls its methods one after the other, in a thread of the logger's own."""

    def begin(self, step: int) -> None:
        """Begin, or continue, after this many steps."""

    def log(self, step: int, values: Values) -> None:
        """Take the values of a step: `step/loss`, `epoch/accuracy`, `test/accuracy`, ..."""

    def close(self, *, failed: bool) -> None:
        """End, because training has ended or failed. `begin` may be called again."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for a logger that is unknown, or whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"there is no logger {name!r}; give one of {list(NAMES)}, or an object of your own")
        check_installed(name, f"the logger {name!r}")


def make_loggers(
    loggers: Sequence[str | Logger] | None, folder: Path, settings: Mapping[str, Any]
) -> list["LoggerThread"]:
    """Return loggers, given by name or as objects, in threads. None means TensorBoard, if it is installed."""
    if loggers is None:
        loggers = ["tensorboard"] if find_spec("tensorboard") is not None else []
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise ConfigError(f"loggers is {loggers!r}; give a list, e.g. ['tensorboard'] or [MyLogger()]")
    check_loggers([entry for entry in loggers if isinstance(entry, str)])
    for entry in loggers:
        missing = [name for name in METHODS if not callable(getattr(entry, name, None))]
        if isinstance(entry, type) or (missing and not isinstance(entry, str)):
            why = f"without {missing[0]}()" if missing else "which is a class"
            raise ConfigError(
                f"loggers has {entry!r}, {why}; give one of {list(NAMES)}, or an object with begin(), log() and close()"
            )
    kinds: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoardLogger(folder),
        "wandb": lambda: WandbLogger(folder, settings),
        "mlflow": lambda: MlflowLogger(folder, settings),
    }
    return [LoggerThread(kinds[entry]() if isinstance(entry, str) else entry) for entry in loggers]


class LoggerThread:
    """One logger in a thread of its own, which holds up no step and never ends training."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._name = logger, type(logger).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: Thread | None = None
        self._ready = Event()
        self._failure: str | None = None
        self._has_warned = False

    def begin(self, step: int) -> None:
        """Start the thread, and wait at most BEGIN_SECONDS until the logger is ready: it may ask for a login."""
        if self._failure is not None:
            return
        self._calls, self._ready = queue.Queue(MOST_WAITING), Event()
        self._thread = Thread(target=self._run, args=(self._calls, self._ready), name=self._name, daemon=True)
        self._thread.start()
        self._put(lambda: self._logger.begin(step))
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self._ready.wait(POLL_SECONDS) and time.monotonic() < deadline:
            pass  # a Ctrl-C just before a wait does not end it, but is seen after it
        self._warn()

    def log(self, step: int, values: Values) -> None:
        """Queue numbers for the logger."""
        if self._thread is not None:
            self._put(lambda: self._logger.log(step, values))
            self._warn()

    def close(self, *, failed: bool = False) -> None:
        """Wait at most CLOSE_SECONDS until the logger has taken everything, unless it is not even ready."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._put(lambda: self._logger.close(failed=failed))
        self._put(None)
        seconds = FAILED_SECONDS if failed else CLOSE_SECONDS
        if self._ready.is_set():
            thread.join(seconds)
        elif self._failure is None:
            self._failure = "its begin() had not returned when training ended"
        if thread.is_alive() and self._failure is None:
            self._failure = f"it had not taken all numbers {seconds:g} seconds after the last one"
        self._warn(goes_on=False)

    def _put(self, call: Callable[[], None] | None) -> None:
        if self._failure is not None:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = f"it is {MOST_WAITING:,} steps behind"

    def _run(self, calls: "queue.Queue[Callable[[], None] | None]", ready: Event) -> None:
        try:
            while self._failure is None and (call := calls.get()) is not None:
                call()
                ready.set()
        except Exception as error:  # whatever a logger raises, training goes on: _warn reports it in the main thread
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            ready.set()

    def _warn(self, *, goes_on: bool = True) -> None:
        if self._failure is None or self._has_warned:
            return
        self._has_warned, self._thread = True, None
        message = f"{self._name} failed and gets nothing more of this run ({self._failure:.500})"
        way_on = "training goes on, and the" if goes_on else "the"
        warnings.warn(f"{message}; {way_on} journal in the run's folder has all numbers", stacklevel=_users_level())


def _users_level() -> int:
    """Return the stack level of the user's line, as seen by the caller."""
    level, frame = 0, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hoploom.", "contextlib")):
        level, frame = level + 1, frame.f_back
    return level


# --- loggers by name -----------------------------------------------------------------------------


class TensorBoardLogger:
    """Writes event files into the folder's `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """One run of W&B, which reads its own variables: WANDB_PROJECT, WANDB_MODE, ..."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._id_file, self._settings = folder / "wandb.id", settings
        self._run: Any = None

    def begin(self, step: int) -> None:
        import wandb

        before = _read_id(self._id_file, step)
        options: dict[str, Any] = {} if before is None else {"id": before, "resume": "allow"}
        self._run = wandb.init(config=dict(self._settings), reinit="create_new", **options)
        self._run.define_metric("*", step_metric="step")  # W&B's own step cannot go back to a checkpoint
        _write_id(self._id_file, self._run.id)

    def log(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """One run of MLflow, which reads its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ..."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._id_file, self._settings = folder / "mlflow.id", settings
        self._metrics: list[Any] = []
        self._run_id, self._sent = "", 0.0

    def begin(self, step: int) -> None:
        import mlflow

        before = _read_id(self._id_file, step)
        self._run_id = mlflow.start_run(run_id=before).info.run_id
        if before is None:
            mlflow.log_params({name: value for name, value in self._settings.items() if value is not None})
            _write_id(self._id_file, self._run_id)

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = time.time()
        self._metrics += [Metric(name, value, int(1000 * now), step) for name, value in values.items()]
        if now - self._sent >= SEND_SECONDS or len(self._metrics) >= MOST_SENT:
            self._send()

    def _send(self) -> None:
        from mlflow import MlflowClient

        MlflowClient().log_batch(self._run_id, metrics=self._metrics)
        self._metrics, self._sent = [], time.time()

    def close(self, *, failed: bool) -> None:
        import mlflow

        self._send()
        mlflow.end_run("FAILED" if failed else "FINISHED")


def _read_id(path: Path, step: int) -> str | None:
    """Return the id of the run to continue, if there is one."""
    return path.read_text().strip() if step and path.exists() else None


def _write_id(path: Path, run_id: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{run_id}\n")
