"""For the pages made of docstrings: examples behind >>> become blocks of code that can be copied.

A loader's __init__ takes the parameters of a dataclass, by `@taking(Arguments)`: the pages show those.
"""

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

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for loader in pkg["load.neighbor"].classes.values():
            init = loader.members.get("__init__")
            taken = [one.value for one in init.decorators if str(one.value).startswith("taking(")] if init else []
            for call in taken:
                arguments = pkg["load.arguments"][str(call)[len("taking(") : -1]]
                init.parameters = griffe.Parameters(*arguments.parameters)
