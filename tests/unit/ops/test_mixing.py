"""Keys of many values at once are those of each value, and who draws a single key imports no numpy."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hoploom import keys
from hoploom.ops.sample import mix_words

words64 = st.integers(0, (1 << 64) - 1)


@given(words64, st.lists(words64, max_size=5))
def test_mixed_words_are_the_mix_of_each(state: int, values: list[int]) -> None:
    mixed = mix_words(np.full(1, state, dtype=np.uint64), np.array(values, dtype=np.uint64))
    assert mixed.tolist() == [keys.mix(state, value) for value in values]


def test_keys_are_light_to_import() -> None:
    script = "import sys, hoploom.keys; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
