"""What Spark is doing now, in words: tasks that are done, and the address of Spark's own page."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyspark.sql import SparkSession

EVERY = 0.5  # seconds


@contextmanager
def watching(session: SparkSession, say: Callable[[str], None], tasks: int = 0, rows: str = "") -> Iterator[None]:
    """Say how far the jobs are that run in the block. `rows`: what the stage with so many tasks writes, in words."""
    done = threading.Event()

    def watch() -> None:
        said = ""
        while not done.wait(EVERY):
            with suppress(Exception):  # of a Spark that has just stopped; the block has an error of its own then
                text = _state(session.sparkContext, tasks, rows)
                if text and text != said:
                    say(text)
                    said = text

    thread = threading.Thread(target=watch, name="hoploom-spark", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _state(context: Any, tasks: int, rows: str) -> str:
    tracker, found = context.statusTracker(), []
    for number in tracker.getActiveStageIds():
        stage = tracker.getStageInfo(number)
        if stage is not None:
            failed = f", {stage.numFailedTasks} failed and run again" if stage.numFailedTasks else ""
            written = f"writing {rows}, " if rows and stage.numTasks == tasks else ""
            found.append(f"{written}{stage.numCompletedTasks:,} of {stage.numTasks:,} tasks{failed}")
    page = f" ({context.uiWebUrl})" if context.uiWebUrl else ""
    return "; ".join(found) + page if found else ""
