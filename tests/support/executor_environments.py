"""Environments of Python for executors: without Hoploom, with another version of it, or packed to be shipped."""

import os
import shutil
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import hoploom
from hoploom import _core

PACKAGE = Path(hoploom.__file__).parent
INSTALLED = Path(sysconfig.get_paths()["purelib"])


def without_hoploom(folder: Path) -> Path:
    """A python that imports all that this one does but Hoploom."""
    site = _new(folder)
    for entry in INSTALLED.iterdir():
        if "hoploom" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def with_version(folder: Path, version: str) -> Path:
    """A python with a Hoploom that says that it is of this version."""
    python = without_hoploom(folder)
    other = _site(folder) / "hoploom"
    other.mkdir()
    for entry in PACKAGE.iterdir():
        (other / entry.name).symlink_to(entry)
    text = (PACKAGE / "__init__.py").read_text()
    (other / "__init__.py").unlink()
    _add_core(other)
    (other / "__init__.py").write_text(text.replace(f'"{hoploom.__version__}"', f'"{version}"'))
    return python


def complete(folder: Path) -> Path:
    """An environment of files of its own, as `pip install 'hoploom[tables]'` makes it: no link leads out of it."""
    site = _new(folder)
    shutil.copytree(PACKAGE, site / "hoploom", ignore=shutil.ignore_patterns("__pycache__"))
    _add_core(site / "hoploom")
    for name in set(_needed("hoploom", "tables")) - {"hoploom"}:
        for file in metadata.distribution(name).files or ():
            given, target = Path(str(file.locate())), site / file
            if ".." not in file.parts and given.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(given, target)
    return folder


def _needed(name: str, extra: str = "") -> Iterator[str]:
    """A distribution and those that it needs, each by its name; some come several times."""
    waiting, seen = [(name, extra)], set()
    while waiting:
        wanted = waiting.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        yield wanted[0]
        for text in metadata.requires(wanted[0]) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": wanted[1]}):
                waiting += [(needed.name, extra) for extra in ("", *needed.extras)]


def _add_core(package: Path) -> None:
    """Where an editable install has the compiled core in a folder of its own."""
    core = Path(_core.__file__)
    if not (package / core.name).exists():
        shutil.copyfile(core, package / core.name)


def _link(given: Path, target: Path) -> None:
    try:
        os.link(given, target)
    except OSError:  # of another disk, or there already
        if not target.exists():
            shutil.copyfile(given, target)


def _new(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return _site(folder)


def _site(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
