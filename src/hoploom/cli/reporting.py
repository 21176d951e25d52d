"""The commands report, watch and doctor: pages about runs, in a file or live, and a check of this machine."""

import argparse
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hoploom.cli import (
    Arguments,
    Command,
    add_json,
    add_option,
    check_writable,
    for_people,
    paint,
    read_address,
)
from hoploom.config.values import as_bytes
from hoploom.ranks import environment

Status = Literal["ok", "note", "wrong"]
COLOURS: dict[Status, str] = {"ok": "green", "note": "cyan", "wrong": "red"}
MIN_SHARED_MEMORY = 64e6  # free bytes that /dev/shm should have
REINSTALL = "pip install --force-reinstall --no-deps hoploom"

# --- report and watch ----------------------------------------------------------------------------


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="+", help="the output folder of a run; several are compared")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)"
    )


def _report(arguments: Arguments) -> int:
    from hoploom.report.page import encoded
    from hoploom.report.reading import RunReader
    from hoploom.report.runs import run_page
    from hoploom.store.format import write_whole

    check_writable("--out", arguments.out)
    html = encoded(run_page([RunReader(folder) for folder in arguments.run]))
    write_whole(arguments.out, [html])
    path = str(arguments.out).encode(errors="backslashreplace").decode()  # a name may be no UTF-8
    print(f"wrote {path}, {len(html) / 1e3:,.0f} kB; open it in a browser")
    return 0


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    text = "address of the page; port 0 picks a free port (default: %(default)s)"
    add_option(parser, "--listen", read_address, default="127.0.0.1:0", metavar="HOST:PORT", help=text)


def _watch(arguments: Arguments) -> int:
    from hoploom.report.reading import RunReader
    from hoploom.report.watch import LivePage

    runs = [RunReader(folder) for folder in arguments.run]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt, too
    try:
        with LivePage(runs, arguments.listen) as live, suppress(KeyboardInterrupt):
            print("watching; open this page, and press Ctrl-C to stop:", file=sys.stderr, flush=True)
            print(live.url, flush=True)
            live.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


# --- doctor --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A result of `hoploom doctor`. `fix` is a command or a change that solves the problem."""

    name: str
    status: Status
    found: str
    fix: str = ""


def _checks() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from _packages()
    yield _core()
    status = os.statvfs("/dev/shm")
    free, fix = status.f_bavail * status.f_frsize, "docker run --shm-size=1g, or remove files there"
    is_small = free < MIN_SHARED_MEMORY
    yield Check("/dev/shm", "wrong" if is_small else "ok", f"{as_bytes(free)} free", fix if is_small else "")
    yield from _gpus()


def _packages() -> Iterator[Check]:
    """Yield a result for each package. A missing required package is a problem, a missing optional one is not."""
    try:
        from packaging.requirements import Requirement  # torchmetrics needs it

        yield Check("hoploom", "ok", metadata.version("hoploom"))
        wanted = [Requirement(text) for text in metadata.requires("hoploom") or ()]
    except ImportError as error:  # PackageNotFoundError is one, too
        yield Check("hoploom", "wrong", f"cannot be checked: {error}", "pip install hoploom packaging")
        return
    extras: dict[str, list[str]] = {}
    for requirement in wanted:
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(requirement.marker or ""))
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        if extra is None:
            fix = "" if fits else f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(requirement.name, "ok" if fits else "wrong", found or "not installed", fix)
        elif requirement.name != "hoploom":
            extras.setdefault(extra[1], []).extend([] if fits else [requirement.name])
    for extra_name, missing in extras.items():
        if missing:
            fix = f"pip install 'hoploom[{extra_name}]', if you need it"
            yield Check(f"[{extra_name}]", "note", f"not installed: {', '.join(missing)}", fix)


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _core() -> Check:
    found = find_spec("hoploom._core")
    if found is None or found.origin is None:
        return Check("core", "wrong", "the compiled part of Hoploom is missing", REINSTALL)
    try:
        import_module("hoploom._core")
    except (ImportError, OSError) as error:
        return Check("core", "wrong", f"{Path(found.origin).name} cannot be loaded: {error}", REINSTALL)
    return Check("core", "ok", Path(found.origin).name)


def _gpus() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("gpu", "wrong", f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            yield Check(f"gpu {number}", "ok", f"{about.name}, {as_bytes(about.total_memory)}")
        if find_spec("triton") is None:
            yield Check("triton", "wrong", "not installed, so the GPU cannot sample", "pip install triton")
    elif (hidden := environment.hidden_gpus()) is not None:
        text = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}; training runs on the CPU"
        yield Check("gpu", "note", text, "unset CUDA_VISIBLE_DEVICES")
    elif Path("/dev/nvidia0").exists():
        found = f"there is a GPU, but torch {torch.__version__} does not see it"
        yield Check("gpu", "wrong", found, "see pytorch.org for the torch that fits the driver `nvidia-smi` shows")
    else:
        yield Check("gpu", "note", "none; training runs on the CPU")


def _doctor(arguments: Arguments) -> int:
    people, found = for_people(arguments), []
    for check in _checks():
        found.append(check)
        mark = paint(f"{check.status:<5}", COLOURS[check.status], people)
        print(f"{mark}  {check.name:<15}  {check.found}", file=people, flush=True)
        if check.fix:
            print(f"{'':24}{'type' if check.status == 'wrong' else 'to change it'}: {check.fix}", file=people)
    wrong = [check.name for check in found if check.status == "wrong"]
    print(f"\n{len(wrong)} wrong: {', '.join(wrong)}" if wrong else "\nnothing is wrong", file=people)
    if arguments.json:
        print(json.dumps({"ok": not wrong, "checks": [asdict(check) for check in found]}))
    return 1 if wrong else 0


COMMANDS = {
    "report": Command(
        _report_arguments, _report, lambda a: f"reading {', '.join(map(str, a.run))}", "hoploom.report.runs"
    ),
    "watch": Command(_watch_arguments, _watch),
    "doctor": Command(add_json, _doctor, lambda a: "looking at this machine"),
}
