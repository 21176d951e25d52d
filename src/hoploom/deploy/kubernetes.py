"""Write the manifests of a cluster on Kubernetes, for `kubectl apply -f -`. This module starts nothing.

Servers are a StatefulSet with a headless Service, whose names outlive their pods; trainers are a TrainJob of Kubeflow
Trainer 2. The TrainJob has its own TrainingRuntime: mounting volumes into the usual one, torch-distributed, needs one
key in Trainer 2.1 and another in 2.2. In worker mode there is no StatefulSet: each pod's first trainer starts a server.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from shlex import join
from typing import Any

import yaml

from hoploom.config.values import printable
from hoploom.deploy.cluster_file import Cluster, KubernetesOptions, Security
from hoploom.deploy.programs import script_words, server_command, trainer_environment
from hoploom.errors import ConfigError

Manifest = dict[str, Any]

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
METRICS_PORT = 9400  # the default; probes need one
GRACE = 60  # seconds for a server to finish requests in flight
PROBE = {"periodSeconds": 5, "timeoutSeconds": 5}
FAILURES = {"startupProbe": 120, "readinessProbe": 2, "livenessProbe": 12}  # a large store is checked and mapped first
GPU = "nvidia.com/gpu"
# For NCCL, and for the rows of a server on a GPU: containers have 64 MB by default.
SHM, SHM_MOUNT = {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}
PLAIN = re.compile(
    r"(?![yn]$)[a-z/][a-z0-9_./-]*", re.IGNORECASE
)  # texts without quotes; kubectl, unlike PyYAML, does not read y and 1e-3 as texts
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
    """Return all Kubernetes objects of a launch as YAML; raise ConfigError for options that do not fit."""
    for message in _mistakes(cluster, cluster.kubernetes):
        raise ConfigError(f"{cluster.file}: {message}")
    options, files = cluster.kubernetes, _files(cluster.security)
    lines = [f"# Written by `hoploom launch {printable(cluster.file)}`; kubectl apply -f takes it."]
    if files:
        keys = join(f"--from-file={PurePosixPath(path).name}" for path in files)
        lines.append(f"# The Secret: kubectl create secret generic {options.secret} -n {options.namespace} {keys}")
    if cluster.mode == "worker":
        text = "# Mode worker: each pod's first trainer starts a server of its parts; the command names the store."
        lines.append(text)
    inside = _inside(cluster)
    servers = [_service(inside), _stateful_set(inside)] if inside.servers else []
    trainers = [_training_runtime(inside), _train_job(inside, script_words(command))]
    return "".join(f"{line}\n" for line in lines) + as_yaml([*servers, *trainers])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """A YAML writer that uses no aliases, and writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    is_block = "\n" in text and text == printable(text, "\n")  # blocks turn other line ends into \n
    style = "|" if is_block else None if PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(values: Sequence[Manifest]) -> str:
    """Return several YAML documents as one text."""
    return str(yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LONGEST_LINE))


def _inside(cluster: Cluster) -> Cluster:
    """Return the cluster inside Kubernetes: pods' addresses, and no `devices`, because a pod sees only its own GPUs."""
    options, name = cluster.kubernetes, _set_name(cluster)
    ordinals = {host.name: i for i, host in enumerate(cluster.servers)}
    in_pods_of_trainers = cluster.mode == "worker"
    hosts = tuple(
        replace(
            host,
            address=f"{name}-{ordinals.get(host.name, 0)}.{name}.{options.namespace}.svc",
            devices=None,
            port=cluster.server.port,
            serves=host.serves and not in_pods_of_trainers,
        )
        for host in cluster.hosts
    )
    gpus = len(cluster.trainers[0].devices or ()) if options.gpus is None else options.gpus
    return replace(
        cluster,
        hosts=hosts,
        mode="none" if in_pods_of_trainers else cluster.mode,
        server=replace(cluster.server, metrics_port=cluster.server.metrics_port or METRICS_PORT),
        kubernetes=replace(options, gpus=gpus),
    )


# --- servers -------------------------------------------------------------------------------------


