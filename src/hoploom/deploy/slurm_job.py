"""A batch job of Slurm, from sbatch to its end, in one terminal: its output as it comes, its state, its exit status.

Slurm is asked for the job's state, often at first, then every few seconds, as operators of large clusters wish.
Its controller knows a job that ended for some minutes only (MinJobAge); the accounting does for longer.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hoploom.deploy.launch import ERROR
from hoploom.deploy.supervise import tells_of_another
from hoploom.errors import ConfigError, TrainError
from hoploom.ranks.stopping import put_back

COMMAND_DEADLINE = 60.0  # seconds for one command of Slurm's
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two looks at the job
SILENCE_DEADLINE = 300.0  # seconds that Slurm may not answer for: controllers are restarted
CANCEL_DEADLINE = 120.0  # seconds for a cancelled job to end: Slurm kills what is left after KillWait, mostly 30
ENDED = (  # a job in any other state may still print
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)
FAILURE = re.compile(  # what programs here say when they fail, behind whose line it is
    rf"(\S+ \| )?({ERROR.pattern}|srun: error: |.*\bfailed \(exitcode: )"
)


class JobState(NamedTuple):
    """What Slurm says of a job."""

    state: str  # "PENDING", "RUNNING", ...
    code: int = 0  # exit status of the script
    reason: str = ""  # why it waits
    output: str = ""  # the file with what it prints
    node: str = ""  # where its script runs

    @property
    def ended(self) -> bool:
        return self.state.startswith(ENDED)


@dataclass
class Output:
    """A growing file, shown as it grows, and the first line in it that tells of an error."""

    path: str = ""
    offset: int = 0
    seen: bool = False
    rest: str = ""  # a line that has no end yet
    first_error: str = ""
    is_consequence: bool = False

    def show(self, path: str) -> None:
        self.path = path or self.path
        file = Path(self.path)
        if not self.path or not file.is_file():
            return
        self.seen = True
        with file.open("rb") as opened:
            if opened.seek(0, 2) < self.offset:  # it begins anew when Slurm starts the job again
                self.offset = 0
            opened.seek(self.offset)
            grown = opened.read()
        self.offset += len(grown)
        text = grown.decode("utf-8", "replace")
        sys.stdout.write(text)
        sys.stdout.flush()
        *lines, self.rest = (self.rest + text).split("\n")
        self._note(lines)

    def _note(self, lines: Sequence[str]) -> None:
        """The first error is the first that tells of no other process' end; else the first."""
        for line in filter(FAILURE.match, lines):
            is_consequence = tells_of_another([line])
            if not self.first_error or (self.is_consequence and not is_consequence):
                self.first_error, self.is_consequence = line, is_consequence


def run(script: str) -> int:
    """Submit a script, show what the job prints, and return its exit status. Ctrl-C, or any error, cancels the job."""
    with submitted(script) as job:
        state = follow(job, Output())
    return state.code or int(state.state != "COMPLETED")


