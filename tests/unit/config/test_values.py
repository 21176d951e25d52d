"""Amounts as people write them, read and written back."""

from typing import Any

import pytest

from hoploom.config.values import (
    as_bytes,
    as_count,
    as_seconds,
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
