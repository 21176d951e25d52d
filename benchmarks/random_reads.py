"""Compiles random_reads.cpp into the build folder and calls it."""

import ctypes
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from report import ROOT
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = ROOT / "build" / "bench" / "random_reads.so"
ENTRY_BYTES = 4


def make_reader(entries: Tensor, num_reads: int) -> Callable[[int], float]:
    """(number of the repetition) -> millions of reads per second at random places of the tensor."""
    if entries.element_size() != ENTRY_BYTES or entries.numel() >= 1 << 32:
        raise ValueError(f"{entries.numel()} entries of {entries.element_size()} bytes; 4-byte entries are read")
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", str(SOURCE), "-o", str(LIBRARY)], check=True, timeout=120)
    function = ctypes.CDLL(str(LIBRARY)).random_reads
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    function.restype = ctypes.c_uint64

    def read(number: int) -> float:
        begin = time.perf_counter()
        function(entries.data_ptr(), entries.numel(), num_reads, number * num_reads)
        return num_reads / (time.perf_counter() - begin) / 1e6

    return read
