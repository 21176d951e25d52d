"""TOML: values that are written are read back the same, and every key is found in its line."""

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hoploom.config.rules import lines_of
from hoploom.config.values import as_toml

NASTY = r'''# [no]
"a = 1" = "x # = ["   # a comment with ] and "
b.'c.d' . e = [ # not [x]
  "]", '#"', """
f = 1 \""" g = 2
""", [[{h = {i = 1}}]],
]
j = """ends in two quotes"""""
k = \'\'\'\
l = \'\'\'

   [ m . "n.\u0041" ]   # here
o = { p.q = 1979-05-27 07:32:00, "r" = "}", s = [{t = 1}] }  # there
u=1_000
[[v]]
w = true
[[v]]
w = false'''.replace("\\'", "'")


def test_the_line_of_every_key_outside_of_lists_is_found() -> None:
    tomllib.loads(NASTY)
    lines = {".".join(f"<{name}>" if "." in name else name for name in path): n for path, n in lines_of(NASTY).items()}
    assert lines == {
        "a = 1": 2,
        "b": 3,
        "b.<c.d>": 3,
        "b.<c.d>.e": 3,
        "j": 8,
        "k": 9,
        "m": 12,
        "m.<n.A>": 12,
        "m.<n.A>.o": 13,
        "m.<n.A>.o.p": 13,
        "m.<n.A>.o.p.q": 13,
        "m.<n.A>.o.r": 13,
        "m.<n.A>.o.s": 13,
        "m.<n.A>.u": 14,
        "v": 15,
        "v.w": 16,
    }


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.datetimes()
    | st.dates()
    | st.times()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=4)


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_a_value_that_is_written_is_read_back_the_same(value: Any) -> None:
    assert tomllib.loads(f"value = {as_toml(value)}") == {"value": value}


@given(st.lists(st.tuples(NAMES, TABLES, st.integers(0, 3)), max_size=4, unique_by=lambda entry: entry[0]))
@settings(max_examples=60, deadline=None)
def test_the_lines_are_those_that_were_written(sections: list[tuple[str, dict[str, Any], int]]) -> None:
    """Values are written as they are, with a comment full of brackets and a long string behind each."""
    written, expected = [""], {}
    for section, table, blanks in sections:
        written += ["# '" * 3] * blanks + [f"[{as_toml(section)}] # ["]
        expected[(section,)] = len(written)
        for name, value in table.items():
            written += [f"{as_toml(name)} = [{as_toml(value)}, # ]", '"""', '"""]']
            expected[(section, name)] = len(written) - 2
    text = "\n".join(written)
    assert set(tomllib.loads(text)) == {section for section, _, _ in sections}
    found = lines_of(text)
    assert {path: found[path] for path in expected} == expected
