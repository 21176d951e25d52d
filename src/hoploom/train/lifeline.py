"""Nothing outlives the process that started it, however that ended."""

import ctypes
import os
import signal
import sys

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; elsewhere than on Linux, a lost store ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
