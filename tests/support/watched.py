"""A command and the most memory it held, as the kernel counts it.

A process begins with the peak of the one that forked it, so a small one stands between pytest and the command.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WATCH = """
import os, subprocess, sys, threading
process = subprocess.Popen(sys.argv[2:])
deadline = threading.Timer(float(sys.argv[1]), process.kill)
deadline.start()
_, status, usage = os.wait4(process.pid, 0)
deadline.cancel()
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Watched(NamedTuple):
    code: int
    peak: int  # bytes
    said: str


def watched(command: Sequence[str], folder: Path | None = None, seconds: float = 1200) -> Watched:
    script = [sys.executable, "-c", WATCH, str(seconds), *command]
    done = subprocess.run(script, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said, _, peak = done.stdout.rstrip("\n").rpartition("\n")
    return Watched(done.returncode, int(peak) * 1024, said)
