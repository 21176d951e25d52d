"""A cluster on Kubernetes, as manifests for `kubectl apply -f -`. Nothing is started here, and no cluster is asked.

Servers are a StatefulSet with a headless Service, which gives them names that outlive their pods; trainers a TrainJob
of Kubeflow Trainer 2. It comes with a TrainingRuntime of its own rather than refer to the cluster's torch-distributed:
what mounts the store and the Secret into trainers is spelled podTemplateOverrides up to Trainer 2.1 and runtimePatches
from 2.2 on, while runtimes are the same in both.

In worker mode there is no StatefulSet: the trainers' first process in each pod starts the server beside them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from shlex import join
from typing import Any

import yaml

from hoploom.deploy.cluster_file import Cluster, Host, KubernetesOptions, Security
from hoploom.deploy.programs import script_words, server_command, trainer_environment
from hoploom.errors import ConfigError

Manifest = dict[str, Any]

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
METRICS_PORT = 9400  # where none is given: probes need one
GRACE = 60  # seconds for a server to finish what is in flight
PROBE = {"periodSeconds": 5, "timeoutSeconds": 5}
STARTING = 120  # probes until a server must serve: a large store is checked and mapped first
GPU = "nvidia.com/gpu"
PLAIN = re.compile(r"(?![yn]$)[a-z/][a-z0-9_./-]*", re.IGNORECASE)  # kubectl takes y and 1e-3 for no texts, PyYAML does
LONGEST_LINE = 10**6  # characters: no text is folded
WAIT_DEADLINE = 3600  # seconds until all servers take connections
WAIT = """
import socket, sys, time
deadline = time.monotonic() + float(sys.argv[2])
for address in sys.argv[1].split(","):
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), 5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"hoploom: the server {address} takes no connections: {error}")
            time.sleep(1)
"""


def manifests(cluster: Cluster, command: Sequence[str]) -> str:
    """All objects of a launch, as YAML."""
    _check(cluster)
    inside = _inside(cluster)
    script = script_words(command)
    servers = [_service(inside), _stateful_set(inside)] if inside.servers else []
    runtime = _training_runtime(inside)
    return _opening(cluster) + as_yaml([*servers, runtime, _train_job(inside, script)])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes what is in several places each time, and texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    style = "|" if "\n" in text else None if PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(values: Sequence[Manifest]) -> str:
    """Several documents in one text."""
    return str(yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LONGEST_LINE))


def _opening(cluster: Cluster) -> str:
    lines = [f"# Written by `hoploom launch {cluster.file}`; kubectl apply -f takes it."]
    options, files = cluster.kubernetes, sorted(_files(cluster.security))
    if options.secret is not None and files:
        keys = " ".join(f"--from-file={PurePosixPath(path).name}" for path in files)
        lines.append(f"# The Secret: kubectl create secret generic {options.secret} -n {options.namespace} {keys}")
    if _in_pods_of_trainers(cluster):
        lines.append(
            "# Mode worker: each pod's first trainer starts a server of its parts; the command names the store."
        )
    return "".join(f"{line}\n" for line in lines)


# --- servers -------------------------------------------------------------------------------------


def _service(cluster: Cluster) -> Manifest:
    """Gives each server a name of its own, also before it serves: servers look for each other at their start."""
    ports = [{"name": "flight", "port": cluster.servers[0].port}, {"name": "metrics", "port": _metrics_port(cluster)}]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(cluster, "server"),
        "ports": ports,
    }
    return {"apiVersion": "v1", "kind": "Service", **_metadata(cluster, _set_name(cluster), "server"), "spec": spec}


def _stateful_set(cluster: Cluster) -> Manifest:
    options = cluster.kubernetes
    pod = {
        **_pod(options),
        "terminationGracePeriodSeconds": GRACE + 10,
        "containers": [_server(cluster)],
        "volumes": _volumes(options),
    }
    spec = {
        "serviceName": _set_name(cluster),
        "replicas": len(cluster.servers),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(cluster, "server")},
        "template": {"metadata": {"labels": _labels(cluster, "server")}, "spec": pod},
    }
    named = _metadata(cluster, _set_name(cluster), "server")
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", **named, "spec": spec}


def _server(cluster: Cluster) -> Manifest:
    options, first = cluster.kubernetes, cluster.servers[0]
    health = {"path": "/health", "port": "metrics", "scheme": "HTTPS" if cluster.security.cert else "HTTP"}
    probe = {"httpGet": health, **PROBE}
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ports = [
        {"name": "flight", "containerPort": first.port},
        {"name": "metrics", "containerPort": _metrics_port(cluster)},
    ]
    return {
        "name": "server",
        "image": options.image,
        "command": ["sh", "-c", _by_ordinal(cluster)],
        "env": [pod_name, *_environment({"PYTHONUNBUFFERED": "1", **first.environment})],
        "ports": ports,
        "startupProbe": {**probe, "failureThreshold": STARTING},
        "readinessProbe": {**probe, "failureThreshold": 2},
        "livenessProbe": {**probe, "failureThreshold": 12},
        **_resources(options, 0),
        "volumeMounts": _mounts(options, read_only=True),
    }


def _by_ordinal(cluster: Cluster) -> str:
    """Pods are numbered, and so are the servers in the file; a pod's name ends with its number."""
    branches = [
        f"{i}) exec {_literal(join(_server_words(cluster, host)))} ;;" for i, host in enumerate(cluster.servers)
    ]
    return "\n".join(["case ${POD_NAME##*-} in", *branches, "esac"])