def _service(cluster: Cluster) -> Manifest:
    """Return the Service, which gives servers names before they are ready: they connect to each other at the start."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(cluster, "server"),
        "ports": [{"name": name, "port": port} for name, port in _ports(cluster).items()],
    }
    return _object(cluster, "v1", "Service", _set_name(cluster), spec)


def _stateful_set(cluster: Cluster) -> Manifest:
    """Return the StatefulSet of the servers. They start in parallel, because each waits for its peers."""
    pod = {
        **_pod(cluster),
        "terminationGracePeriodSeconds": GRACE + 10,
        "containers": [_server(cluster)],
        "volumes": [*_volumes(cluster), *[SHM] * (cluster.server.device is not None)],
    }
    spec = {
        "serviceName": _set_name(cluster),
        "replicas": len(cluster.servers),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(cluster, "server")},
        "template": {"metadata": {"labels": _labels(cluster, "server")}, "spec": pod},
    }
    return _object(cluster, "apps/v1", "StatefulSet", _set_name(cluster), spec)


def _server(cluster: Cluster) -> Manifest:
    """Return the servers' container: it picks its command by the pod's number, and listens on all its addresses."""
    listen, metrics = (f"0.0.0.0:{port}" for port in _ports(cluster).values())
    words = [
        replace(server_command(cluster, host), listen=listen, metrics=metrics, grace=GRACE).words(host.python)
        for host in cluster.servers
    ]
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    cases = [f"{i}) exec {_literal(join(line))} ;;" for i, line in enumerate(words)]
    health = {"path": "/health", "port": "metrics", "scheme": "HTTPS" if cluster.security.cert else "HTTP"}
    return {
        "name": "server",
        "image": cluster.kubernetes.image,
        "command": ["sh", "-c", "\n".join(["case ${POD_NAME##*-} in", *cases, "esac"])],
        "env": [pod_name, *_environment({"PYTHONUNBUFFERED": "1", **cluster.servers[0].environment})],
        "volumeMounts": [*_mounts(cluster, read_only=True), *[SHM_MOUNT] * (cluster.server.device is not None)],
        "ports": [{"name": name, "containerPort": port} for name, port in _ports(cluster).items()],
        **{name: {"httpGet": health, **PROBE, "failureThreshold": most} for name, most in FAILURES.items()},
        **_resources(cluster, int(cluster.server.device is not None), "resources"),
    }


def _set_name(cluster: Cluster) -> str:
    """Return the name of the StatefulSet and its Service. Kubeflow itself makes a Service with the TrainJob's name."""
    return f"{cluster.kubernetes.name}-server"


def _ports(cluster: Cluster) -> dict[str, int]:
    return {"serve": cluster.server.port, "metrics": cluster.server.metrics_port or METRICS_PORT}


# --- trainers ------------------------------------------------------------------------------------


def _training_runtime(cluster: Cluster) -> Manifest:
    """Return the TrainingRuntime, a template of pods. Kubeflow Trainer requires the name "node" and these labels."""
    options, host = cluster.kubernetes, cluster.trainers[0]
    container: Manifest = {
        "name": "node",
        "image": options.image,
        **({} if host.folder == "/" else {"workingDir": host.folder}),
        "volumeMounts": [*_mounts(cluster, read_only=False), SHM_MOUNT],
    }
    addresses = ",".join(server.endpoint for server in cluster.servers)  # servers may wait long for a node
    command = [host.python, "-c", WAIT.strip(), addresses, str(WAIT_DEADLINE)]
    wait = {"name": "wait-for-servers", "image": options.image, "command": command}
    pod = {
        **_pod(cluster),
        "restartPolicy": "Never",
        **({"initContainers": [wait]} if cluster.servers else {}),
        "containers": [container],
        "volumes": [*_volumes(cluster), SHM],
    }
    job = {"backoffLimit": 0, "template": {"spec": pod}}
    trainer = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job}
    spec = {
        "mlPolicy": {"numNodes": len(cluster.trainers), "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": trainer}]}},
    }
    runtime = _object(cluster, TRAINER_API, "TrainingRuntime", options.name, spec)
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    return runtime


def _train_job(cluster: Cluster, script: Sequence[str]) -> Manifest:
    """Return the TrainJob. torchrun reads the number of pods and the rendezvous from variables that Kubeflow sets."""
    options, host = cluster.kubernetes, cluster.trainers[0]
    trainer = {
        "image": options.image,
        "command": [host.python, "-m", "torch.distributed.run"],
        "args": ["--max-restarts", str(cluster.max_restarts), *map(_literal, script)],
        "env": _environment(trainer_environment(cluster, host)),
        "numNodes": len(cluster.trainers),
        "numProcPerNode": host.processes,
        **_resources(cluster, options.gpus or 0, "resourcesPerNode"),
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name}
    return _object(cluster, TRAINER_API, "TrainJob", options.name, {"runtimeRef": runtime, "trainer": trainer})


