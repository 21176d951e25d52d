"""Nothing outlives the process that started it, however that ended."""

import ctypes
import os
import signal
import sys
import threading

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; elsewhere than on Linux, a lost store ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def die_with_stdin() -> None:
    """End this process when stdin ends: with the last process that holds its other end, whichever thread opened it."""
    threading.Thread(target=_wait_for_the_end, name="lifeline", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
