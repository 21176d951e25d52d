"""Build, import, partition and commands on runs: what they take and make, and what they say to a mistake."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.tables import EDGES, write_table

import hoploom
from hoploom.cli import main, seeds_of
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic import generate

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


RECIPE = """
[nodes.node]
files = "nodes.parquet"
id = "id"
[edges."node to node"]
files = "edges.parquet"
source = "a"
destination = "b"
"""


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """Node v of 60 is linked to by v + 1; every third node is a training seed."""
    ids = torch.arange(60)
    splits = {"train": ids[::3], "rest": ids[1::3]}
    hoploom.from_tensors({}, torch.stack([(ids + 1) % 60, ids]), num_nodes=60, splits=splits).save(tmp_path / "ring")
    return tmp_path / "ring"


def bipartite(folder: Path, splits: dict[str, dict[str, torch.Tensor]]) -> Path:
    authors, papers = torch.arange(40) % 20, torch.arange(40)
    edges = {
        ("author", "writes", "paper"): torch.stack([authors, papers]),
        ("paper", "rev_writes", "author"): torch.stack([papers, authors]),
    }
    nodes: dict[str, dict[str, torch.Tensor]] = {"author": {}, "paper": {}}
    counts = {"author": 20, "paper": 40}
    hoploom.from_tensors(nodes, edges, num_nodes=counts, splits=splits).save(folder / "bipartite")
    return folder / "bipartite"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": list(range(10))}), tmp_path / "nodes.parquet")
    pq.write_table(pa.table({"a": list(range(9)), "b": list(range(1, 10))}), tmp_path / "edges.parquet")
    (tmp_path / "graph.toml").write_text(RECIPE)
    return tmp_path / "graph.toml"


def refusal(argv: list[Any], capsys: Captured) -> str:
    """The one line that is said; nothing was made."""
    out = Path(argv[argv.index("-o") + 1]) if "-o" in argv else None
    assert main([str(word) for word in argv]) == 2
    shown, err = capsys.readouterr()
    assert shown == ""
    assert re.fullmatch(r"hoploom: [^\n]*\n", err)
    assert out is None or not out.exists()
    return err


def partitioned(store: Path, *words: str) -> dict[str, Any]:
    out, report = store.with_name("parts"), store.with_name("report.json")
    assert main(["partition", str(store), "-o", str(out), "--parts", "2", "--report", str(report), *words]) == 0
    assert len(hoploom.open(out).parts) == 2
    return json.loads(report.read_text())


def test_one_type_with_members_of_train_is_where_training_starts(tmp_path: Path) -> None:
    splits = {"author": {"train": torch.arange(0)}, "paper": {"train": torch.arange(10)}}
    schema = hoploom.open(bipartite(tmp_path, splits)).schema
    assert seeds_of(schema, None) == seeds_of(schema, "train") == ("paper", "train")


def test_two_types_with_train_are_partitioned_without_seeds_or_with_those_named(tmp_path: Path) -> None:
    ids = torch.arange(10)
    store = bipartite(tmp_path, {"author": {"train": ids}, "paper": {"train": ids}})
    assert sum(part["num_seeds"] for part in partitioned(store)["parts"]) == 0
    os.rename(tmp_path / "parts", tmp_path / "before")
    of_authors = partitioned(store, "--seeds", "author:train", "--fanouts", "-1,5")
    assert sum(part["num_seeds"] for part in of_authors["parts"]) == 10
    assert "-1" in json.dumps(of_authors)


def test_seeds_and_fanouts_can_be_left_out(ring: Path) -> None:
    assert sum(part["num_seeds"] for part in partitioned(ring, "--seeds", "none")["parts"]) == 0
    os.rename(ring.with_name("parts"), ring.with_name("before"))
    assert sum(part["num_seeds"] for part in partitioned(ring, "--fanouts", "none")["parts"]) == 20
    os.rename(ring.with_name("parts"), ring.with_name("before-too"))
    assert sum(part["num_seeds"] for part in partitioned(ring, "--seeds", "node:rest")["parts"]) == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train", "--seeds is 'train', a split of author and paper; give one, e.g. author:train"),
        ("tarin", "--seeds is 'tarin', but there is no such split with members; did you mean train"),
        ("papr:train", "did you mean paper:train"),
        ("zzz", "give one of author:train, paper:train, or none"),
        ("empty", "there is no such split with members"),
    ],
)
def test_wrong_seeds_are_refused_with_the_way_out(tmp_path: Path, text: str, message: str) -> None:
    ids = torch.arange(10)
    store = bipartite(tmp_path, {"author": {"train": ids}, "paper": {"train": ids, "empty": ids[:0]}})
    with pytest.raises(ConfigError, match=re.escape(message)):
        seeds_of(hoploom.open(store).schema, text)


def test_what_cannot_be_written_is_refused_before_the_work(ring: Path, capsys: Captured, monkeypatch: Patch) -> None:
    folder = ring.parent
    given = ["partition", ring, "-o", folder / "parts", "--parts", "2", "--report"]
    assert "but there is no folder" in refusal([*given, folder / "absent" / "r"], capsys)
    assert "is a directory; give a file" in refusal([*given, folder], capsys)
    assert "ends in .json" in refusal([*given, folder / "x.txt"], capsys)
    assert "there is no folder nofolder; make it first" in refusal(["init", "nofolder/x.toml"], capsys)
    monkeypatch.setattr("hoploom.cli.os.access", lambda path, mode: False)
    assert "may not be written; give another path" in refusal([*given, folder / "r"], capsys)


def test_bench_says_before_measuring_what_it_cannot_write(tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr("hoploom.scale.measure.measure", lambda *_: pytest.fail("measured"))
    assert "is a directory; give a file" in refusal(["bench", "--out", tmp_path], capsys)
    assert "there is no folder" in refusal(["bench", "--out", tmp_path / "absent" / "bench.json"], capsys)


def test_bench_of_a_store_has_a_row_for_each_choice(ring: Path, capsys: Captured) -> None:
    sizes = ["--batch-size", "5", "--batch-size", "20"]
    assert main(["bench", str(ring), "--fanouts", "1,1", "--fanouts", "-1", *sizes]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["fanouts", "batch", "size", "nodes", "edges", "MB", "ms", "seeds/s"]
    expected = ["1,1 5 15 10", "1,1 20 60 40", "-1 5 10 5", "-1 20 40 20"]  # a seed v brings v + 1, and that one v + 2
    assert [" ".join(row.split()[:4]) for row in rows] == expected


def test_bench_refuses_choices_without_a_store_and_a_store_without_seeds(
    ring: Path, tmp_path: Path, capsys: Captured
) -> None:
    for option in ("--fanouts", "--batch-size", "--seeds", "--workers"):
        assert f"{option} is for the batches of a store; name it" in refusal(["bench", option, "5"], capsys)
    for option in ("--out", "--dir"):
        assert f"{option} is for measuring this machine" in refusal(["bench", option, tmp_path / "c", ring], capsys)
    assert "--batch-size is '0.5'" in refusal(["bench", ring, "--batch-size", "0.5"], capsys)
    assert "no split to take seeds from" in refusal(["bench", ring, "--seeds", "none"], capsys)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("partition", ["--parts", "-2"], "--parts is '-2'; give a whole number of at least 1"),
        ("partition", ["--parts", "61"], "--parts is 61 for 60 nodes; give 1 to 60"),
        ("partition", ["--parts", "2", "--fanouts", "5;10"], "--fanouts is '5;10'; give one count per layer"),
        ("partition", ["--parts", "2", "--method", "hsah"], "did you mean 'hash'"),
        ("build", ["--parts", "x"], "--parts is 'x'; give a whole number"),
        ("build", ["--engine", "foo"], "engine is 'foo'; give one of duckdb, spark"),
        ("build", ["--memory", "0GB"], "--memory is '0GB'; give a size above 0"),
    ],
)
def test_wrong_options_are_refused(
    ring: Path, recipe: Path, command: str, words: list[str], message: str, capsys: Captured
) -> None:
    given = ring if command == "partition" else recipe
    assert message in refusal([command, given, "-o", ring.with_name("made"), *words], capsys)


def test_init_prints_what_it_guessed(tmp_path: Path, capsys: Captured) -> None:
    pq.write_table(pa.table({"id": [0, 1], "y": [0, 1]}), tmp_path / "nodes.parquet")
    assert main(["init", "--tables", str(tmp_path), str(tmp_path / "graph.toml")]) == 0
    said = '[nodes.node] label = "y"  # guessed: the column is called y; is this what you predict?'
    assert said in capsys.readouterr().err.splitlines()


def test_build_wants_a_graph_toml_and_says_how_to_get_one(recipe: Path, capsys: Captured) -> None:
    folder = recipe.parent
    for given in (folder, folder / "nodes.parquet"):
        said = refusal(["build", given, "-o", folder / "s"], capsys)
        assert f"{given} is no graph.toml; `hoploom init --tables {folder}` drafts one" in said
    absent = refusal(["build", folder / "absent.toml", "-o", folder / "s"], capsys)
    assert "does not exist; `hoploom init --tables DIR" in absent


def test_build_says_how_many_nodes_have_no_label(tmp_path: Path, capsys: Captured) -> None:
    write_table(tmp_path / "n.parquet", {"id": [1, 2, 3], "y": ["a", None, None]})
    write_table(tmp_path / "edges.parquet", {"src": [1], "dst": [2]})
    keys = 'label = "y"\nsplit = { train = 1.0 }\ncolumns.y.categories = "codes"\n'
    (tmp_path / "graph.toml").write_text(f'[nodes.node]\nfiles = "n.parquet"\nid = "id"\n{keys}{EDGES}')
    assert main(["build", str(tmp_path / "graph.toml"), "-o", str(tmp_path / "s")]) == 0
    said = "nodes.node: 2 of 3 nodes have no label (column 'y' is null); they are in no split\n"
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("kind", [["ogb", "ogbn-arxiv"], ["glt"]], ids=lambda kind: kind[0])
def test_import_of_what_is_not_there_is_refused(tmp_path: Path, kind: list[str], capsys: Captured) -> None:
    said = refusal(["import", *kind, tmp_path / "absent", "-o", tmp_path / "s"], capsys)
    assert "absent does not exist; give the path" in said


RUN = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 100
[train]
epochs = 2
[output]
loggers = []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    generate(folder / "graph.store", num_nodes=400, avg_degree=6, num_features=8, num_classes=4)
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    with Patch.context() as patched:
        printed: list[str] = []
        patched.setattr("builtins.print", lambda *words, file=None, **_: file or printed.append(words[0]))
        assert main(["train", str(folder / "run.toml"), "--json", "--quiet"]) == 0
    assert len(printed) == 1
    return json.loads(printed[0])


def test_train_prints_its_result_as_one_object(folder: Path, told: dict[str, Any]) -> None:
    assert told == {"folder": str(folder / "run"), **json.loads((folder / "run" / "result.json").read_text())}
    epochs = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[told["best_epoch"] - 1]["accuracy"] == told["best"] == max(epoch["accuracy"] for epoch in epochs)
    assert {"train_loss", "val_loss"} <= set(epochs[0])


def test_evaluate_gives_the_numbers_of_the_run(
    folder: Path, told: dict[str, Any], capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(folder)  # a run is found from anywhere
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["metrics"]) == ("test", told["test"])
    assert main(["evaluate", "run", "--split", "val"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("val: accuracy ")
    assert f"accuracy {told['best']:.4f}" in out


def test_infer_writes_a_row_for_every_node(folder: Path, told: dict[str, Any], capsys: Captured) -> None:
    run = Path(told["folder"])
    assert main(["infer", str(run), "-o", str(folder / "out")]) == 0
    assert capsys.readouterr().out == f"written to {folder / 'out'}\n"
    assert main(["infer", str(run), "-o", str(folder / "again"), "--columns", "embedding", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        **{"checkpoint": str(run / "best.safetensors"), "out": str(folder / "again")},
        **{"columns": ["embedding"], "rows": {"node": 400}},
    }
    rows = pq.read_table(folder / "out" / "node")
    assert sorted(rows.column_names) == ["embedding", "id", "prediction"]
    assert rows.num_rows == hoploom.open(folder / "graph.store").schema.node_types[0].num_nodes


def test_infer_propagates_the_features_of_a_store(folder: Path, capsys: Captured) -> None:
    store, out = str(folder / "graph.store"), str(folder / "hops")
    command = ["infer", store, "--propagate", "2"]
    assert main([*command, "-o", out, "--norm", "mean", "--set", "memory=1MB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": out, "hops": 2, "norm": "mean"}
    hoploom.propagate(hoploom.open(store), folder / "hops-again", 2, norm="mean")
    for name in ("x_1.npy", "x_2.npy"):
        assert (folder / "hops" / "node" / name).read_bytes() == (folder / "hops-again" / "node" / name).read_bytes()
    for words, problem in (
        ([*command, "--best", "2", "-o", out], "reads a store and no model; leave --best out"),
        (command, "say where to write, with -o DIR"),
        (["infer", store, "--norm", "mean"], "--norm is for --propagate"),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err


def test_a_run_is_loaded_in_one_call_with_its_best_weights(folder: Path, told: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    run = hoploom.load_run(told["folder"])
    assert torch.equal(before, torch.get_rng_state())
    assert (run.checkpoint, run.run_file.model.hidden) == (folder / "run" / "best.safetensors", 8)
    assert not run.model.training
    batch = next(iter(hoploom.NeighborLoader(run.store, [-1, -1], input_nodes="test", batch_size=1000)))
    with torch.no_grad():
        correct = run.model(batch)[: batch.batch_size].argmax(dim=1) == batch.y[: batch.batch_size]
    assert float(correct.double().mean()) == pytest.approx(told["test"]["accuracy"])
    moved = hoploom.load_run(told["folder"], checkpoint="last", overrides=[f"store={folder / 'graph.store'}"])
    assert moved.checkpoint.name == "last.safetensors"
    with pytest.raises(ConfigError, match=r"is a store, not a run; give the output folder"):
        hoploom.load_run(folder / "graph.store")
    with pytest.raises(ConfigError, match="checkpoint is 'bst'; give 'best' or 'last'"):
        hoploom.load_run(told["folder"], checkpoint="bst")


def test_a_run_on_given_links_is_evaluated_inferred_loaded_and_resumed(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Its own run.toml must be read again by each of them."""
    store = hoploom.open(folder / "graph.store")
    ends = torch.stack([store.neighbors(node)[:1] for node in range(60, 100)]).view(-1)
    lines = "".join(f"{source},{node}\n" for source, node in zip(ends.tolist(), range(60, 100), strict=True))
    for split in ("val", "test"):
        (tmp_path / f"{split}.csv").write_text(f"source,destination\n{lines}")
    text = f'[task]\nkind = "link-prediction"\nlinks = "{tmp_path}"\n'
    run = tmp_path / "run"
    (folder / "links.toml").write_text(f'{RUN}folder = "{run}"\n'.replace("[model]", f"{text}[model]"))
    command = ["train", str(folder / "links.toml"), "--quiet"]
    assert main([*command, "--set", "train.max_steps=3"]) == 0
    assert main([*command, "--resume"]) == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 2
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"] == json.loads((run / "result.json").read_text())["test"]
    assert main(["infer", str(run)]) == 0
    assert pq.read_table(run / "nodes" / "node").num_rows == 400
    assert hoploom.load_run(run).store.num_edges < store.num_edges


@pytest.mark.parametrize("command", ["evaluate", "infer"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path, capsys: Captured) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "is no run: it has no run.toml; give the output folder of `hoploom train`" in capsys.readouterr().err
    assert main([command, str(tmp_path / "nope")]) == 2
    assert "nope does not exist; give the output folder of `hoploom train`" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text('store = "graph.store"')
    assert main([command, str(tmp_path)]) == 2
    assert "has no best.safetensors; train first" in capsys.readouterr().err
