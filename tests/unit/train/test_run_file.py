"""run.toml: what it takes, what it refuses and in which line, and that what is written is read back the same."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import ROOT
from support.fit_workers import labelled
from support.key_tables import condition_of, key_table
from support.refusals import assert_raises

import hoploom
from hoploom import ConfigError
from hoploom.config.rules import REQUIRED, default_of, key_of, keys_in
from hoploom.config.values import as_toml
from hoploom.deploy.resolve import read_cluster
from hoploom.ingest.tables.graph_file import read_graph
from hoploom.ranks.context import init
from hoploom.train.runs.first_run_file import template
from hoploom.train.runs.run import load_run, run
from hoploom.train.runs.run_file import (
    FIELDS,
    HEADINGS,
    KEYS,
    applies,
    check_run,
    parse_run_file,
    read_run_file,
    to_toml,
    values_of,
)

STORE = 'store = "s"\n'
KNOWLEDGE = STORE + "[task]\nkind = 'link-prediction'\nrelation_field = 'r'\nloss = 'softmax'\n[model]\n"


MISTAKES = [  # text, line, what the message says
    # not TOML
    ('store = "s\n', 1, "not TOML: .*quotes"),
    (STORE + "[train]\nepochs = 3\nepochs = 4\n", 4, "not TOML: Cannot overwrite"),
    (STORE + "[train]\n\n\nprecision = float32\n", 5, "not TOML.*strings need quotes"),
    # keys that are not known
    ("stroe = 's'\n", 1, r"unknown key stroe; did you mean store\?"),
    (STORE + "[loader]\nfanout = [1]\n", 3, r"unknown key fanout in \[loader\]; did you mean fanouts\?"),
    (STORE + "[train]\ndevice = 'gpu'\n", 3, r'did you mean "cuda"\?'),
    (STORE + "[train]\nbatch_size = 3\n", 3, r"did you mean batch_size in \[loader\]\?"),
    (STORE + "[train]\nlearning = 3\n", 3, r"unknown key learning in \[train\]; did you mean "),
    (STORE + "epochs = 3\n", 2, r"unknown key epochs; did you mean epochs in \[train\]\?"),
    (STORE + "[optimizer]\nseed = 1\n", 3, "did you mean seed, above the sections"),
    (STORE + "model = 'sage'\n", 2, r"model is 'sage'; it is a section, write \[model\]"),
    # wrong types
    ("store = 3\n", 1, "store is 3; give a path in quotes"),
    (STORE + "seed = 1.0\n", 2, "seed is 1.0; give a whole number"),
    (STORE + "seed = 9223372036854775808\n", 2, "give a whole number from 0 to 9223372036854775807"),
    (STORE + "[loader]\nfanouts = 10\n", 3, r"loader.fanouts is 10; give a list .* \[15, 10, 5\]"),
    (STORE + "[loader]\nfanouts = [\n  10, # first\n  '5',\n]\n", 3, "loader.fanouts is"),
    # wrong values
    (STORE + "[train]\nepochs = 0\n", 3, "train.epochs is 0; give a whole number of at least 1"),
    (STORE + "[loader]\nfanouts = [5, -2]\n", 3, "loader.fanouts is"),
    (STORE + "[optimizer]\nlr = 0\n", 3, "optimizer.lr is 0; give a number above 0"),
    (STORE + "[model]\nname = 'SAGE'\n", 3, r'model.name is .*; did you mean "sage"\?'),
    (STORE + "[model]\nfactory = 'my_model.py'\n", 3, 'give "module:function"'),
    # keys that have no effect here
    (STORE + "[model]\nheads = 8\n", 3, 'model.heads is for model.name = "gat" or .*, and that is "sage"'),
    (STORE + "[model]\nfactory = 'a:b'\nhidden = 8\n", 4, "model.hidden has no effect with model.factory"),
    (STORE + "[model]\noptions = { a = 1 }\n", 3, "model.options has no effect without model.factory"),
    (STORE + "[task]\nrelation = 'a b c'\n", 3, 'task.relation is for task.kind = "link-prediction"'),
    (STORE + "[optimizer]\nmomentum = 0.9\n", 3, 'optimizer.momentum is for optimizer.name = "sgd"'),
    # keys that disagree
    (STORE + "[model]\nname = 'gat'\nhidden = 30\n", 4, "model.hidden is 30, no multiple of model.heads = 4"),
    (STORE + "[model]\nlayers = 3\n[loader]\nfanouts = [5, 4]\n", 5, r"has 2 entries for 3 layers \(.*:3\).*\[5, 4, 4"),
    (STORE + "[model]\nlayers = 3\n", 3, "loader.fanouts has 2 entries for 3 layers"),
    (STORE + "[loader]\nfanouts = [5]\neval_fanouts = [5, 5]\n", 4, "loader.eval_fanouts has 2 entries"),
    (STORE + "[loader.relation_fanouts]\n'a b c' = [5]\n", 2, "'a b c', has 1 entry, loader.fanouts 2"),
    (STORE + "[loader]\nlabor = true\nreplace = true\n", 4, "loader.replace cannot be combined with loader.labor"),
    (STORE + "[loader]\nweighted = true\ntemporal = 'last'\n", 4, "draws nothing"),
    (STORE + "[task]\nval = ''\n[train]\npatience = 3\n", 5, "train.patience needs a validation split"),
    (STORE + "[task]\nval = ''\n[scheduler]\nname = 'plateau'\n", 5, "needs a validation split"),
    (STORE + "[task]\nkind = 'link-prediction'\nval_share = 0.6\ntest_share = 0.4\n", 5, "add up to 1; leave some"),
    (STORE + "[task]\nkind = 'link-prediction'\nlinks = 'l'\nval_share = 0.1\n", 5, "has no effect with task.links"),
    (STORE + "[task]\nrelation_field = 'r'\n", 3, 'task.relation_field is for task.kind = "link-prediction"'),
    (STORE + "[model]\ndecoder = 'transe'\n", 3, 'model.decoder is for task.kind = "link-prediction"'),
    (KNOWLEDGE.replace("softmax", "binary"), 4, 'needs a loss that ranks; set task.loss, such as "softmax"'),
    (KNOWLEDGE, 4, "model.decoder is 'dot', which scores all relations alike; take another, such as 'complex'"),
    (KNOWLEDGE + "decoder = 'cosine'\n", 7, "model.decoder is 'cosine', which scores all relations alike"),
    (
        KNOWLEDGE + "decoder = 'rotate'\nhidden = 33\n",
        8,
        "hidden is 33, and model.decoder = 'rotate' needs an even number",
    ),
    # where the graph is
    (STORE + "[cluster]\nservers = 7000\n", 3, "cluster.servers is 7000; give a list of host:port, e.g. "),
    (STORE + "[cluster]\nparts = [-1]\n", 3, r"cluster.parts is \[-1\]; give a list of parts, each once"),
    (STORE + "[cluster]\ncache = '120%'\n", 3, 'cluster.cache is .*; give a share or a size in quotes, e.g. "20%"'),
    (STORE + "[placement]\ntopology = 'gpu'\n", 3, 'placement.topology is .gpu.; give "cuda", "host" or "auto"'),
    (STORE + "[placement]\ntopology = ' host'\n", 3, 'placement.topology is . host.; give .* did you mean "host"'),
    (STORE + "[placement]\nfeatures = '0.2'\n", 3, 'is .0.2.; give .* a share such as "20%" or 0.2, or a size'),
    (STORE + "[placement]\nfeatures = 1.2\n", 3, "placement.features is 1.2; give"),
    ("[cluster]\nservers=['a:1']\n[placement]\ntopology='cuda'\n", 4, "placement.topology has no effect without store"),
    (STORE + "[cluster]\nkey = 'k'\n", 3, "cluster.key is given alone; give cluster.cert and cluster.key"),
    (STORE + "[cluster]\nkey = 'k'\ncert = 'c'\n", 4, "cluster.cert is given without cluster.ca; give the CA"),
    ("[cluster]\nservers = ['a:1']\ncache = '4GB'\n", 3, "no effect where servers make the .* start them with --cache"),
    ("[cluster]\nservers = ['a:1']\nparts = [0]\n", 3, "cluster.parts has no effect without store; leave it out"),
]


@pytest.mark.parametrize(("text", "line", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_named_with_its_line_and_the_way_out(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_run_file(text, name="my run.toml")
    assert str(raised.value).startswith(f"my run.toml:{line}: ")
    assert "\n" not in str(raised.value)


def test_what_is_missing_is_named_with_the_file() -> None:
    with pytest.raises(ConfigError, match=r'^run.toml: store is missing; add a line such as store = "graph.store"$'):
        parse_run_file("seed = 3")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.toml does not exist; `hoploom init .*run.toml` writes one"):
        read_run_file(tmp_path / "run.toml")
    (tmp_path / "graph.store").mkdir()
    (tmp_path / "graph.store" / "store.json").touch()
    with pytest.raises(ConfigError, match=r"is a store; .* run\.toml that `hoploom init --store .*graph.store` writes"):
        read_run_file(tmp_path / "graph.store")
    with pytest.raises(ConfigError, match=r"is a folder; give a file: `hoploom init .*` writes one to start from"):
        read_run_file(tmp_path)
    (tmp_path / "run.toml").touch()
    said = "is the folder of a run; continue it with `hoploom train .*run.toml --resume"
    assert_raises(ConfigError, said, read_run_file, tmp_path)
    (tmp_path / "run.toml").write_bytes(b'store = "s"\n# caf\xe9\n')
    assert_raises(ConfigError, r"run.toml:2: byte 0xe9 is not UTF-8", read_run_file, tmp_path / "run.toml")


DEEP = ".".join("a" * 1500)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, f'graph = "x"\n{DEEP} = 1'], ids=["brackets", "keys"])
def test_brackets_and_keys_that_are_nested_too_deep_are_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.toml: brackets or dotted keys are nested too deep; use fewer levels$"):
        parse_run_file(text)


def test_an_override_whose_key_is_nested_too_deep_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--set a\.a\..*: not TOML; give a key and a value"):
        parse_run_file(STORE, [f"{DEEP}=1"])


@pytest.mark.parametrize("mark", ["﻿", ""], ids=["with", "without"])
def test_files_of_other_systems_are_read(tmp_path: Path, mark: str) -> None:
    (tmp_path / "run.toml").write_bytes((mark + 'store = "s"\r\n[train]\r\nepoch = 3\r\n').encode())
    assert_raises(ConfigError, r"run.toml:3: unknown key epoch", read_run_file, tmp_path / "run.toml")


def test_set_overrides_the_file() -> None:
    text = STORE + "[train]\nepochs = 3\n[model]\nfactory = 'a:b'\noptions = { width = 1, depth = 2 }\n"
    overrides = ["train.epochs=5", "train.epochs = 7", "task.label=12", "loader.fanouts=[4, 3]", "optimizer={lr=0.5}"]
    overrides += ["model.options.width=9", 'loader.relation_fanouts."a b c"=[1, 2]', "output.folder=runs/a"]
    overrides += ['task.more={a="node-regression"}', 'task.more={b="node-regression"}']
    run_file = parse_run_file(text, overrides, folder=Path("/elsewhere"))
    assert list(run_file.task.more) == ["b"]  # a table is replaced as a whole
    assert (run_file.train.epochs, run_file.task.label, run_file.loader.fanouts) == (7, "12", (4, 3))
    assert run_file.model.options == {"width": 9, "depth": 2}
    assert run_file.loader.relation_fanouts == {"a b c": (1, 2)}
    assert run_file.optimizer.lr == 0.5
    assert run_file.store == Path("/elsewhere/s")  # paths of the file are relative to the file
    assert run_file.output.folder == Path.cwd() / "runs/a"


SET_MISTAKES = [
    ("train.epoch=3", r"unknown key epoch in \[train\]; did you mean epochs\?"),
    ("train.epochs=many", "train.epochs is 'many'; give a whole number"),
    ("train.epochs", "there is no key=value"),
    ("=3", "there is no key=value"),
    ("loader.fanouts=[1, 2", "not TOML"),
    ("a b=3", "not TOML"),
    ("model=sage", "model is 'sage'; it is a section"),
    ("model.name=gatt", r'did you mean "gat"\?'),
    ("model.heads=8", "model.heads is for model.name"),
    ("loader.fanouts=[1, 2, 3]", "has 3 entries for 2 layers"),
    ("train.epochs.x=3", "train.epochs is {'x': 3}"),
]


@pytest.mark.parametrize(("override", "message"), SET_MISTAKES, ids=[override for override, _ in SET_MISTAKES])
def test_a_mistake_in_set_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_run_file(STORE + "[model]\nlayers = 2\n", [override])
    assert str(raised.value).startswith(f"--set {override}: ")


def test_set_may_take_the_say_from_a_key_of_the_file() -> None:
    text = STORE + "[model]\nname = 'gat'\nheads = 8\n"
    run_file = parse_run_file(text, ["model.name=gcn"])
    assert run_file.model.name == "gcn"
    assert parse_run_file(to_toml(run_file)) == run_file
    with pytest.raises(ConfigError, match=r"^--set model.heads=2: model.heads is for model.name"):
        parse_run_file(text, ["model.name=gcn", "model.heads=2"])


def test_servers_take_the_place_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = parse_run_file("[train]\nepochs = 3\n", ["cluster.servers=a:1,b:2"])
    assert (run_file.store, run_file.cluster.servers) == (None, ("a:1", "b:2"))
    assert parse_run_file(to_toml(run_file)) == run_file
    monkeypatch.setenv("HOPLOOM_SERVERS", "a:1")  # hoploom launch
    assert parse_run_file("seed = 3").store is None


def _drawn(random: Random) -> list[str]:
    """A run.toml as overrides: each key left out, or with its default, its example or one of its words."""
    chosen = []
    for name, key in KEYS.items():
        values = [default_of(FIELDS[name]), key.example, *key.rule.words]
        value = random.choice([None, *(v for v in values if v is not REQUIRED)])
        if value is not None and (name in ("task.kind", "task.links") or random.random() < 0.4):
            chosen.append(f"{name}={as_toml(value)}")
    return chosen


def test_what_a_run_writes_is_read_back_whatever_keys_it_has() -> None:
    """A run that trained can be evaluated, loaded and resumed: its own run.toml holds no key that is refused."""
    random, taken = Random(0), dict.fromkeys(KEYS, 0)
    for _ in range(150):
        chosen = _drawn(random)
        while True:  # drop what does not go with the others, until the rest does
            try:
                run_file = parse_run_file("", ["store='s'", *chosen], folder=Path("/a"))
                break
            except ConfigError as error:
                refused = str(error).removeprefix("--set ").partition("=")[0].partition(":")[0]
                left = [one for one in chosen if not one.startswith(f"{refused}=")]
                chosen = left if len(left) < len(chosen) else chosen[:-1]
        written = to_toml(run_file)
        assert parse_run_file(written, folder=Path("/b")) == run_file, written
        for one in chosen:
            taken[one.partition("=")[0]] += 1
    assert sum(count > 0 for count in taken.values()) > 0.9 * len(taken), taken


def test_what_init_drafts_is_read_whatever_keys_it_fills_in() -> None:
    """A commented-out line is one that may not stand there; every line that may is read back the same."""
    random = Random(0)
    for _ in range(40):
        known: dict[str, Any] = {}
        for name in ("task.kind", "task.links", "model.name", "model.factory", "scheduler.name", "optimizer.name"):
            value = random.choice([None, KEYS[name].example, *KEYS[name].rule.words])
            known |= {} if value is None else {name: value}
        run_file = parse_run_file(template({"store": "s"} | known))
        values = values_of(run_file)
        assert all(Path(values[name]).name == value for name, value in known.items() if applies(name, values))
        assert parse_run_file(to_toml(run_file)) == run_file


def test_the_template_holds_every_key_and_the_defaults() -> None:
    text = template()
    least, full = parse_run_file('store = "graph.store"'), parse_run_file(text)
    assert full == least
    for name in KEYS:
        assert f"{name.rpartition('.')[2]} = " in text
    assert [line[1 : line.index("]")] for line in text.splitlines() if line.startswith("[")] == list(HEADINGS)[1:]


def test_the_template_takes_what_is_known() -> None:
    text = template({"store": "é.store", "model.name": "rgat", "loader.fanouts": (3, 2, 1)}, {"task.label": "one of 4"})
    run_file = parse_run_file(text)
    assert (run_file.store.name, run_file.model.name, run_file.model.layers) == ("é.store", "rgat", 3)
    assert "# one of 4\n" in text
    assert "\nheads = 4 " in text


MANY = 4  # keys of a section that need the same choice, which then have a table of their own


def run_reference() -> str:
    """Return the tables of every key, in Markdown, for the documentation: a heading per section, then its keys."""
    lines = []
    for section, owner in HEADINGS.items():
        heading = f"### [{section}]" if section else "### Top of the file"
        lines += ["", heading, "", *([str(owner.__doc__), ""] if section else []), *_tables(keys_in(owner))]
    return "\n".join(lines) + "\n"


def _tables(keys: Mapping[str, "Field[Any]"]) -> list[str]:
    """Return one table, and one more for each choice that many of the keys need, such as a kind of task."""
    shared = Counter(key_of(described).only for described in keys.values())
    apart = [only for only, num_keys in shared.items() if only and only.words and num_keys >= MANY]
    lines = key_table((name, described) for name, described in keys.items() if key_of(described).only not in apart)
    for only in apart:
        chosen = ((name, described) for name, described in keys.items() if key_of(described).only == only)
        condition = condition_of(only)
        lines += ["", f"{condition[0].upper()}{condition[1:]}:", "", *key_table(chosen, under=only)]
    return lines


def test_the_page_has_the_table_of_every_key() -> None:
    page = ROOT / "docs" / "training.md"
    assert run_reference() in page.read_text()


def test_a_step_gives_every_process_a_seed_or_is_refused() -> None:
    run_file = parse_run_file(STORE + "[loader]\nbatch_size = 10\n")
    for world_size in (1, 3, 10):
        check_run(run_file, world_size, resume=False)
    message = r"^run.toml:3: loader.batch_size is 10 for 11 processes; give at least 11$"
    assert_raises(ConfigError, message, check_run, run_file, 11, resume=False)


def test_a_file_of_another_kind_is_recognised_by_its_sections(tmp_path: Path) -> None:
    graph, run, cluster = (tmp_path / f"{name}.toml" for name in ("graph", "run", "cluster"))
    graph.write_text("[nodes.node]\ncount = 3\n")
    run.write_text('store = "s"\n[loader]\nfanouts = [2]\n')
    cluster.write_text('store = "s"\nhosts = ["a"]\n')
    said = {graph: "this is a graph.toml.*`hoploom build`", run: "this is a run.toml.*`hoploom train`"}
    said[cluster] = "this is a cluster file.*`hoploom launch`"
    for read, own in ((read_run_file, run), (read_graph, graph), (read_cluster, cluster)):
        for path in said.keys() - {own}:
            assert_raises(ConfigError, said[path], read, path)


def several_run(folder: Path, task: str, graph: Any = None) -> Any:
    graph = labelled() if graph is None else graph
    graph.test_mask = graph.val_mask
    hoploom.from_pyg(graph).save(folder / "graph.store")
    text = f'store = "graph.store"\n[task]\n{task}\n[model]\nhidden = 8\n[loader]\nthreads = 1\n[train]\nepochs = 9\n'
    return run(parse_run_file(text + "[output]\nloggers = []\n", folder=folder), init(device="cpu"), progress=False)


def test_a_run_learns_several_labels_of_its_nodes(tmp_path: Path) -> None:
    more = 'more = { amount = "node-regression", labels = "multi-label" }'
    result = several_run(tmp_path, f"{more}\nweights = {{ amount = 0.5 }}")
    first, last = result.outcome.history[0], result.outcome.history[-1]
    assert {"y_accuracy", "amount_rmse", "labels_auroc"} <= set(last)
    assert (result.monitor, last["train_loss"] < first["train_loss"]) == ("y_accuracy", True)
    assert load_run(result.folder).model.out_channels == 3 + 1 + 4


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ('more = { amount = "regression" }', "task.more"),
        ('more = { absent = "multi-label" }', "task.more.absent names 'absent', no field of 'node'"),
        (
            'more = { y = "node-regression" }',
            "run.toml:3: task.more has 'y', which is task.label; set task.kind for it",
        ),
        ("weights = { y = 0.5 }", "run.toml:3: task.weights has no effect without task.more"),
        (
            'more = { labels = "multi-label" }\nweights = { amount = 0.5 }',
            "run.toml:4: task.weights: weights has 'amount', and the tasks are",
        ),
    ],
)
def test_further_labels_that_cannot_be_are_refused(task: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        several_run(tmp_path, task)


def test_a_split_without_any_label_of_a_task_is_refused(tmp_path: Path) -> None:
    graph = labelled()
    graph.amount[graph.val_mask] = float("nan")
    said = r"run.toml:3: the split 'val': none of the 70 nodes has a label 'amount'; leave its task out"
    with pytest.raises(ConfigError, match=said):
        several_run(tmp_path, 'val = "val"\nmore = { amount = "node-regression" }', graph)
