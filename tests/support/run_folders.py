"""Folders as runs write them, without running anything."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECIPE = """\
store = "graph.store"

[task]
kind = "node-classification"

[model]
name = "sage"

[optimizer]
lr = 0.01
"""
STEPS_PER_EPOCH = 10
MACHINE = {"rank": 0, "host": "node7", "cpu": "Some CPU", "cores": 4, "host_cores": 8, "device": "cpu", "memory": 2**36}


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {"epoch": (step - 1) // STEPS_PER_EPOCH + 1, "step": step, "loss": 1 / step, "seeds": 100, "rows": 50}
    return line | {"learning_rate": 0.01, "seconds": 0.02, "wait_seconds": 0.001} | changes


def epoch_line(epoch: int, **changes: Any) -> dict[str, Any]:
    line = {"step": epoch * STEPS_PER_EPOCH, "epoch": epoch, "train_loss": 0.5, "accuracy": 1 - 1 / (epoch + 1)}
    return line | {"val_loss": 1 / epoch} | changes


def times_line(step: int, **changes: Any) -> dict[str, Any]:
    seconds = {"step": 0.2, "wait": 0.01, "forward": 0.08, "backward": 0.06, "optimizer": 0.02}
    line = {"at": 1000.0 + step, "step": step, "steps": 10, "seconds": seconds}
    line |= {"loader": {"sample": 0.03, "gather": 0.02}}
    return line | {"memory": {"private": (300 + step) << 20, "mapped": 200 << 20}} | changes


def start_line(step: int = 0, num_ranks: int = 1, at: float = 1000.0) -> dict[str, Any]:
    machines = [MACHINE | {"rank": rank} for rank in range(num_ranks)]
    return {"event": "start", "at": at, "step": step, "machines": machines, "versions": {"torch": "2.13.0"}}


def end_line(at: float = 1060.0, **changes: Any) -> dict[str, Any]:
    return {"event": "end", "at": at, "stopped": "done", "step": 30} | changes


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], *, end: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def write_run(folder: Path, num_steps: int = 30, **changes: Any) -> Path:
    """A finished run of one rank; `changes` are other contents for its files, None for none: steps=[...], recipe=..."""
    epochs = range(1, num_steps // STEPS_PER_EPOCH + 1)
    result = {"stopped": "done", "monitor": "accuracy", "best": 1 - 1 / (len(epochs) + 1), "test": {"accuracy": 0.7}}
    result["best_epoch"] = len(epochs)
    files: dict[str, Any] = {
        "steps": [step_line(step) for step in range(1, num_steps + 1)],
        "epochs": [epoch_line(epoch) for epoch in epochs],
        "times": [times_line(epoch * STEPS_PER_EPOCH) for epoch in epochs],
        "events": [start_line(), end_line()],
        "recipe": RECIPE,
        "result": result | {"num_parameters": 1234, "seconds": 60.0},
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    names = {"steps": "steps-rank0", "epochs": "metrics", "times": "times-rank0", "events": "events"}
    for name, file in names.items():
        if files[name] is not None:
            write_lines(folder / f"{file}.jsonl", files[name])
    if files["recipe"] is not None:
        (folder / "run.toml").write_text(files["recipe"])
    if files["result"] is not None:
        (folder / "result.json").write_text(json.dumps(files["result"]))
    return folder
