"""For the pages made of docstrings: examples behind >>> become blocks of code that can be copied."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^(?:>>>|\.\.\.)(?: .*)?$\n?)+", re.MULTILINE)


def fenced(text: str) -> str:
    """
    >>> fenced("Add.\\n\\n>>> add(1, 2)\\n")
    'Add.\\n\\n```python\\nadd(1, 2)\\n```\\n'
    """
    return EXAMPLE.sub(lambda found: f"```python\n{re.sub(r'(?m)^(>>>|[.]{3}) ?', '', found[0]).rstrip()}\n```\n", text)


class Examples(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
