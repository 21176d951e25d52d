"""Launches whose hosts fetch their parts first: from moto's server on this host, and what each executor makes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.launched import assert_nothing_is_left, launched
from support.object_store import ObjectStore

from hoploom.cli import main
from hoploom.deploy.cluster_file import Cluster, Host, KubernetesOptions, Security, ServerOptions
from hoploom.deploy.kubernetes import FETCH_DEADLINE, manifests
from hoploom.deploy.programs import processes
from hoploom.deploy.resolve import read_cluster
from hoploom.errors import ConfigError
from hoploom.store.storage_path import StoragePath
from hoploom.store.store import held_parts

SERVER = ["note:SIGTERM", "serve:127.0.0.1:7700", "sleep:100"]
CLUSTER = """
store = "{store}"
cache = "nvme"
hosts = ["127.0.0.1", "127.0.0.2"]
"""
CHECK = """
import hoploom
with hoploom.init(device="cpu") as context:
    store = hoploom.open(context=context)
    seeds = hoploom.NeighborLoader(
        store, [2], input_nodes="train", batch_size=2, rank=context.rank, world_size=context.world_size
    )
    print("sampled", sum(batch.batch_size for batch in seeds), "of", hoploom.open(context=context).path, flush=True)
"""


def uploaded(store: Path, place: StoragePath) -> StoragePath:
    for path in store.rglob("*.*"):
        with place.create(str(path.relative_to(store))) as file:
            file.write(path.read_bytes())
    return place


def launch(folder: Path, *words: str) -> tuple[int, str]:
    given = [sys.executable, "-m", "hoploom", "launch", "cluster.toml", *words]
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=110, check=False, env=environ)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)  # two launches
def test_each_host_fetches_its_parts_once_and_trains(s3: ObjectStore, sound_stores: Path, tmp_path: Path) -> None:
    source = uploaded(sound_stores / "ring", StoragePath(f"{s3.new_bucket()}/graphs/ring.parts"))
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(store=source))
    (tmp_path / "check.py").write_text(CHECK)
    store = tmp_path / "nvme" / "ring.parts"
    code, said = launch(tmp_path, "--", "check.py")
    assert code == 0, said
    for part in (0, 1):
        assert f"127.0.0.{part + 1}/fetch    | parts {part} of {source} are in {store}: " in said
    assert "they were there" not in said
    assert said.count(f"of {store}\n") == 2  # both ranks sampled
    assert held_parts(store) == [0, 1]
    code, said = launch(tmp_path, "--", "check.py")
    assert code == 0, said
    assert said.count("; they were there") == 2


def test_a_wrong_bucket_reaches_the_user_at_once(
    s3: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(store="s3://nobody-has-this-one/ring.parts"))
    assert main(["launch", str(tmp_path / "cluster.toml"), "--", "check.py"]) == 2
    said = capsys.readouterr().err
    assert "cluster.toml:2: store is " in said
    assert "there is no bucket 'nobody-has-this-one'; create it, or correct the URL" in said


def test_servers_start_when_all_parts_have_come(tmp_path: Path) -> None:
    programs = {
        "a/fetch": ["print:fetched"],
        "b/fetch": ["sleep:0.3", "print:fetched"],
        "a/server": SERVER,
        "a/trainers": ["print:trained"],
    }
    code, out, _ = launched(tmp_path, programs)
    assert code == 0
    assert [line.partition(" ")[0] for line in out.splitlines()] == ["a/fetch", "b/fetch", "a/server", "a/trainers"]
    assert_nothing_is_left(tmp_path)


def test_a_fetch_that_fails_ends_the_others_and_starts_nothing(tmp_path: Path) -> None:
    programs = {
        "a/fetch": ["await_file:b-fetch.pid", "complain:no such bucket", "exit:2"],
        "b/fetch": ["note:SIGTERM", "await_file:a-fetch.pid", "sleep:100"],
        "a/server": SERVER,
    }
    code, _, err = launched(tmp_path, programs)
    assert code == 2
    assert err.endswith("first error: a/fetch ended with exit code 2\n  no such bucket\n")
    assert (tmp_path / "b-fetch.SIGTERM").exists()
    assert not (tmp_path / "a-server.pid").exists()
    assert_nothing_is_left(tmp_path)


def test_the_store_is_in_the_cache_under_its_name(sound_stores: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(store=sound_stores / "ring"))
    cluster = read_cluster(tmp_path / "cluster.toml")
    planned = {process.label: process for process in processes(cluster, ["train", "run.toml"])}
    here = str(tmp_path / "nvme" / "ring")
    assert list(planned) == [f"127.0.0.{n}/{role}" for role in ("fetch", "server", "trainers") for n in (1, 2)]
    for number in (1, 2):
        words = planned[f"127.0.0.{number}/fetch"].words[3:]
        assert words == ("fetch", str(sound_stores / "ring"), "--to", here, "--part", str(number - 1))
        assert planned[f"127.0.0.{number}/server"].words[4] == here
        assert planned[f"127.0.0.{number}/trainers"].environment["HOPLOOM_STORE"] == here


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('store = "s3://bucket/x"\nhosts = ["a"]', 'toml:1: store is s3://bucket/x, which .*; add cache = "/nvme"'),
        ('cache = "/nvme"\nhosts = ["a"]', "toml:1: cache has no effect without a store; add one"),
        ('store = "hdfs://n/x"\ncache = "/nvme"\nhosts = ["a"]', r"toml:1: store is .*give a shared path, s3://…"),
        (
            'store = "/x"\ncache = "/nvme"\nmode = "worker"\nexecutor = "kubernetes"\nhosts = 2',
            "toml:2: cache has no effect on Kubernetes in mode",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(tmp_path / "cluster.toml")


def test_a_pod_fetches_before_it_serves(tmp_path: Path) -> None:
    common = {"address": "", "ssh": "", "port": 7700, "python": "python3", "folder": "/"}
    servers = [Host(f"host{i}", processes=0, serves=True, parts=(i,), **common) for i in range(2)]  # type: ignore[arg-type]
    cluster = Cluster(
        (*servers, Host("host2", processes=1, parts=(), **common)),  # type: ignore[arg-type]
        "/nvme/ring",
        "kubernetes",
        "server-client",
        "host2:29500",
        source="s3://bucket/ring",
        server=ServerOptions(port=7700),
        security=Security(token_file="/etc/hoploom/token"),
        kubernetes=KubernetesOptions(image="registry/hoploom:1", secret="token"),
    )
    found = {one["kind"]: one for one in yaml.safe_load_all(manifests(cluster, ["train", "run.toml"]))}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    ((fetches,), (serves,)) = pod["initContainers"], pod["containers"]
    assert {"name": "cache", "emptyDir": {}} in pod["volumes"]
    for container in (fetches, serves):
        assert {"name": "cache", "mountPath": "/nvme"} in container["volumeMounts"]
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    for ordinal in (0, 1):
        variables = {"POD_NAME": f"hoploom-server-{ordinal}", "PATH": f"{tmp_path}:/usr/bin:/bin"}
        said = subprocess.run(
            fetches["command"], env=variables, capture_output=True, text=True, check=True, timeout=10
        ).stdout
        assert said == f"-m hoploom fetch s3://bucket/ring --to /nvme/ring --part {ordinal}\n"
    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    (waits,) = job["template"]["spec"]["template"]["spec"]["initContainers"]
    assert waits["command"][-1] == str(FETCH_DEADLINE)
