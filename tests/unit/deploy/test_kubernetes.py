"""The manifests for Kubernetes, against what the published schemas require."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hoploom.deploy.cluster_file import Cluster, Host, KubernetesOptions, Security, ServerOptions
from hoploom.deploy.kubernetes import as_yaml, manifests
from hoploom.errors import ConfigError

SERVER = "spec.template.spec"
TRAINER = "spec.template.spec.replicatedJobs.0.template.spec.template.spec"
COMMAND = ["train", "run.toml"]

# What the schemas require below an object of each kind, "*" for every entry of a list. From the Kubernetes API
# reference (OpenAPI of io.k8s.api.apps.v1 and core.v1; serviceName is required up to 1.32), Kubeflow Trainer's
# pkg/apis/trainer/v1alpha1/*_types.go, and JobSet's api/jobset/v1alpha2: fields marked "+required", and list keys.
POD = ("containers.*.name", "containers.*.image")
REQUIRED = {
    ("v1", "Service"): ("metadata.name", "spec.ports.*.port", "spec.ports.*.name"),
    ("apps/v1", "StatefulSet"): (
        "metadata.name",
        "spec.serviceName",
        "spec.selector.matchLabels",
        "spec.template.metadata.labels",
        *(f"{SERVER}.{path}" for path in POD),
        *(f"{SERVER}.containers.*.{probe}Probe.httpGet.port" for probe in ("startup", "readiness", "liveness")),
        *(f"{SERVER}.containers.*.{path}" for path in ("env.*.name", "ports.*.containerPort")),
        *(f"{SERVER}.{path}" for path in ("volumes.*.name", "containers.*.volumeMounts.*.mountPath")),
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): (
        "metadata.name",
        "spec.mlPolicy.torch",
        "spec.template.spec.replicatedJobs.*.name",
        *(f"{TRAINER}.{path}" for path in POD),
        *(f"{TRAINER}.{path}" for path in ("volumes.*.name", "containers.*.volumeMounts.*.mountPath")),
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): (
        "metadata.name",
        "spec.runtimeRef.name",
        "spec.trainer.env.*.name",
        "spec.trainer.command",
        "spec.trainer.numNodes",
        "spec.trainer.numProcPerNode",
    ),
}


def host(number: int, **changed: object) -> Host:
    plain = Host(f"host{number}", "", "", processes=2, port=7700, python="python3", folder="/")
    return replace(plain, **changed)  # type: ignore[arg-type]


def cluster_of(**changed: object) -> Cluster:
    """Three servers for two pods of two trainers each."""
    servers = tuple(host(i, processes=0, serves=True, parts=(i % 2,)) for i in range(3))
    cluster = Cluster(
        (*servers, host(3), host(4)),
        "/stores/papers.store",
        "kubernetes",
        "server-client",
        ":29500",
        security=Security(token_file="/etc/hoploom/token"),
        server=ServerOptions(port=7700),
        kubernetes=KubernetesOptions(
            image="registry/hoploom:1", namespace="graphs", claim="papers", secret="hoploom-token", gpus=2, cpu="16"
        ),
    )
    return replace(cluster, **changed)  # type: ignore[arg-type]


def with_options(**changed: object) -> Cluster:
    cluster = cluster_of()
    return replace(cluster, kubernetes=replace(cluster.kubernetes, **changed))  # type: ignore[arg-type]


def objects(cluster: Cluster, command: list[str] = COMMAND) -> dict[str, Any]:
    """By kind, read back by a YAML reader."""
    return {found["kind"]: found for found in yaml.safe_load_all(manifests(cluster, command))}


def values_at(value: Any, path: str) -> Iterator[Any]:
    """All values that a path leads to; KeyError where one is missing."""
    first, _, rest = path.partition(".")
    entries = value if first == "*" else [value[int(first)] if isinstance(value, list) else value[first]]
    for entry in entries:
        yield from values_at(entry, rest) if rest else [entry]


def env(container: Mapping[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def test_manifests_have_what_the_schemas_require() -> None:
    found = objects(cluster_of())
    assert list(found) == ["Service", "StatefulSet", "TrainingRuntime", "TrainJob"]
    assert {(one["apiVersion"], one["kind"]) for one in found.values()} == set(REQUIRED)
    for (_, kind), paths in REQUIRED.items():
        for path in paths:
            assert all(value is not None for value in values_at(found[kind], path)), (kind, path)


def test_names_and_references_fit_together() -> None:
    found = objects(cluster_of())
    service, servers, runtime, job = found.values()
    assert {one["metadata"]["namespace"] for one in found.values()} == {"graphs"}
    assert servers["spec"]["serviceName"] == service["metadata"]["name"] != job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert servers["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # these two names are what Kubeflow's Torch plugin looks for: pkg/constants, AncestorTrainer and Node
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [entry["name"] for entry in next(values_at(runtime, f"{TRAINER}.containers"))] == ["node"]
    for kind, pod in (("StatefulSet", SERVER), ("TrainingRuntime", TRAINER)):
        volumes = {entry["name"] for entry in next(values_at(found[kind], f"{pod}.volumes"))}
        assert volumes == set(values_at(found[kind], f"{pod}.containers.*.volumeMounts.*.name"))
        assert set(values_at(found[kind], "metadata.name")) <= {"hoploom", "hoploom-server"}


def test_each_server_pod_serves_its_part_and_knows_its_peers(tmp_path: Path) -> None:
    (container,) = next(values_at(objects(cluster_of())["StatefulSet"], f"{SERVER}.containers"))
    shell, flag, text = container["command"]
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    for ordinal, part in enumerate(("0", "1", "0")):
        variables = {"POD_NAME": f"hoploom-server-{ordinal}", "PATH": f"{tmp_path}:/usr/bin:/bin"}
        words = subprocess.run(
            [shell, flag, text], env=variables, capture_output=True, text=True, check=True, timeout=10
        ).stdout.splitlines()
        assert words[:4] == ["-m", "hoploom", "serve", "/stores/papers.store"]
        options = dict(zip(words[4::2], words[5::2], strict=True))
        assert (options["--part"], options["--listen"]) == (part, "0.0.0.0:7700")
        assert (options["--metrics"], options["--token-file"]) == ("0.0.0.0:9400", "/etc/hoploom/token")
        others = {f"hoploom-server-{i}.hoploom-server.graphs.svc:7700" for i in range(3) if i != ordinal}
        assert set(options["--peers"].split(",")) == others


@pytest.mark.parametrize(
    ("tls", "scheme"), [({}, "HTTP"), ({"cert": "/etc/hoploom/c.pem", "private_key": "/etc/hoploom/c.key"}, "HTTPS")]
)
def test_probes_ask_the_health_endpoint_and_a_stop_has_time_to_finish(tls: dict[str, str], scheme: str) -> None:
    cluster = cluster_of(security=Security(token_file="/etc/hoploom/token", **tls))  # type: ignore[arg-type]
    pod = next(values_at(objects(cluster)["StatefulSet"], SERVER))
    (container,) = pod["containers"]
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert ports == {"serve": 7700, "metrics": 9400}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "metrics", "scheme": scheme}
    grace = int(re.findall(r"--grace (\d+)", container["command"][2])[0])
    assert pod["terminationGracePeriodSeconds"] > grace


def test_trainers_are_torchruns_and_know_the_servers() -> None:
    trainer = objects(cluster_of())["TrainJob"]["spec"]["trainer"]
    assert trainer["command"] == ["python3", "-m", "torch.distributed.run"]
    assert trainer["args"][-4:] == ["-m", "hoploom", "train", "run.toml"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "16"}, "limits": {"nvidia.com/gpu": "2"}}
    addresses = [f"hoploom-server-{i}.hoploom-server.graphs.svc:7700" for i in range(3)]
    assert env(trainer)["HOPLOOM_SERVERS"].split(",") == addresses
    assert env(trainer)["HOPLOOM_TOKEN_FILE"] == "/etc/hoploom/token"
    assert not [name for name in env(trainer) if name.startswith("PET_")]  # Kubeflow refuses them: it sets them


def test_a_pod_of_trainers_has_a_gpu_for_each_device_that_its_host_names() -> None:
    cluster = with_options(gpus=None, cpu=None)
    hosts = [host if host.serves else replace(host, devices=("0", "1", "2")) for host in cluster.hosts]  # type: ignore[arg-type]
    trainer = objects(replace(cluster, hosts=tuple(hosts)))["TrainJob"]["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "3"}}


def test_a_pod_of_a_server_on_a_device_has_one_gpu() -> None:
    cluster = cluster_of(server=ServerOptions(port=7700, device="cuda"))
    pod = objects(cluster)["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert container["command"][2].count("--device cuda:0 ") == 3


def test_secrets_are_references_mounted_for_their_owner_alone() -> None:
    text = manifests(cluster_of(), COMMAND)
    assert "--from-file=token" in text
    found = objects(cluster_of())
    for kind, pod in (("StatefulSet", SERVER), ("TrainingRuntime", TRAINER)):
        (secret,) = (entry["secret"] for entry in next(values_at(found[kind], f"{pod}.volumes")) if "secret" in entry)
        assert secret == {"secretName": "hoploom-token", "defaultMode": 0o400}


def test_pods_that_a_user_runs_read_the_secret_as_its_group() -> None:
    """Of a Secret's files root is the owner, and fsGroup the group: serve.security takes that for a secret kept."""
    found = objects(with_options(user=1000))
    for kind, path in (("StatefulSet", SERVER), ("TrainingRuntime", TRAINER)):
        pod = next(values_at(found[kind], path))
        assert pod["securityContext"] == {"runAsUser": 1000, "fsGroup": 1000}
        assert [one["secret"]["defaultMode"] for one in pod["volumes"] if "secret" in one] == [0o440]