# --- shared by both --------------------------------------------------------------------------------


def _object(cluster: Cluster, api: str, kind: str, name: str, spec: Manifest) -> Manifest:
    labels = _labels(cluster, "server" if name == _set_name(cluster) else "trainer")
    metadata = {"name": name, "namespace": cluster.kubernetes.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _labels(cluster: Cluster, component: str) -> dict[str, str]:
    labels = {"name": "hoploom", "instance": cluster.kubernetes.name, "component": component}
    return {f"app.kubernetes.io/{name}": value for name, value in labels.items()}


def _pod(cluster: Cluster) -> Manifest:
    options = cluster.kubernetes
    user = {} if options.user is None else {"runAsUser": options.user, "fsGroup": options.user}
    return _given(
        {
            "serviceAccountName": options.service_account,
            "securityContext": user,
        }
    )


def _resources(cluster: Cluster, gpus: int, name: str) -> Manifest:
    """Return {name: resources} for a pod, or {}. The limit for memory equals the request, so that no pod is evicted."""
    options = cluster.kubernetes
    requests = {"cpu": options.cpu, "memory": options.memory}
    limits = {"memory": options.memory, GPU: str(gpus) if gpus else None}
    return _given({name: _given({"requests": _given(requests), "limits": _given(limits)})})


def _given(values: Mapping[str, Any]) -> Manifest:
    """Return `values` without empty entries."""
    return {name: value for name, value in values.items() if value}


def _environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": _literal(value)} for name, value in sorted(variables.items())]


def _literal(text: str) -> str:
    """Return a text with `$` written as `$$`. Otherwise, Kubernetes would replace $(NAME) by a variable's value."""
    return text.replace("$", "$$")


def _volumes(cluster: Cluster) -> list[Manifest]:
    """Return a pod's volumes. Only root can read the Secret's files; if pods run as a `user`, its group can, too."""
    options = cluster.kubernetes
    mode = 0o400 if options.user is None else 0o440
    store = {"name": "store", "persistentVolumeClaim": {"claimName": options.claim}}
    secret = {"name": "secret", "secret": {"secretName": options.secret, "defaultMode": mode}}
    return [store] * (options.claim is not None) + [secret] * (options.secret is not None)


def _mounts(cluster: Cluster, *, read_only: bool) -> list[Manifest]:
    options = cluster.kubernetes
    store = {"name": "store", "mountPath": options.mount, **({"readOnly": True} if read_only else {})}
    secret = {"name": "secret", "mountPath": options.secret_mount, "readOnly": True}
    return [store] * (options.claim is not None) + [secret] * (options.secret is not None)


# --- mistakes ------------------------------------------------------------------------------------


def _mistakes(cluster: Cluster, options: KubernetesOptions) -> Iterator[str]:
    """Yield an error text for each wrong or missing option.

    Also yield one for each setting in which two servers or two trainers differ: one template makes their pods.
    """
    if not options.name[0].isalpha():
        yield f"kubernetes.name is {options.name}; let it begin with a letter"
    if options.image is None:
        yield "kubernetes.image is not set; give the image that holds Python and hoploom"
    if cluster.store is not None:
        if options.claim is None:
            what = f"kubernetes.claim is not set, so pods do not see {cluster.store}"
            yield f"{what}; name the PersistentVolumeClaim that holds the store"
        if PurePosixPath(options.mount) not in PurePosixPath(cluster.store).parents:
            what = f"store is {cluster.store}, but pods see the claim below {options.mount}"
            yield f"{what}; give the store's path there, or another kubernetes.mount"
    for path in _files(cluster.security):
        if options.secret is None:
            yield f"kubernetes.secret is not set; name the Secret that holds {path}"
        if PurePosixPath(path).parent != PurePosixPath(options.secret_mount):
            what = f"{path} is not in {options.secret_mount}, where pods see the Secret"
            yield f"{what}; give the paths of [security] there, or another kubernetes.secret_mount"
    for kind, hosts in (("trainers", cluster.trainers), ("servers", cluster.servers)):
        for name in ("environment", "python", "folder", *(["processes"] if kind == "trainers" else [])):
            other = next((host for host in hosts if getattr(host, name) != getattr(hosts[0], name)), None)
            if other is not None:  # one template makes all pods
                yield f"hosts {hosts[0].name} and {other.name} differ in {name}; pods of {kind} are alike"


def _files(security: Security) -> list[str]:
    named = (security.token_file, security.ca, security.cert, security.private_key)
    return sorted({path for path in named if path is not None})