@contextmanager
def submitted(script: str) -> Iterator[str]:
    """The number of a job that is cancelled if this block is left by an error, Ctrl-C and SIGTERM among them.

    A terminal that is closed leaves the job to Slurm; SIGKILL does not.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        job = _submit(script)
        with _cancelled_if_killed(job):
            _say(f"submitted job {job}; Ctrl-C cancels it")
            try:
                yield job
            except BaseException:
                _cancel(job)
                raise
    finally:
        put_back({signal.SIGTERM: before})


@contextmanager
def _cancelled_if_killed(job: str) -> Iterator[None]:
    """While entered, a process of its own reads from this one: at an end without a word it cancels the job."""
    with subprocess.Popen(
        ["sh", "-c", 'read -r word || exec scancel "$1"', "sh", job],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what the terminal sends is for this process
    ) as watcher:
        assert watcher.stdin is not None
        end = watcher.stdin.fileno()

        def tell(word: bytes) -> None:
            with suppress(BrokenPipeError):  # it was killed, which must not hide how this block ends
                os.write(end, word + b"\n")

        def leave(number: int, frame: FrameType | None) -> None:
            tell(b"left")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        before = signal.getsignal(signal.SIGHUP)
        if before == signal.SIG_DFL:  # not under nohup
            signal.signal(signal.SIGHUP, leave)
        try:
            yield
        finally:
            put_back({signal.SIGHUP: before})
            tell(b"done")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def look(job: str) -> JobState | None:
    """The job as it is now; None: Slurm does not answer."""
    shown = _ask("scontrol", "--oneliner", "show", "job", job)
    if shown.returncode != 0:
        return _look_back(job) if "Invalid job id" in shown.stderr else None
    found = dict(re.findall(r"(?:^| )(\w+)=(.*?)(?= [\w/:]+=|$)", shown.stdout.strip()))
    code = int(found.get("ExitCode", "0:0").split(":")[0])
    reason = "" if found.get("Reason") in (None, "None") else found["Reason"]
    output = (
        found.get("StdOut", "").replace("%j", job).replace("%x", found.get("JobName", ""))
    )  # some versions leave it
    return JobState(found.get("JobState", ""), code, reason, output, found.get("BatchHost", ""))


def _look_back(job: str) -> JobState | None:
    """From Slurm's accounting, where there is one: the controller has forgotten the job."""
    shown = _ask("sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format", "State,ExitCode")
    found = re.match(r"(\w+)[^|]*\|(\d+):", shown.stdout)  # "CANCELLED by 1000|0:15"
    return JobState(found[1], int(found[2])) if found else None


# --- from submission to end ----------------------------------------------------------------------


def _submit(script: str) -> str:
    done = _ask("sbatch", "--parsable", text=script)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: ") or f"exit status {done.returncode}"
        raise ConfigError(f"sbatch refused the job: {said}; see section [slurm] of the cluster file")
    return done.stdout.strip().split(";")[0]


def follow(job: str, output: Output, silence: float = SILENCE_DEADLINE) -> JobState:
    """Show what it prints until it has ended. `silence`: seconds that Slurm may not answer for."""
    begun = answered = time.monotonic()
    reason = ""
    while True:
        report = look(job)
        if report is None and time.monotonic() > answered + silence:
            raise TrainError(f"Slurm has not told about job {job} for {silence:g} seconds; see squeue and sacct")
        if report is not None:
            answered = time.monotonic()
            if report.state == "PENDING" and report.reason not in (reason, "Priority"):
                reason = report.reason
                _say(f"job {job} waits: {reason}")
            output.show(report.output)
            if report.ended:
                _conclude(job, report, output)
                return report
        time.sleep(min(max(FIRST_PAUSE, (time.monotonic() - begun) / 20), LONGEST_PAUSE))


def _conclude(job: str, report: JobState, output: Output) -> None:
    """The first error last: where it is read. Slurm knows states that no exit status tells."""
    if output.path and not output.seen:
        _say(f"its output is in {output.path} on {report.node or 'its first node'}, which this host does not see")
    if report.state == "COMPLETED" and report.code == 0:
        return
    status = f"with exit status {report.code}" if report.state == "FAILED" else f"as {report.state}"
    _say(f"job {job} ended {status}" + (f"; first error: {output.first_error}" if output.first_error else ""))


def _cancel(job: str) -> None:
    """End the job, and wait until none of its processes is left."""
    _ask("scancel", job)
    deadline = time.monotonic() + CANCEL_DEADLINE
    while time.monotonic() < deadline:
        report = look(job)
        if report is not None and report.ended:
            _say(f"job {job} is cancelled")
            return
        time.sleep(FIRST_PAUSE)
    _say(f"job {job} has not ended {CANCEL_DEADLINE:g} seconds after scancel; see `squeue --jobs {job}`")


def _ask(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's, out of the terminal's process group: Ctrl-C is for this process to deal with."""
    try:
        return subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # words that are not UTF-8 go on as their bytes
            timeout=COMMAND_DEADLINE,
            check=False,
            process_group=0,
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {words[0]} on this host; launch from a host that submits to Slurm, or print the script "
            "with --dry-run and submit it there"
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {COMMAND_DEADLINE:g} seconds")


def _say(sentence: str) -> None:
    print(f"hoploom: {sentence}", file=sys.stderr, flush=True)
