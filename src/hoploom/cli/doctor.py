"""The command that looks at this machine: what Hoploom needs, what is wrong with it, and what to type."""

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hoploom.cli.command import Arguments, Command, add_json, for_people, paint, width_of, wrapped
from hoploom.config.values import as_bytes
from hoploom.ranks import environment
from hoploom.ranks.environment import LOOPBACK
from hoploom.system import group_files, num_cores

Status = Literal["ok", "note", "wrong"]
COLOURS: dict[Status, str] = {"ok": "green", "note": "cyan", "wrong": "red"}
MEMORY = Path("/proc/meminfo")
USAGE = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}  # control groups 1 and 2
LEAST_MEMORY, LEAST_SHARED = 2e9, 64e6  # bytes that are free
SETUP = {"x86_64": 425, "aarch64": 425}  # the number of the system call io_uring_setup
NOT_SYNCHRONISED = 5  # what adjtimex() returns
BORN = 1_767_225_600  # 2026-01-01: no clock that is right says less


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `fix`: what to type or to change, where something is wrong or missing."""

    name: str
    status: Status
    found: str
    fix: str = ""


def checks() -> Iterator[Check]:
    """Everything, one after the other."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from _packages()
    yield _core()
    bound, all_cores = num_cores(), os.cpu_count() or 1
    yield Check("cores", "ok", f"{bound} of {all_cores} may be used" if bound < all_cores else str(bound))
    yield _memory()
    yield _shared_memory()
    yield _io_uring()
    yield from _gpus()
    yield _loopback()
    yield _host_name()
    yield _clock()


# --- what is installed ---------------------------------------------------------------------------


def _packages() -> Iterator[Check]:
    """What hoploom's own metadata asks for: a missing one is wrong, one of an extra is a note."""
    try:
        from packaging.requirements import Requirement  # of torchmetrics
    except ImportError:
        yield Check("packaging", "wrong", "not installed, so the packages cannot be checked", "pip install packaging")
        return
    try:
        yield Check("hoploom", "ok", metadata.version("hoploom"))
        wanted = [Requirement(text) for text in metadata.requires("hoploom") or ()]
    except metadata.PackageNotFoundError:
        yield Check("hoploom", "wrong", "it is not installed", "pip install hoploom")
        return
    missing: dict[str, list[str]] = {}
    for requirement in wanted:
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(requirement.marker or ""))
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        if extra is None:
            text = found or "not installed"
            fix = "" if fits else f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(requirement.name, "ok" if fits else "wrong", text, fix)
        elif requirement.name != "hoploom":
            missing.setdefault(extra[1], []).extend([] if fits else [requirement.name])
    for extra_name, names in missing.items():
        if extra_name != "all":
            absent = f"not installed: {', '.join(names)}"
            fix = f"pip install 'hoploom[{extra_name}]', if you need it"
            yield (
                Check(f"[{extra_name}]", "note", absent, fix) if names else Check(f"[{extra_name}]", "ok", "installed")
            )
    if _version("pyspark") and shutil.which("java") is None:
        yield Check("java", "wrong", "pyspark is installed, but there is no java", "apt install default-jre-headless")


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _core() -> Check:
    found = find_spec("hoploom._core")
    way_out = "pip install --force-reinstall --no-deps hoploom"
    if found is None or found.origin is None:
        return Check("core", "wrong", "the compiled part of Hoploom is missing", way_out)
    try:
        import_module("hoploom._core")
    except (ImportError, OSError) as error:
        return Check("core", "wrong", f"{Path(found.origin).name} cannot be loaded: {error}", way_out)
    return Check("core", "ok", Path(found.origin).name)


# --- the machine ---------------------------------------------------------------------------------


