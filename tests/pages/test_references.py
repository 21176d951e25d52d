"""The ports of other libraries run in the form of each document and learn, and their tables name what is there."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from getpass import getuser
from pathlib import Path

import pytest
from support import ROOT, TESTS
from support.ports import free_ports
from support.slurm_cluster import Slurm
from support.sshd import running_sshd

import hoploom
from hoploom import cli
from hoploom.ranks import environment

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(240)]


PORTS = ROOT / "examples" / "references"
MULTI_GPU = PORTS / "pyg_multi_gpu" / "multi_gpu.py"
MULTI_NODE = PORTS / "pyg_multi_node" / "multi_node.py"
CUSTOM_SAMPLER = PORTS / "dgl_multi_gpu_custom_sampler" / "custom_sampler.py"
TRAIN_SAGE = PORTS / "glt_worker_mode" / "train_sage.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT = 220.0  # seconds: six processes import torch, on a machine that does other things too

slow = pytest.mark.slow
Run = Callable[..., str]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    made = runpy.run_path(str(PORTS / "small_data.py"))
    for name, write in made["LAYOUTS"].items():
        write(folder / name, made["make_graph"]())
    return folder


@pytest.fixture(scope="module")
def checkout(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of GLT's examples with the script, and beside them the store in two parts."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PORTS / "glt_examples", folder, dirs_exist_ok=True)
    shutil.copy(TRAIN_SAGE, folder)
    glt = graphs / "glt-partitions"
    words = ["import", "glt", glt / "ogbn-products-partitions", "--labels", glt / "ogbn-products-label" / "label.pt"]
    words += ["--split", f"test={glt}/ogbn-products-test-partitions"]
    for part in range(2):
        words += ["--split", f"train={glt}/ogbn-products-train-partitions/partition{part}.pt"]
    assert cli.main([str(word) for word in (*words, "-o", folder / "products.parts")]) == 0
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A port as one process, this one: what it prints."""

    def in_this_process(fn: Callable[..., object], nprocs: int, args: Sequence[object], **nodes: object) -> None:
        with hoploom.init(device="cpu") as context:
            fn(context, *args)

    def run(script: Path, *words: object) -> str:
        monkeypatch.setattr(hoploom, "spawn", in_this_process)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        runpy.run_path(str(script), run_name="__main__")
        return capfd.readouterr().out

    return run


