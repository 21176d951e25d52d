"""What a process of ours does about its imports."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, gc, sys, types
atexit.register(lambda: print("kept" if gc.get_freeze_count() else "collected"))  # what is registered later goes first
for version in sys.argv[1:]:
    sys.modules["triton"] = types.SimpleNamespace(__version__=version)
    sys.modules["triton._C.libtriton"] = None
from hoploom.system import keep_imports
keep_imports()
assert gc.get_freeze_count()
"""


@pytest.mark.parametrize(
    ("triton", "at_the_end"),
    [([], "kept"), (["3.2.0"], "kept"), (["3.7.1"], "kept"), (["3.9.0"], "collected"), (["3.10.0"], "collected")],
)
def test_imports_are_kept_to_the_end_but_for_what_complains_of_leaks(triton: list[str], at_the_end: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *triton], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (at_the_end, "")
