"""What is shipped: one version everywhere, every file of the package, and a word to those without a compiler."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hoploom

ROOT = Path(__file__).parent.parent
BUILD = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]


def _build(out: Path, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of this checkout; `path`: of the programs that it finds."""
    pytest.importorskip("scikit_build_core")
    environment = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX"}}
    environment |= {"PATH": path} if path is not None else {}
    command = [*BUILD, "--wheel-dir", str(out), "--config-settings=build-dir=" + str(out / "build"), *words, str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=out)


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_package_and_its_version(tmp_path: Path) -> None:
    done = _build(tmp_path, *(f"--config-settings=wheel.{word}" for word in ("cmake=false", "py-api=py3")))  # no core
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"hoploom-{hoploom.__version__}-")
    listed = subprocess.run(["git", "ls-files", "src/hoploom"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {line.removeprefix("src/") for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in held if name.endswith(".dist-info/METADATA"))
    assert any(not name.endswith(".py") for name in wanted)
    assert not wanted - held
    assert f"\nVersion: {hoploom.__version__}\n" in metadata


@pytest.mark.slow
def test_building_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()  # Python, CMake and Ninja, but no compiler
    done = _build(tmp_path, path=f"{tmp_path / 'bin'}")
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "there is no C++ compiler" in " ".join(said.split())
    assert "`apt install g++`" in said
    assert "CMakeDetermineCXXCompiler" not in said  # where CMake says it in its own words, and names no package


def test_the_version_is_written_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", hoploom.__version__)
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f'__version__ = "{hoploom.__version__}"' in (ROOT / "src/hoploom/__init__.py").read_text()
    assert f"\nversion: {hoploom.__version__}\n" in (ROOT / "CITATION.cff").read_text()  # which cannot ask
    assert re.search(
        rf"^## {re.escape(hoploom.__version__)} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_the_addresses_of_the_repository_and_the_site_are_the_same_everywhere() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    site = urls.pop("Documentation")
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    assert f"\nrepository-code: {urls['Homepage']}\n" in (ROOT / "CITATION.cff").read_text()  # which cannot ask
    settings = (ROOT / "mkdocs.yml").read_text()
    assert f"\nsite_url: {site}\nrepo_url: {urls['Homepage']}\n" in settings
    assert f"({site})" in (ROOT / "README.md").read_text()


def test_a_tag_builds_tests_tries_and_then_publishes_without_a_stored_secret() -> None:
    workflow: Any = pytest.importorskip("yaml").safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    needs = {
        name: [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        for name, job in jobs.items()
    }
    assert {name for names in needs.values() for name in names} <= set(jobs)
    assert (needs["try"], needs["publish"], needs["site"]) == (["build"], ["test", "try"], ["publish"])
    for name in ("publish", "site"):
        assert "github.ref_type == 'tag'" in jobs[name]["if"]
        assert jobs[name]["permissions"]["id-token"] == "write"
    steps = {name: job["steps"] for name, job in jobs.items()}
    assert [step["uses"] for step in steps["publish"]][-1].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in str(workflow)
    assert {
        str(step["with"]["name"])
        for each in steps.values()
        for step in each
        if "artifact@" in str(step.get("uses")) and "name" in step["with"]
    } == {"dist"}
    commands = "\n".join(step.get("run", "") for each in steps.values() for step in each)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"test", "wheels", "docs"} == set(re.findall(r"\bmake ([\w-]+)", commands)) & targets
    assert str(steps["build"]).count("3.11") == str(steps["build"]).count("3.12") == 1  # cp311, and abi3


def test_every_release_in_the_changelog_has_its_date() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