def started(*words: object, folder: Path, variables: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    command = [str(word) for word in words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def said(*processes: "subprocess.Popen[str]") -> list[str]:
    try:
        out = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(out)
    return out


def by_its_readme(port: str, folder: Path, num_blocks: int = 1, changed: Mapping[str, str] | None = None) -> str:
    """What the first commands of a README print, typed into a shell as they stand there, but for these words."""
    shutil.copytree(PORTS, folder / "references")
    blocks = re.findall(r"^```text\n(.*?)^```", (PORTS / port / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = "\n".join([*blocks[:num_blocks], "wait"])
    for old, new in (changed or {}).items():
        assert old in commands
        commands = commands.replace(old, new)
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    [out] = said(started("bash", "-ec", commands, folder=folder / "references" / port, variables=variables))
    return out


def last(what: str, text: str) -> float:
    return float(re.findall(rf"{what}:? (\d+\.\d+)", text)[-1])


def reddit_of(graphs: Path, folder: Path) -> Path:
    return Path(shutil.copytree(graphs / "reddit", folder / "Reddit"))


def test_reddit_is_learned_by_the_tutorials_script(graphs: Path, tmp_path: Path, alone: Run) -> None:
    out = alone(MULTI_GPU, "--root", reddit_of(graphs, tmp_path), "--epochs", 5)
    assert last("Validation Accuracy", out) > 0.6  # one of five classes


@slow
def test_torchrun_with_two_ranks_learns_reddit(graphs: Path, tmp_path: Path) -> None:
    words = ("--standalone", "--nproc-per-node", 2, MULTI_GPU, "--root", reddit_of(graphs, tmp_path), "--epochs", 5)
    [out] = said(started(*TORCHRUN, *words, folder=tmp_path))
    assert re.findall(r"^Epoch: (\d+),", out, re.MULTILINE) == ["01", "02", "03", "04", "05"]  # rank 0 alone speaks
    assert last("Validation Accuracy", out) > 0.6  # one of five classes


@slow
def test_reddit_is_learned_by_processes_that_the_script_starts(tmp_path: Path) -> None:
    assert last("Validation Accuracy", by_its_readme("pyg_multi_gpu", tmp_path)) > 0.9


@slow  # the quick tests run plain DDP with our loaders on two ranks
def test_rank_0_reads_all_seeds_of_its_validation_loader_and_not_half_of_them(tmp_path: Path) -> None:
    """PyG's script with one import changed: seeds divided by hand, and rank 0 evaluates alone."""
    script = TESTS / "support" / "pyg_scripts" / "tutorial.py"
    [out] = said(started(sys.executable, script, free_ports(1)[0], folder=tmp_path))
    assert out.count("read 350 of 350 seeds in 3 steps") == 6
    assert "each of 2 ranks reads the 350 seeds that it was given, in 3 steps; 1 seeds of the split 'train'" in out
    assert len(re.findall(r"epoch \d: (\d+) of \1 for validation", out)) == 3


def test_the_23rd_gpu_has_rank_22_and_local_rank_6() -> None:
    place = {"SLURM_PROCID": "22", "SLURM_LOCALID": "6", "SLURM_NODEID": "2", "SLURM_NTASKS": "24"}
    tasks = {"SLURM_STEP_NUM_TASKS": "24", "SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_STEP_NODELIST": "gpu[1-3]"}
    read = environment.read_rank(place | tasks | {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})
    assert (read.rank, read.local_rank, read.world_size) == (22, 6, 24)


def test_papers100M_is_read_from_the_files_that_ogb_downloads(  # noqa: N802
    graphs: Path, tmp_path: Path, alone: Run
) -> None:
    store = tmp_path / "papers100M.store"
    assert cli.main(["import", "ogb", "ogbn-papers100M", str(graphs / "papers100M"), "-o", str(store)]) == 0
    assert last("Loss", alone(MULTI_NODE, "--store", store, "--epochs", 2)) < 1.0  # log(5) is 1.6


@slow
def test_two_nodes_on_loopback_train_together(tmp_path: Path) -> None:
    words = (MULTI_NODE, "--store", tmp_path / "fake.store", "--nodes", 2000, "--epochs", 2)
    meeting = ("--master-addr", "127.0.0.1", "--master-port", free_ports(1)[0])
    command = (*TORCHRUN, "--nnodes", 2, *meeting, "--nproc-per-node", 1, "--node-rank")
    first, second = said(*(started(*command, node, *words, folder=tmp_path) for node in range(2)))
    assert "rank 0 of 2, local rank 0" in first
    assert "rank 1 of 2, local rank 0" in second
    assert re.findall(r"^Epoch: (\d+)", first, re.MULTILINE) == ["01", "02"]
    assert "Epoch" not in second


def test_the_cluster_file_gives_srun_the_options_of_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    file = PORTS / "pyg_multi_node" / "slurm.toml"
    assert cli.main(["launch", str(file), "--dry-run", "--", "multi_node.py", "--store", "papers100M.store"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script
    assert "--nproc-per-node 8" in script
    mounts = "--container-mounts=/ogb-papers100m/:/workspace/dataset"
    assert all(option in script for option in ("--container-name=cont", "--container-image=IMAGE", mounts))
    assert "--mem-bind=local" in script


@pytest.mark.parametrize("file", ["slurm.toml", "job.sh"])
def test_a_container_sees_the_folder_of_the_script_and_starts_there(file: str) -> None:
    text = (PORTS / "pyg_multi_node" / file).read_text()
    [mounts] = re.findall(r"container.mounts ?= ?(.+)", text)
    [folder] = re.findall(r'container.workdir ?= ?"?(/[\w/]+)', text)
    assert re.search(rf':{folder}"', mounts)


@slow
def test_srun_starts_the_script_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """The command of the tutorial, without its container."""
    words = ("--store", tmp_path / "fake.store", "--nodes", 2000, "--epochs", 1)
    command = ("srun", "-l", "-N2", "--ntasks-per-node=1", sys.executable, MULTI_NODE, *words)
    [out] = said(started(*command, folder=tmp_path, variables=slurm.environment))
    assert {"0: rank 0 of 2, local rank 0", "1: rank 1 of 2, local rank 0"} <= {
        line.split(":", 2)[0] + ":" + line.split(":", 2)[1] for line in out.splitlines()
    }
    assert "0: Epoch: 01" in out


def test_products_is_learned_with_the_tutorials_sampler(graphs: Path, tmp_path: Path, alone: Run) -> None:
    root = shutil.copytree(graphs / "products", tmp_path / "products")
    assert last("Validation Accuracy", alone(CUSTOM_SAMPLER, "--root", root, "--epochs", 3)) > 0.6
    assert (root / "model.safetensors").exists()


@slow
def test_two_processes_learn_products_with_the_tutorials_sampler(tmp_path: Path) -> None:
    out = by_its_readme("dgl_multi_gpu_custom_sampler", tmp_path)
    assert last("Validation Accuracy", out) > 0.9
    assert out.count("Validation Accuracy") == 10  # rank 0 alone speaks


def test_products_is_cut_in_two_for_worker_mode(graphs: Path, tmp_path: Path, alone: Run) -> None:
    store, parts = tmp_path / "products.store", tmp_path / "products.parts"
    assert cli.main(["import", "ogb", "ogbn-products", str(graphs / "products"), "-o", str(store)]) == 0
    assert cli.main(["partition", str(store), "-o", str(parts), "--parts", "2", "--fanouts", "15,10,5"]) == 0
    out = alone(TRAIN_SAGE, "--store", parts, "--epochs", 2)
    assert "rank 0 of 1 maps 2 of 2 parts" in out
    assert last("Test accuracy", out) > 0.6


def trained(out: str, label: str, rank: int, num_parts: int) -> bool:
    """Whether this host's trainer says who it is, and has trained to the end."""
    place = f"{label}rank {rank} of 2 maps {num_parts} of 2 parts\n"
    return place in out and f"{label}-- [Trainer {rank}] Epoch: 002" in out


@slow
def test_two_nodes_train_in_worker_mode(tmp_path: Path) -> None:
    changed = {
        "--master_port=11234": f"--master_port={free_ports(1)[0]}",
        "--store products.parts": "--store products.parts --epochs=3",
    }
    out = by_its_readme("glt_worker_mode", tmp_path, num_blocks=2, changed=changed)
    assert trained(out, "", 0, 1)
    assert trained(out, "", 1, 1)
    assert last("Test accuracy", out) > 0.9


def launched(folder: Path, file: str) -> str:
    command = (sys.executable, "-m", "hoploom", "launch", file, "--", "train_sage.py", "--epochs", 3)
    [out] = said(started(*command, folder=folder))
    return out


@slow
def test_two_servers_make_batches_for_two_clients(checkout: Path, alone: Run) -> None:
    out = launched(checkout, "server_client.toml")
    assert all(f'server{part}/server   | {{"ready": ' in out for part in range(2))
    assert trained(out, "client0/trainers | ", 0, 0)
    assert trained(out, "client1/trainers | ", 1, 0)
    words = ("--store", checkout / "products.parts", "--epochs", 3, "--batch_size", 1024)  # the seeds of both clients
    assert last("Test accuracy", out) == pytest.approx(last("Test accuracy", alone(TRAIN_SAGE, *words)), abs=0.01)


@slow
def test_servers_and_clients_are_started_by_hand(checkout: Path) -> None:
    ports = free_ports(3)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    serve = (sys.executable, "-m", "hoploom", "serve", "products.parts", "--part")
    with ExitStack() as stack:
        for part in range(2):
            words = (part, "--listen", addresses[part], "--peers", addresses[1 - part])
            stack.callback(ended, started(*serve, *words, folder=checkout))
        command = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--master_addr=localhost")
        command += (f"--master_port={ports[2]}",)
        words = ("train_sage.py", "--servers", ",".join(addresses[:2]), "--epochs", 3)
        first, second = said(*(started(*command, f"--node_rank={node}", *words, folder=checkout) for node in range(2)))
    assert trained(first, "", 0, 0)
    assert trained(second, "", 1, 0)
    assert last("Test accuracy", first) > 0.9


def ended(server: "subprocess.Popen[str]") -> None:
    server.terminate()
    said(server)


@slow
def test_the_yaml_of_glt_starts_training_over_ssh(checkout: Path, tmp_path: Path) -> None:
    """The file of the folder with this host's addresses, and a key that is in no configuration of ssh."""
    with running_sshd(tmp_path / "ssh") as sshd:
        port, master = sshd.port, free_ports(1)[0]
        text = (checkout / "dist_train_sage_sup_config.yml").read_text()
        for old, new in {
            "0.0.0.0": "127.0.0.1",
            "1.1.1.1": "localhost",
            "[22, 22]": f"[{port}, {port}]",
            "/path/to/python": sys.executable,
            "- root": f"- {getuser()}",
            "/path/to/work": str(checkout),
            "0,1,2,3": "0",
            "4,5,6,7": "1",
        }.items():
            assert old in text
            text = text.replace(old, new)
        config = tmp_path / "ssh_config"
        config.write_text("\n".join(line for line in sshd.config.read_text().splitlines() if "Identity" not in line))
        ssh = f"ssh:\n  config: {config}\n  identity: {sshd.folder / 'user_key'}\n"
        (checkout / "hosts.yml").write_text(f"{text}\n{ssh}")
        meeting = ("--master_addr=127.0.0.1", f"--master_port={master}")
        command = (sys.executable, "-m", "hoploom", "launch", "hosts.yml", *meeting, "--", "train_sage.py")
        words = ("--store", "products.parts", "--epochs", 3, "--batch_size", 256)
        [out] = said(started(*command, *words, folder=checkout))
    assert trained(out, "127.0.0.1/trainers | ", 0, 1)
    assert trained(out, "localhost/trainers | ", 1, 1)


SECTIONS = {  # port -> the page with what to write, and its heading
    "pyg_multi_gpu": ("coming-from-pyg.md", "Port PyG's multi-GPU tutorial"),
    "pyg_multi_node": ("coming-from-pyg.md", "Port PyG's multi-node tutorial"),
    "dgl_multi_gpu_custom_sampler": ("coming-from-dgl.md", "Port DGL's multi-GPU tutorial"),
    "glt_worker_mode": ("coming-from-glt.md", "Port GLT's worker mode"),
    "glt_examples": ("coming-from-glt.md", "Port GLT's launcher and server-client mode"),
}
HEADS = {"With Hoploom", "Where it is done"}  # over the right columns of a page and of a README
ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w./-]+?)(?:::(\w+))?`(?:: `([^`]+)`)?")
OPEN = "Not here"  # how a row begins, or a sentence of it, of which nothing or not all works
TABLE = "\n## Every row\n"  # where the table of a README begins

each_port = pytest.mark.parametrize("port", SECTIONS)


def rows(text: str) -> list[tuple[str, str]]:
    return [row for row in ROW.findall(text) if row[1] not in HEADS]


def readme(port: str) -> list[tuple[str, str]]:
    return rows((PORTS / port / "README.md").read_text())


def page(port: str) -> list[tuple[str, str]]:
    name, heading = SECTIONS[port]
    return rows((ROOT / "docs" / name).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0])


def is_there(port: str, file: str, test: str, fragment: str) -> bool:
    """Whether the file exists, and defines this test, or holds these words."""
    path = ROOT / file if file.startswith(("tests/", "benchmarks")) else PORTS / port / file
    if not path.exists():
        return False
    if test:
        return test in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    if path.name == "README.md":  # its table would hold every fragment that it names
        return fragment != "" and fragment in path.read_text().split(TABLE)[0]
    return fragment in path.read_text() if fragment else path.is_dir()


def test_every_folder_has_a_page() -> None:
    assert sorted(SECTIONS) == sorted(path.parent.name for path in PORTS.glob("*/README.md"))


@each_port
def test_the_page_says_what_to_write_for_every_row_of_the_readme(port: str) -> None:
    assert [key for key, _ in page(port)] == [key for key, _ in readme(port)]
    assert len(readme(port)) >= 30


@each_port
def test_every_row_names_what_is_there(port: str) -> None:
    wrong = []
    for key, where in readme(port):
        places = PLACE.findall(where)
        if not places and not where.startswith(OPEN):
            wrong.append((key, where))
        wrong += [(key, place) for place in places if not is_there(port, *place)]
    assert not wrong


@each_port
def test_what_is_missing_is_said_by_the_page_and_by_the_readme(port: str) -> None:
    said = dict(page(port))
    assert not [key for key, where in readme(port) if (OPEN in where) != (OPEN in said[key])]


@each_port
def test_every_script_of_a_port_is_named_by_its_readme(port: str) -> None:
    text = (PORTS / port / "README.md").read_text()
    names = {path.name for path in PORTS.joinpath(port).iterdir() if path.is_file()} - {"README.md"}
    assert names
    assert not [name for name in names if name not in text.split(TABLE)[0]]


def test_a_missing_file_test_or_line_is_found() -> None:
    port = "pyg_multi_gpu"
    assert is_there(port, "multi_gpu.py", "", "context.wrap(")
    assert not is_there(port, "multi_gpu.py", "", "context.unwrap(")
    assert not is_there(port, "other.py", "", "context.wrap(")
    assert is_there(port, "README.md", "", "torchrun --standalone")
    assert not is_there(port, "README.md", "", "`multi_gpu.py`: `context.wrap(`")  # a row of the table itself
    here = str(Path(__file__).relative_to(ROOT))
    assert is_there(port, here, "test_a_missing_file_test_or_line_is_found", "")
    assert not is_there(port, here, "test_that_is_not_there", "")
