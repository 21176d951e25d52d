"""Child processes of test_kernels_compile.py: kernels compiled ahead of time for GPUs that are not here.

Triton's own launch does it, on a driver that names the target and has no device: arguments are specialised as they
would be there, and nothing runs. `record` notes what launches the tests under the interpreter make, as plain values.
"""

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget as Target
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

TARGETS = {"sm_90": Target("cuda", 90, 32), "sm_80": Target("cuda", 80, 32), "gfx942": Target("hip", "gfx942", 64)}
RUN = JITFunction.run  # before it is replaced


class Launch(NamedTuple):
    module: str
    name: str
    arguments: list[Any]
    constants: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps(self)


class Driver:
    """Stands where Triton's driver does; there is no device to load a kernel on."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> Target:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def described(value: Any) -> Any:
    """What specialisation sees of an argument: of a tensor its dtype, and whether its address is a multiple of 16."""
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "aligned": value.data_ptr() % 16 == 0}
    if isinstance(value, tuple):
        return {"tuple": [described(one) for one in value]}
    if hasattr(value, "fn"):  # a function of Triton as a constant
        return {"function": [value.fn.__module__, value.fn.__name__]}
    if isinstance(value, triton.language.dtype):
        return {"dtype": str(value)}
    if isinstance(value, triton.language.constexpr):
        return described(value.value)
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def rebuilt(value: Any) -> Any:
    """An argument that Triton specialises like the one described."""
    if not isinstance(value, Mapping):
        return value
    if "tensor" in value:
        return torch.empty(32, dtype=getattr(torch, value["tensor"]))[0 if value["aligned"] else 1 :]
    if "tuple" in value:
        return tuple(rebuilt(one) for one in value["tuple"])
    if "dtype" in value:
        return triton.language.dtype(value["dtype"])
    module, name = value["function"]
    return getattr(import_module(module), name)


def record(keep: Callable[[Launch], None], *, runs: bool) -> None:
    """From now on every launch of the package is told to `keep`.

    With `runs` the kernel runs too, where it is the interpreter's.
    """
    kind: Any = InterpretedFunction if runs else JITFunction
    kind.run = _recorded(kind.run if runs else None, keep)


def _recorded(run: Callable[..., Any] | None, keep: Callable[[Launch], None]) -> Callable[..., Any]:
    def recorded(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if kernel.fn.__module__.startswith("hoploom."):  # tests have kernels of their own
            given = {name: described(value) for name, value in constants.items()}
            keep(Launch(kernel.fn.__module__, kernel.fn.__name__, [described(one) for one in arguments], given))
        return None if run is None else run(kernel, *arguments, grid=grid, warmup=warmup, **constants)

    return recorded


def compiled(launch: Launch) -> Any:
    kernel = getattr(import_module(launch.module), launch.name)
    given = {name: rebuilt(value) for name, value in launch.constants.items()}
    return RUN(kernel, *map(rebuilt, launch.arguments), grid=(1,), warmup=True, **given)


def findings(launch: Launch, target: str) -> dict[str, Any]:
    module = launch.module.removeprefix("hoploom.ops.kernels.")
    found: dict[str, Any] = {"kernel": f"{module}.{launch.name}", "target": target}
    try:
        kernel = compiled(launch)
    except Exception as error:  # told to the test, which fails with it
        return found | {"error": f"{type(error).__name__}: {error}"[-2000:], "launch": launch.key}
    found["shared"] = kernel.metadata.shared
    if target.startswith("sm_"):
        ptx = kernel.asm["ptx"]
        found["atomics"] = sorted(set(re.findall(r"^\s*(?:@%p\d+ )?((?:atom|red)\.\S+)", ptx, re.MULTILINE)))
        found["fused"] = sorted(set(re.findall(r"\bfma\.\S+", ptx)))
        found["has_float64"] = "mul.rn.f64" in ptx or "add.rn.f64" in ptx
        found["reads_16_bytes"] = re.search(r"ld\.global\S*\.(?:v2\.b64|v4\.b32)", ptx) is not None
        found |= _resources(kernel)
    return found


def _resources(kernel: Any) -> dict[str, int]:
    """Registers and bytes of stack per thread: what does not fit into registers spills onto the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True, timeout=60)
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return {"registers": int(numbers["REG"]), "stack": int(numbers["STACK"]) + int(numbers["LOCAL"])}


def distinct(launches: Sequence[Launch], *, one_each: bool) -> list[Launch]:
    kept: dict[Any, Launch] = {}
    for launch in launches:
        kept.setdefault((launch.module, launch.name) if one_each else launch.key, launch)
    return list(kept.values())


def share_of(launches: list[Launch], share: int, shares: int) -> list[Launch]:
    return [launch for launch in launches if zlib.crc32(launch.key.encode()) % shares == share]


def compile_all(launches: list[Launch], target: str) -> list[dict[str, Any]]:
    triton.runtime.driver.set_active(Driver(TARGETS[target]))
    return [findings(launch, target) for launch in launches]


def called(*, one_each: bool) -> list[Launch]:
    """The launches that kernel_calls.py makes, or the first of each kernel; nothing runs."""
    launches: list[Launch] = []
    record(launches.append, runs=False)
    import_module("kernel_calls").make_all()
    return distinct(launches, one_each=one_each)


def record_tests(file: Path, tests: Sequence[str]) -> int:
    """Run these tests in the interpreter; the file gets their launches, a line each."""
    launches: list[Launch] = []
    record(launches.append, runs=True)
    status = pytest.main(["-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts=", *tests])
    file.write_text("".join(f"{launch.key}\n" for launch in distinct(launches, one_each=False)))
    return int(status)


def main(what: str, *words: str) -> int:
    """`compile TARGET SHARE SHARES [FILE]`: a share of the first launches of all kernels; with a file, of all launches.

    `record FILE TESTS...` writes such a file.
    """
    if what == "record":
        return record_tests(Path(words[0]), words[1:])
    target, share, shares = words[0], int(words[1]), int(words[2])
    lines = Path(words[3]).read_text().splitlines() if len(words) > 3 else []
    launches = [Launch(*json.loads(line)) for line in lines] + called(one_each=not lines)
    launches = distinct(launches, one_each=not lines)
    print(json.dumps(compile_all(share_of(launches, share, shares), target)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
