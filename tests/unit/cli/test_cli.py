"""The command line: what it prints, what it leaves behind, and the exit code."""

import gc
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hoploom
from hoploom.cli import COMMANDS, complaint, main, node_progress, stage_line, stores
from hoploom.ingest.synthetic import generate
from hoploom.ranks.environment import wants_colour

pytestmark = pytest.mark.usefixtures("no_sync")
Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path / "graph", num_nodes=200, num_features=4, num_parts=2, weights=True)
    return tmp_path / "graph"


def assert_fails(argv: list[str], capsys: Captured, message: str) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"hoploom: .*{message}.*\n", err)


def test_what_a_command_imports_is_left_to_no_collection(folder: Path, monkeypatch: Patch) -> None:
    """In a process of its own, that is: where a program calls it, its garbage is its caller's matter."""
    collecting: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: collecting.append(gc.isenabled()))
    assert main(["info", str(folder)]) == 0
    assert collecting == []
    monkeypatch.setattr(sys, "argv", ["hoploom", "info", str(folder)])
    assert main() == 0
    assert collecting == [False]
    assert gc.isenabled()


def test_what_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    """torch takes seconds, and 200 MB. The help of a command needs neither it nor numpy."""
    (tmp_path / "c.toml").write_text('hosts = ["gpu1"]')
    lines = [["launch", "--dry-run", "c.toml", "--", "t.py"], ["--version"], ["--help"], []]
    lines += [[name, "--help"] for name in COMMANDS]
    code = f"""if True:
        import sys, hoploom.cli
        for words in {lines}:
            try:
                hoploom.cli.main(words)
            except SystemExit as end:
                assert not end.code or not words
            assert not {{"torch", "numpy", "pyarrow"}} & set(sys.modules), words"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_overview_lists_every_command_once_in_its_group(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if line.startswith("  ")] == list(COMMANDS)
    assert [line for line in shown if line in ("Data", "Train", "Scale out", "Inspect and report")] == list(
        dict.fromkeys(group for _, _, group in COMMANDS.values())
    )
    assert max(map(len, shown)) <= 80


def test_a_terminal_reads_at_once_what_is_done(tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    seen: list[str] = []
    monkeypatch.setitem(
        stores.COMMANDS,
        "info",
        replace(stores.COMMANDS["info"], run=lambda arguments: seen.append(capsys.readouterr().err) or 0),
    )
    assert main(["info", "graph.store"]) == 0
    assert seen == ["opening graph.store\n"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "run.toml", "--epochs", "3"], "run.toml has a key of this name: write --set train.epochs=3"),
        (["train", "run.toml", "--name", "gat"], "--set model.name=gat or --set optimizer.name=gat"),
        (["train", "run.toml", "--quite"], "there is no option --quite; did you mean --quiet?"),
        (["info", "graph.store", "more"], "unexpected 'more'; `hoploom info --help` shows what the command takes"),
        (["generate", "new", "--node", "10"], "there is no option --node; did you mean --nodes?"),
        (["--jsn", "info"], "there is no option --jsn before the command; options stand behind it"),
        (["parition", "a"], "there is no command 'parition'; did you mean partition?"),
        (["import", "glt"], "FOLDER and --out are missing; `hoploom import glt --help` shows what to give"),
        (["train", "run.toml", "--set"], "--set has no value; `hoploom train --help` shows what to give"),
        (["train", "run.toml", "--quiet=3"], "--quiet takes no value, but is given '3'; leave that out"),
        (["init", "--store", "a", "--tables", "b"], "--tables and --store exclude each other; give one of them"),
    ],
)
def test_a_wrong_command_line_is_answered_with_its_usage_and_the_way_out(
    words: list[str], message: str, capsys: Captured
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: hoploom ")
    assert err.splitlines()[1].startswith("hoploom: ")
    assert message in err


FAILING = {  # a failure of every command that has --json
    "build": "absent.toml -o new",
    "import": "glt absent -o new",
    "generate": "new --nodes 100 --homophily 3",
    "partition": "absent -o new --parts 2",
    "fetch": "absent --to new",
    "train": "absent.toml",
    "evaluate": "absent",
    "infer": "absent",
    "plan": "--nodes 10 --edges x",
    "info": "absent",
    "check": "absent",
}


def test_every_command_with_json_is_known_to_fail_as_an_object(capsys: Captured) -> None:
    found = set()
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, *(["glt"] if name == "import" else []), "--help"])
        if "--json" in capsys.readouterr().out:
            found.add(name)
    assert found == set(FAILING)


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_one_object_for_programs_and_the_same_line_for_people(
    name: str, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [name, *FAILING[name].split()]
    code, (out, err) = main(words), capsys.readouterr()
    assert (code, out) == (2, "")
    assert main([*words, "--json"]) == code
    told, err_too = capsys.readouterr()
    assert err_too == err
    assert json.loads(told) == {"error": err.splitlines()[-1].removeprefix("hoploom: "), "exit_status": code}
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_command_and_a_rank_say_who_prints_the_object(capsys: Captured, monkeypatch: Patch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(stores.COMMANDS, "info", replace(stores.COMMANDS["info"], run=interrupt))
    assert main(["info", "graph.store", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted", "exit_status": 130}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["info", "graph.store", "--json"]) == 130
    assert capsys.readouterr().out == ""


def test_a_message_that_is_wider_than_the_terminal_breaks_between_its_parts(monkeypatch: Patch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    said = "a.toml does not exist; `hoploom init a.toml` writes one to start from"
    assert complaint(said) == f"hoploom: {said}"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert complaint(said) == "hoploom: a.toml does not exist;\n  `hoploom init a.toml` writes one to start from"
    assert complaint("short; enough") == "hoploom: short; enough"
    said = "the folder has no run.toml and no checkpoint; give the output folder of `hoploom train`, or train it-self"
    assert complaint(said).splitlines() == [
        "hoploom: the folder has no run.toml and no checkpoint;",
        "  give the output folder of `hoploom train`, or train",
        "  it-self",
    ]


def test_colours_are_for_terminals_and_for_those_who_ask() -> None:
    assert [wants_colour(terminal, {}) for terminal in (False, True)] == [False, True]
    assert [wants_colour(terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"}) for terminal in (False, True)] == [False] * 2
    assert wants_colour(False, {"FORCE_COLOR": "1"})
    assert not wants_colour(True, {"TERM": "dumb"})


def test_check_says_in_green_that_a_store_is_intact(folder: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("\033[32mok\033[0m: ")


def test_info_shows_types_fields_splits_and_parts(folder: Path, capsys: Captured) -> None:
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


def test_info_as_json_agrees_with_the_store(folder: Path, capsys: Captured) -> None:
    assert main(["info", "--json", str(folder)]) == 0
    shown = json.loads(capsys.readouterr().out)
    arrays = list(folder.rglob("*.npy"))
    assert shown["num_files"] == len(arrays)
    assert shown["bytes"] == sum(path.stat().st_size for path in arrays) == sum(p["bytes"] for p in shown["parts"])
    assert shown["weight"] == "weight"
    assert shown["node_types"][0]["num_nodes"] == 200
    assert shown["relations"][0]["num_edges"] == hoploom.open(folder).schema.relations[0].num_edges


def test_check_and_generate_as_json_are_one_object(tmp_path: Path, capsys: Captured) -> None:
    assert main(["generate", str(tmp_path / "g"), "--nodes", "0.2k", "--features", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["store"]["node_types"][0]["num_nodes"] == 200
    assert err.startswith(f"{tmp_path / 'g'}: 200 nodes, ")
    assert main(["check", str(tmp_path / "g"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["problems"], told["files"] > 0) == (True, [], True)
    next((tmp_path / "g").rglob("*.npy")).unlink()
    assert main(["check", str(tmp_path / "g"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert len(told["problems"]) == 1


def test_generate_writes_what_the_library_would(tmp_path: Path, capsys: Captured) -> None:
    numbers = {"nodes": 300, "degree": 5, "features": 3, "classes": 4, "seed": 7, "homophily": 0.5, "parts": 2}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    options += ["--feature-dtype", "float16", "--heterogeneous", "--weights", "--times"]
    assert main(["generate", str(tmp_path / "graph"), *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'graph'}: ")
    assert err == ""
    called = {"nodes": "num_nodes", "degree": "avg_degree", "features": "num_features"}
    called |= {"classes": "num_classes", "parts": "num_parts"}
    given = {called.get(name, name): value for name, value in numbers.items()}
    generate(tmp_path / "same", **given, feature_dtype="float16", heterogeneous=True, weights=True, times=True)
    assert_fails(["generate", str(tmp_path / "graph"), "--nodes", "300"], capsys, "graph exists; give another path")
    for path in (tmp_path / "same").rglob("*.npy"):
        assert path.read_bytes() == (tmp_path / "graph" / path.relative_to(tmp_path / "same")).read_bytes()
    assert (tmp_path / "graph" / "store.json").read_text() == (tmp_path / "same" / "store.json").read_text()


def test_the_bar_is_drawn_on_a_terminal_only(capsys: Captured, monkeypatch: Patch) -> None:
    for shown in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=shown: shown)
        with node_progress() as show:
            show(1_000_000, 2_000_000)
            show(2_000_000, 2_000_000)
        with stage_line() as say:
            say("joining edges")
        err = capsys.readouterr().err
        assert ("100%" in err, "2.00M/2.00M" in err, "joining edges" in err) == (shown, shown, shown)
        assert shown or not err


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, capsys: Captured) -> None:
    nowhere = str(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").touch()
    said = "is the folder of a run, not of a store; give the store that .*/run.toml names"
    assert_fails(["info", str(tmp_path / "run")], capsys, said)
    assert_fails(["info", nowhere], capsys, "nowhere does not exist; give the folder of a store; `hoploom build`")
    assert_fails(["info", "s3://bucket/papers.store"], capsys, "bring it to this host with `hoploom fetch`")
    assert_fails(["train", "run.toml", "--processes", "0"], capsys, "is '0'; give a whole number from 1 to 4096")
    assert_fails(["check", nowhere], capsys, "nowhere does not exist")
    launch = ["launch", nowhere, "--master_port", "1e9", "--", "a.py"]
    assert_fails(launch, capsys, "--master-port is '1e9'; give a whole")
    for command in ("serve", "watch"):
        assert_fails([command, nowhere, "--listen", "here"], capsys, "--listen is 'here'; give HOST:PORT")
    assert_fails(["evaluate", nowhere, "--split", "tset"], capsys, "--split is 'tset'; give one of train, val, test")
    for words, message in (
        ("--nodes many", "--nodes is 'many'; give a whole number of at least 1, such as"),
        ("--nodes 100 --degree 0.5", "--degree is 0.5"),
        ("--nodes 100 --feature-dtype int3", "--feature-dtype is 'int3'"),
    ):
        assert_fails(["generate", nowhere, *words.split()], capsys, message)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_version_is_the_packages(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"hoploom {hoploom.__version__}\n"
