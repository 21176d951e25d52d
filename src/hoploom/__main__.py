"""Entry point of `hoploom` and `python -m hoploom`. Until a command runs, Ctrl-C ends the process at once.

Launchers that start modules can use it, such as `torchrun -m hoploom train run.toml`.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run one command and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from hoploom.cli import main as run_command

    return run_command()


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once. During imports, nothing needs closing, and a KeyboardInterrupt could be swallowed."""
    os.write(2, b"hoploom: interrupted\n")
    if "--json" in sys.argv:
        os.write(1, b'{"error": "interrupted", "exit_status": 130}\n')
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