def _memory() -> Check:
    try:
        text = MEMORY.read_text()
    except OSError as error:
        return Check("memory", "note", f"unknown: {MEMORY} cannot be read ({error.strerror})")
    total, free = (1024 * int(re.findall(rf"{name}: +(\d+)", text)[0]) for name in ("MemTotal", "MemAvailable"))
    for path in group_files("memory", "memory.limit_in_bytes", "memory.max"):
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            total, free = min(total, limit), min(free, max(0, limit - _used_by_group(path)))
    found = f"{as_bytes(free)} free of {as_bytes(total)}"
    if free < LEAST_MEMORY:
        return Check("memory", "wrong", found, "end other programs, or give commands less, e.g. --memory 500MB")
    return Check("memory", "ok", found)


def _used_by_group(limit: Path) -> int:
    """Bytes of a control group, without the files that the kernel holds in memory and drops when it needs room."""
    used = int(limit.with_name(USAGE[limit.name]).read_text())
    cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", limit.with_name("memory.stat").read_text(), re.MULTILINE)
    return used - max(map(int, cached), default=0)


def _shared_memory() -> Check:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", "wrong", str(error.strerror), "mount -t tmpfs tmpfs /dev/shm")
    free = status.f_bavail * status.f_frsize
    if free < LEAST_SHARED:
        return Check("/dev/shm", "wrong", f"{as_bytes(free)} free", "docker run --shm-size=1g, or remove files there")
    return Check("/dev/shm", "ok", f"{as_bytes(free)} free")


def _io_uring() -> Check:
    number = SETUP.get(platform.machine())
    if number is None or sys.platform != "linux":
        return Check("io_uring", "note", "not on this system; threads read from disks instead")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(number, 0, None)
    if ctypes.get_errno() in (22, 14):  # EINVAL, EFAULT: it looked at what it was given
        return Check("io_uring", "ok", "allowed")
    found = f"not allowed ({os.strerror(ctypes.get_errno())}); threads read from disks instead"
    return Check("io_uring", "note", found)


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


# --- network and clock ---------------------------------------------------------------------------


def _loopback() -> Check:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=5):
                pass
    except OSError as error:
        return Check("ports", "wrong", f"{LOOPBACK} refuses connections: {error}", "ip link set lo up")
    return Check("ports", "ok", f"{LOOPBACK} takes connections")


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        fix = f"echo '127.0.1.1 {name}' >> /etc/hosts"
        return Check("host name", "wrong", f"{name} has no address, and ranks need one", fix)
    return Check("host name", "ok", f"{name} is {address}")


def _clock() -> Check:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < BORN:
        return Check("clock", "wrong", f"{now} is past; TLS certificates will be refused", "timedatectl set-ntp true")
    with suppress(AttributeError):
        if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == NOT_SYNCHRONISED:
            found = f"{now}, not synchronised; TLS between hosts needs clocks that agree"
            return Check("clock", "note", found, "timedatectl set-ntp true")
    return Check("clock", "ok", now)


# --- the command ---------------------------------------------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def _doctor(arguments: Arguments) -> int:
    people, found = for_people(arguments), []
    for check in checks():
        found.append(check)
        fix = [f"{'':24}{'type' if check.status == 'wrong' else 'to change it'}: {check.fix}"] if check.fix else []
        for line in [f"{check.status:<5}  {check.name:<15}  {check.found}", *fix]:
            for piece in wrapped(line, width_of(people), 24):
                mark = check.status if piece.startswith(check.status) else ""
                print(paint(mark, COLOURS[check.status], people) + piece.removeprefix(mark), file=people, flush=True)
    wrong = [check.name for check in found if check.status == "wrong"]
    print(f"\n{len(wrong)} wrong: {', '.join(wrong)}" if wrong else "\nnothing is wrong", file=people)
    if arguments.json:
        print(json.dumps({"ok": not wrong, "checks": [asdict(check) for check in found]}))
    return 1 if wrong else 0


COMMANDS = {"doctor": Command(_doctor_arguments, _doctor, lambda a: "looking at this machine")}
