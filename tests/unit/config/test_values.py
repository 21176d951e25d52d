"""Amounts and TOML: what people write is read, what is written is read back, and every key is found in its line."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoploom.config.rules import lines_of
from hoploom.config.values import (
    as_bytes,
    as_count,
    as_seconds,
    as_toml,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_fanouts,
    parse_number,
    parse_share_or_bytes,
)
from hoploom.errors import ConfigError


def test_amounts_are_read_as_people_write_them() -> None:
    counts = {"1e10": 10**10, "10_000": 10**4, "1,000": 1000, "2.5M": 2_500_000, "1B": 10**9, " 7 ": 7}
    assert {text: parse_count("n", text) for text in counts} == counts
    sizes = {"512GB": 512 * 10**9, "64GiB": 64 << 30, "1.5 TB": 15 * 10**11, "4096": 4096}
    assert {text: parse_bytes("m", text) for text in sizes} == sizes
    rates = {"100Gb": 12.5e9, "12.5GB": 12.5e9, "100Gb/s": 12.5e9, "10Gbit": 1.25e9, "25Gbps": 3.125e9}
    assert {text: parse_bandwidth("n", text) for text in rates} == pytest.approx(rates)
    assert parse_fanouts("f", "15, 10,-1") == parse_fanouts("f", "[15,10,-1]") == (15, 10, -1)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_count, "many", "--x is 'many'; give a whole number of at least 0, such as 10000, 1e10 or 2.5M"),
        (parse_count, "-5", "--x is '-5'; give a whole number"),
        (parse_count, "1.5", "--x is '1.5'; give a whole number"),
        (parse_count, "1e99", "at most 1e18"),
        (parse_count, "1e999999999999999999999", "--x|is no number"),
        (parse_count, "nan", "--x is 'nan'"),
        (parse_bytes, "4 gigs", "--x is '4 gigs'; give a size such as 512GB or 64GiB"),
        (parse_bytes, "512Gb", "give a size such as 512GB"),
        (parse_bytes, "0GB", "give a size above 0"),
        (parse_bandwidth, "fast", "--x is 'fast'; give bits such as 100Gb, or bytes such as 12.5GB"),
        (parse_bandwidth, "100", "give bits such as 100Gb"),
        (parse_fanouts, "15;10", "give one count per layer, e.g. 15,10,5"),
        (parse_fanouts, "", "give one count per layer"),
        (parse_fanouts, "-2", "give one count per layer"),
        (parse_number, "much", "--x is 'much'; give a number such as 0.1"),
    ],
)
def test_a_bad_amount_is_refused_with_the_way_out(read: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("--x", text)


def test_a_share_is_a_float_and_bytes_are_an_int() -> None:
    given = {"20%": 0.2, "12.5 %": 0.125, "0%": 0.0, "100%": 1.0, 0.2: 0.2, "4GB": 4 * 10**9, "4 GiB": 4 << 30, 7: 7}
    found = {value: parse_share_or_bytes("x", value, "give some") for value in given}
    assert found == given
    assert {value: type(number) for value, number in found.items()} == {v: type(n) for v, n in given.items()}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "^x is .*; give some$") for value in ("120%", "-5%", "nan%", "%", "x%", "some", "", -1, 1.5, True)),
        ("0.5", "give '50%' for a share or '4GB' for bytes"),
        ("4096", "give '50%' for a share or '4GB' for bytes"),
        ("4 gigs", "give a size such as 512GB"),
    ],
)
def test_what_is_neither_a_share_nor_bytes_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_share_or_bytes("x", value, "give some")


def test_amounts_are_written_with_three_digits() -> None:
    assert [as_bytes(n) for n in (0, 999, 1000, 80e9, 5.12e12)] == ["0 B", "999 B", "1.00 kB", "80.0 GB", "5.12 TB"]
    assert [as_count(n) for n in (0, 1024, 999_999, 10**10)] == ["0", "1,024", "999,999", "10.0 B"]
    times = [as_seconds(s) for s in (0, 2e-5, 0.25, 90, 5400, 1e4, 1e6)]
    assert times == ["0 us", "20.0 us", "250 ms", "90.0 s", "90.0 min", "2.78 h", "11.6 days"]


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
    inner = {"": 12, ".o": 13, ".o.p": 13, ".o.p.q": 13, ".o.r": 13, ".o.s": 13, ".u": 14}
    outer = {"a = 1": 2, "b": 3, "b.<c.d>": 3, "b.<c.d>.e": 3, "j": 8, "k": 9, "m": 12, "v": 15, "v.w": 16}
    assert lines == outer | {f"m.<n.A>{key}": line for key, line in inner.items()}


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
def test_a_value_that_is_written_is_read_back_the_same(value: Any) -> None:
    assert tomllib.loads(f"value = {as_toml(value)}") == {"value": value}


@given(st.lists(st.tuples(NAMES, TABLES, st.integers(0, 3)), max_size=4, unique_by=lambda entry: entry[0]))
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
