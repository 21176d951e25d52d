"""The command line: what it prints, what it leaves behind, and the exit code."""

import gc
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import hoploom
from hoploom.cli import main, stores
from hoploom.cli.command import progress_bar, stage_line
from hoploom.ingest.synthetic import generate

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small store of two parts."""
    generate(tmp_path / "graph", num_nodes=200, num_features=4, num_parts=2, weights=True)
    return tmp_path / "graph"


def assert_fails(argv: list[str], capsys: pytest.CaptureFixture[str], message: str) -> None:
    """Exit code 2, and one line on stderr."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"hoploom: .*{message}.*\n", err)


def test_what_a_command_imports_is_left_to_no_collection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, that is: where a program calls it, its garbage is its caller's matter."""
    collecting: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: collecting.append(gc.isenabled()))
    assert main(["info", str(folder)]) == 0
    assert collecting == []
    monkeypatch.setattr(sys, "argv", ["hoploom", "info", str(folder)])
    assert main() == 0
    assert collecting == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    "argv", [[], ["--version"], ["certs", "--help"], ["launch", "--dry-run", "c.toml", "--", "t.py"]]
)
def test_what_needs_no_torch_does_not_import_it(argv: list[str], tmp_path: Path) -> None:
    """torch takes seconds, and 200 MB."""
    (tmp_path / "c.toml").write_text('hosts = ["gpu1"]')
    code = (
        "import sys, hoploom.cli\n"
        "try:\n    sys.argv[1:] and hoploom.cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", code, *argv]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- info ----------------------------------------------------------------------------------------


def test_info_shows_types_fields_splits_and_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = hoploom.open(folder)
    assert main(["info", str(folder)]) == 0
    out = capsys.readouterr().out
    num_edges = f"{store.schema.relations[0].num_edges:,}"
    assert out.startswith(f"{folder}: 200 nodes, {num_edges} edges, 2 parts, ")
    assert "weights are in field 'weight'" in out
    splits = ", ".join(f"{name} {store.split(name).numel()}" for name in ("train", "val", "test"))
    lines = [re.sub(" +", " ", line.strip()) for line in out.splitlines()]
    assert f"node 200 x float32[4], y int64 {splits}" in lines
    assert f"node to node {num_edges} weight float32" in lines
    assert [line.split()[:2] for line in lines[-2:]] == [["0", "100"], ["1", "100"]]


def test_info_as_json_agrees_with_the_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", str(folder)]) == 0
    shown = json.loads(capsys.readouterr().out)
    arrays = list(folder.rglob("*.npy"))
    assert shown["num_files"] == len(arrays)
    assert shown["bytes"] == sum(path.stat().st_size for path in arrays) == sum(p["bytes"] for p in shown["parts"])
    assert shown["weight"] == "weight"
    assert shown["node_types"][0]["num_nodes"] == 200
    assert shown["relations"][0]["num_edges"] == hoploom.open(folder).schema.relations[0].num_edges


# --- check ---------------------------------------------------------------------------------------


def test_check_counts_the_files_of_a_sound_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder)]) == 0
    arrays = list(folder.rglob("*.npy"))
    size = sum(path.stat().st_size for path in arrays)
    assert capsys.readouterr().out == f"ok: {len(arrays)} files, {size:,} bytes\n"


def test_check_names_every_damaged_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flipped, truncated, missing = (
        folder / name
        for name in (
            "part-00000/nodes/node/x.npy",
            "part-00001/nodes/node/y.npy",
            "part-00001/relations/node~to~node/csc.indices.npy",
        )
    )
    content = bytearray(flipped.read_bytes())
    content[-5] ^= 0x10
    flipped.write_bytes(content)
    truncated.write_bytes(truncated.read_bytes()[:-3])
    missing.unlink()
    assert main(["check", str(folder)]) == 1
    lines = sorted(capsys.readouterr().out.splitlines())
    assert len(lines) == 3
    for line, path, problem in zip(
        lines, (flipped, truncated, missing), ("flipped", "truncated", "missing"), strict=True
    ):
        assert line.startswith(f"{path.relative_to(folder)}: ")
        assert problem in line


# --- generate ------------------------------------------------------------------------------------


def test_generate_writes_what_the_library_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--nodes 300 --degree 5 --features 3 --classes 4 --seed 7 --homophily 0.5 --parts 2"
    options += " --feature-dtype float16 --heterogeneous --weights --times"
    assert main(["generate", str(tmp_path / "graph"), *options.split()]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'graph'}: ")
    assert err == ""
    generate(
        tmp_path / "same",
        num_nodes=300,
        avg_degree=5,
        num_features=3,
        num_classes=4,
        seed=7,
        homophily=0.5,
        num_parts=2,
        feature_dtype="float16",
        heterogeneous=True,
        weights=True,
        times=True,
    )
    for path in (tmp_path / "same").rglob("*.npy"):
        assert path.read_bytes() == (tmp_path / "graph" / path.relative_to(tmp_path / "same")).read_bytes()
    assert (tmp_path / "graph" / "store.json").read_text() == (tmp_path / "same" / "store.json").read_text()


def test_generate_refuses_an_existing_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert_fails(["generate", str(folder), "--nodes", "300"], capsys, "graph exists; give another path")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stores, "progress_bar", lambda: nullcontext(interrupt))
    assert main(["generate", str(tmp_path / "graph"), "--nodes", "300"]) == 130
    assert capsys.readouterr().err == "hoploom: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_the_bar_is_drawn_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=shown: shown)
        with progress_bar() as show:
            show(1_000_000, 2_000_000)
            show(2_000_000, 2_000_000)
        with stage_line() as say:
            say("joining edges")
        err = capsys.readouterr().err
        assert ("100%" in err, "2.00M/2.00M" in err, "joining edges" in err) == (shown, shown, shown)
        assert shown or not err


# --- mistakes ------------------------------------------------------------------------------------


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert_fails(["info", nowhere], capsys, "nowhere is no store: it has no store.json")
    assert_fails(["check", nowhere], capsys, "nowhere does not exist")
    assert_fails(["generate", nowhere, "--nodes", "100", "--degree", "0.5"], capsys, "avg_degree is 0.5")
    assert_fails(["generate", nowhere, "--nodes", "100", "--feature-dtype", "int3"], capsys, "feature_dtype is 'int3'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [[], ["sing"], ["generate", "out"], ["generate", "out", "--nodes", "many"]], ids=str)
def test_a_wrong_command_line_shows_its_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert exited.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hoploom")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"hoploom {hoploom.__version__}\n"
