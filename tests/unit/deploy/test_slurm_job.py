"""What is known of a Slurm job. There is no Slurm: scripts answer in the place of its commands."""

import os
from pathlib import Path

import pytest

from hoploom.deploy.slurm_job import Output, follow


@pytest.mark.parametrize(
    ("accounted", "expected"),
    [("COMPLETED|0:0", ("COMPLETED", 0)), ("FAILED|3:0", ("FAILED", 3)), ("CANCELLED by 1000|0:15", ("CANCELLED", 0))],
)
def test_a_job_that_the_controller_has_forgotten_is_found_in_the_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounted: str, expected: tuple[str, int]
) -> None:
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    for name, text in {"scontrol": forgotten, "sacct": f"echo '{accounted}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended = follow("7", Output(), silence=0.1)
    assert (ended.state, ended.code) == expected
