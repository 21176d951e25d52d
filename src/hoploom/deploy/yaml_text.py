"""Plain values as YAML text, for people to read and kubectl to take. Writes only: no library is needed for that.

What could be read as anything but itself is quoted as JSON, which YAML reads, too.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # no texts to YAML 1.1


def documents(values: Sequence[Mapping[str, Any]]) -> str:
    """Several documents in one text.

    >>> print(documents([{"kind": "Service", "spec": {"ports": [{"port": 7700}]}}]), end="")
    kind: Service
    spec:
      ports:
        - port: 7700
    """
    return "---\n".join("".join(f"{line}\n" for line in _lines(value)) for value in values)


def _lines(value: Any) -> Iterator[str]:
    """A mapping or a list that holds something, line by line."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _entry(f"{_scalar(name)}:", entry)
    else:
        for entry in value:
            if not _is_long(entry):
                yield from _entry("-", entry)
                continue
            first, *rest = _lines(entry)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(name: str, value: Any) -> Iterator[str]:
    if _is_long(value):
        yield name
        yield from (f"  {line}" for line in _lines(value))
    elif _is_block(value):
        yield f"{name} |-"
        yield from (f"  {line}" for line in value.split("\n"))
    else:
        yield f"{name} {_scalar(value)}"


def _is_long(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _is_block(value: Any) -> bool:
    """Whether it is a text of several lines that YAML gives back as they are."""
    lines = value.split("\n") if isinstance(value, str) else []
    return len(lines) > 1 and all(line.isprintable() and line.strip() for line in lines) and lines[0][0] != " "


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