def _server_words(cluster: Cluster, host: Host) -> Sequence[str]:
    """It listens on all of the pod's addresses: its name may not be known yet when it starts."""
    listen, metrics = f"0.0.0.0:{host.port}", f"0.0.0.0:{_metrics_port(cluster)}"
    command = replace(server_command(cluster, host), listen=listen, metrics=metrics, grace=GRACE)
    return command.words(host.python)


# --- trainers ------------------------------------------------------------------------------------


def _training_runtime(cluster: Cluster) -> Manifest:
    """What the TrainJob fills in: "node" and the label are names that Kubeflow Trainer looks for."""
    options, host = cluster.kubernetes, cluster.trainers[0]
    container: Manifest = {
        "name": "node",
        "image": options.image,
        **({} if host.folder == "/" else {"workingDir": host.folder}),
        "volumeMounts": [*_mounts(options, read_only=False), {"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # NCCL's; containers have 64 MB by default
    pod = {
        **_pod(options),
        "restartPolicy": "Never",
        **({"initContainers": [_wait_for_servers(cluster)]} if cluster.servers else {}),
        "containers": [container],
        "volumes": [*_volumes(options), shm],
    }
    job = {"backoffLimit": 0, "template": {"spec": pod}}
    trainer = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job}
    spec = {
        "mlPolicy": {"numNodes": len(cluster.trainers), "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": trainer}]}},
    }
    named = _metadata(cluster, options.name, "trainer")
    named["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    return {"apiVersion": TRAINER_API, "kind": "TrainingRuntime", **named, "spec": spec}


def _wait_for_servers(cluster: Cluster) -> Manifest:
    """Runs before the trainers: servers may have to wait for a node, and pull their image, for longer than a client."""
    addresses = ",".join(server.endpoint for server in cluster.servers)
    return {
        "name": "wait-for-servers",
        "image": cluster.kubernetes.image,
        "command": [cluster.trainers[0].python, "-c", WAIT.strip(), addresses, str(WAIT_DEADLINE)],
    }


def _train_job(cluster: Cluster, script: Sequence[str]) -> Manifest:
    """torchrun reads the number of pods, its own and the meeting point from variables that Kubeflow sets."""
    options, host = cluster.kubernetes, cluster.trainers[0]
    trainer = {
        "image": options.image,
        "command": [host.python, "-m", "torch.distributed.run"],
        "args": ["--max-restarts", str(cluster.max_restarts), *map(_literal, script)],
        "env": _environment(trainer_environment(cluster, host)),
        "numNodes": len(cluster.trainers),
        "numProcPerNode": host.processes,
        **_resources(options, options.gpus or 0, "resourcesPerNode"),
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name}
    spec = {"runtimeRef": runtime, "trainer": trainer}
    return {"apiVersion": TRAINER_API, "kind": "TrainJob", **_metadata(cluster, options.name, "trainer"), "spec": spec}


# --- what both have ------------------------------------------------------------------------------


def _inside(cluster: Cluster) -> Cluster:
    """The same cluster with the addresses that pods have; pods see only the devices that they are given."""
    options, name = cluster.kubernetes, _set_name(cluster)
    ordinals = {host.name: i for i, host in enumerate(cluster.servers)}
    serve = not _in_pods_of_trainers(cluster)
    hosts = tuple(
        replace(
            host,
            address=f"{name}-{ordinals.get(host.name, 0)}.{name}.{options.namespace}.svc",
            devices=None,
            port=cluster.server.port,
            serves=host.serves and serve,
        )
        for host in cluster.hosts
    )
    gpus = len(cluster.trainers[0].devices or ()) if options.gpus is None else options.gpus
    return replace(
        cluster,
        hosts=hosts,
        mode=cluster.mode if serve else "none",
        server=replace(cluster.server, metrics_port=_metrics_port(cluster)),
        kubernetes=replace(options, gpus=gpus),
    )


def _in_pods_of_trainers(cluster: Cluster) -> bool:
    return cluster.mode == "worker"


def _set_name(cluster: Cluster) -> str:
    """Not the TrainJob's: that is the name of the Service of its own pods."""
    return f"{cluster.kubernetes.name}-server"


def _metrics_port(cluster: Cluster) -> int:
    return cluster.server.metrics_port or METRICS_PORT


def _metadata(cluster: Cluster, name: str, component: str) -> Manifest:
    labels = _labels(cluster, component)
    return {"metadata": {"name": name, "namespace": cluster.kubernetes.namespace, "labels": labels}}


def _labels(cluster: Cluster, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "hoploom",
        "app.kubernetes.io/instance": cluster.kubernetes.name,
        "app.kubernetes.io/component": component,
    }


def _pod(options: KubernetesOptions) -> Manifest:
    pod: Manifest = {}
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    if options.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    if options.user is not None:
        pod["securityContext"] = {"runAsUser": options.user, "fsGroup": options.user}
    return pod


def _resources(options: KubernetesOptions, gpus: int, name: str = "resources") -> Manifest:
    requests = {"cpu": options.cpu, "memory": options.memory}
    limits = {"memory": options.memory, GPU: str(gpus) if gpus else None}
    given = {"requests": _given(requests), "limits": _given(limits)}
    return {name: _given(given)} if any(given.values()) else {}


def _given(values: Mapping[str, Any]) -> Manifest:
    return {name: value for name, value in values.items() if value}


def _environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": _literal(value)} for name, value in sorted(variables.items())]


def _literal(text: str) -> str:
    """As it is: Kubernetes puts a variable's value for $(NAME), and one $ for two of them."""
    return text.replace("$", "$$")


def _volumes(options: KubernetesOptions) -> list[Manifest]:
    """Secrets are files that only root reads; pods that another user runs read them as that user's group."""
    volumes: list[Manifest] = []
    mode = 0o400 if options.user is None else 0o440
    if options.claim is not None:
        volumes.append({"name": "store", "persistentVolumeClaim": {"claimName": options.claim}})
    if options.secret is not None:
        volumes.append({"name": "secret", "secret": {"secretName": options.secret, "defaultMode": mode}})
    return volumes


def _mounts(options: KubernetesOptions, *, read_only: bool) -> list[Manifest]:
    mounts: list[Manifest] = []
    if options.claim is not None:
        mounts.append({"name": "store", "mountPath": options.mount, **({"readOnly": True} if read_only else {})})
    if options.secret is not None:
        mounts.append({"name": "secret", "mountPath": options.secret_mount, "readOnly": True})
    return mounts


# --- what only Kubernetes needs ------------------------------------------------------------------


def _check(cluster: Cluster) -> None:
    options, file = cluster.kubernetes, cluster.file
    if not options.name[0].isalpha():
        raise ConfigError(f"{file}: kubernetes.name is {options.name}; let it begin with a letter")
    if options.image is None:
        raise ConfigError(f"{file}: kubernetes.image is not set; give the image that holds Python and hoploom")
    if cluster.store is not None and options.claim is None:
        raise ConfigError(
            f"{file}: kubernetes.claim is not set, so pods do not see {cluster.store}; name the PersistentVolumeClaim "
            "that holds the store"
        )
    if cluster.store is not None and not _is_below(cluster.store, options.mount):
        raise ConfigError(
            f"{file}: store is {cluster.store}, but pods see the claim below {options.mount}; give the store's path "
            "there, or another kubernetes.mount"
        )
    for path in sorted(_files(cluster.security)):
        if options.secret is None:
            raise ConfigError(f"{file}: kubernetes.secret is not set; name the Secret that holds {path}")
        if str(PurePosixPath(path).parent) != str(PurePosixPath(options.secret_mount)):
            raise ConfigError(
                f"{file}: {path} is not in {options.secret_mount}, where pods see the Secret; give the paths of "
                "[security] there, or another kubernetes.secret_mount"
            )
    for kind, hosts in (("trainers", cluster.trainers), ("servers", cluster.servers)):
        for name, other in _unlike(kind, hosts):
            raise ConfigError(f"{file}: hosts {hosts[0].name} and {other} differ in {name}; pods of {kind} are alike")


def _files(security: Security) -> set[str]:
    named = (security.token_file, security.ca, security.cert, security.private_key)
    return {path for path in named if path is not None}


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(path).parents


def _unlike(kind: str, hosts: Sequence[Host]) -> Iterator[tuple[str, str]]:
    """What differs between hosts, and on which: one template makes all pods."""
    names = ["environment", "python", "folder"] + (["processes"] if kind == "trainers" else [])
    for host in hosts[1:]:
        yield from ((name, host.name) for name in names if getattr(host, name) != getattr(hosts[0], name))