def test_trainers_wait_until_servers_take_connections() -> None:
    pod = next(values_at(objects(cluster_of())["TrainingRuntime"], TRAINER))
    (waiting,) = pod["initContainers"]
    _, flag, program, addresses, _ = waiting["command"]
    assert addresses.count(",") == 2
    done = subprocess.run(
        ["python3", flag, program, "127.0.0.1:1", "0"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hoploom: the server 127.0.0.1:1 takes no connections: ")


def test_worker_mode_leaves_servers_to_the_trainers() -> None:
    hosts = (host(0, serves=True, parts=(0,)), host(1, serves=True, parts=(1,)))
    found = objects(cluster_of(hosts=hosts, mode="worker"))
    assert list(found) == ["TrainingRuntime", "TrainJob"]
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    told = {name: value for name, value in env(trainer).items() if name.startswith("HOPLOOM_")}
    assert told == {"HOPLOOM_TOKEN_FILE": "/etc/hoploom/token"}  # of the servers that they start, too
    assert "initContainers" not in next(values_at(found["TrainingRuntime"], TRAINER))
    mounts = list(values_at(found["TrainingRuntime"], f"{TRAINER}.containers.*.volumeMounts.*.mountPath"))
    assert "/stores" in mounts


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (with_options(image=None), "kubernetes.image is not set"),
        (with_options(claim=None), "kubernetes.claim is not set, so pods do not see /stores/papers.store"),
        (with_options(mount="/data"), "store is /stores/papers.store, but pods see the claim below /data"),
        (with_options(secret=None), "kubernetes.secret is not set; name the Secret that holds /etc/hoploom/token"),
        (with_options(secret_mount="/run/secrets"), "/etc/hoploom/token is not in /run/secrets"),
        (with_options(name="1st"), "kubernetes.name is 1st; let it begin with a letter"),
        (cluster_of(hosts=(host(0), host(1, processes=3)), mode="none"), "hosts host0 and host1 differ in processes"),
        (
            cluster_of(hosts=(host(0), host(1, environment={"A": "1"})), mode="none"),
            "hosts host0 and host1 differ in environment",
        ),
    ],
)
def test_what_pods_cannot_have_is_refused_with_a_way_out(cluster: Cluster, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        manifests(cluster, COMMAND)
    assert str(raised.value).startswith("cluster.toml: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "yes", "null", "a: b", "#a", "é", " a ", "0x1f", "a\nb", " a\nb", "a\n\nb", "a\\nb"),
        *("*x", "%x", "{}", "|"),
        *(True, None, 0, -1, [], {}, ["a", ["b", {"c": []}]], {"a b": {"1": None}}, [{"a": 1, "b": [2]}, "x\ny"]),
    ],
)
def test_yaml_is_read_back_as_it_was(value: Any) -> None:
    written = as_yaml([{"key": value, "list": [value, {"in": value}]}, {"second": 2}])
    assert list(yaml.safe_load_all(written)) == [{"key": value, "list": [value, {"in": value}]}, {"second": 2}]


@pytest.mark.parametrize("text", ["y", "1e-3", "0o17", "1:30", "12"])
def test_what_another_reader_of_yaml_could_take_for_no_text_is_quoted(text: str) -> None:
    assert as_yaml([{"value": text}]) == f'value: "{text}"\n'
