"""Kubernetes: its settings, the JobSet, and the engine that creates it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import Job
from shardlib.launch.submission import (
    Engine,
    Submission,
    check_job,
    check_tpu,
    common_place,
    host_script,
    is_tpu,
    kind_of,
    shape_of,
    yaml_text,
)
from shardlib.processes.place import AUTO, FIRST_PORT, STOPPED, USAGE
from shardlib.untrusted.data import JsonObject

#: RFC 1123 names of objects, as Secrets, queues and claims have them.
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Settings of Kubernetes beyond the job.

    Attributes:
        namespace: of the JobSet; None for that of the user's context.
        queue: Kueue's local queue; None where Kueue does not admit the job.
        priority_class: of the pods.
        service_account: of the pods.
        secrets: names of Secrets whose entries become variables of every process.
        image_pull_secrets: names of Secrets that open the registry of the image.
        volumes: CLAIM:PATH, persistent volume claims and where the processes see them. The folder
            of the run must be in one of them.
        node_selector: LABEL=VALUE of the nodes.
        resources: NAME=QUANTITY of every pod besides its chips, "rdma/hca=8".
        exclusive_topology: label of nodes of which a Job has one value for itself; by default the
            node pool for TPUs, and none for GPUs.
        host_network: whether pods have the network of their host.
        shared_memory: limit of /dev/shm, "64Gi"; None for the memory of the pod.
        save_seconds: that pods have to save and end when they are stopped.
        port: of the coordinator.
        workdir: folder in the image in which the processes start.

    Raises:
        LaunchError: fields that no manifest can have, all of them listed.
    """

    namespace: str | None = None
    queue: str | None = None
    priority_class: str | None = None
    service_account: str | None = None
    secrets: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    exclusive_topology: str | None = None
    host_network: bool = False
    shared_memory: str | None = None
    save_seconds: int = 120
    port: int = FIRST_PORT
    workdir: str | None = None

    def __post_init__(self) -> None:
        named = [
            (name, text)
            for name in (
                "namespace",
                "queue",
                "priority_class",
                "service_account",
                "secrets",
                "image_pull_secrets",
            )
            for value in (getattr(self, name),)
            for text in ((value,) if isinstance(value, str) else value or ())
        ]
        failures = [
            f"{name} has {text!r}, which is not a name of an object"
            for name, text in named
            if not OBJECT.fullmatch(text)
        ]
        failures += [
            f"volumes has {text!r}; it needs CLAIM:PATH"
            for text in self.volumes
            if not OBJECT.fullmatch(text.partition(":")[0])
            or not text.partition(":")[2].startswith("/")
        ]
        failures += [
            f"{name} has {text!r}; it needs NAME=VALUE"
            for name in ("node_selector", "resources")
            for text in getattr(self, name)
            if not re.fullmatch(r"[\w./-]+=[\w.-]*", text)
        ]
        if self.shared_memory is not None and not re.fullmatch(
            r"\d+(\.\d+)?([KMGT]i?)?", self.shared_memory
        ):
            failures.append(
                f"shared_memory is {self.shared_memory!r}, which is not a quantity such as 64Gi"
            )
        failures += [
            f"{name} is {value}; it must be between {low} and {high}"
            for name, value, low, high in (
                ("port", self.port, 1, 65535),
                ("save_seconds", self.save_seconds, 1, 86400),
            )
            if not low <= value <= high
        ]
        if failures:
            raise_all(LaunchError, "settings of Kubernetes are not usable", failures)


CONTAINER = "main"
#: Pods of one GKE node pool are one slice; the annotation keeps a slice's Job on one pool.
NODE_POOL = "cloud.google.com/gke-nodepool"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
#: How often JobSet has started all pods again.
ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
#: The random identity (RFC 4122, version 4) of the Job that all pods are of; it is known to them,
#: and to those who may read the objects of the namespace.
UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


def jobset(job: Job, settings: KubernetesSettings) -> JsonObject:
    """The JobSet as plain data."""
    exclusive = settings.exclusive_topology or (NODE_POOL if is_tpu(job) else None)
    metadata = {
        "name": job.name,
        "namespace": settings.namespace,
        "labels": {QUEUE: settings.queue} if settings.queue else None,
        "annotations": {EXCLUSIVE: exclusive} if exclusive else None,
    }
    rules = [
        {
            "name": "mistake",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"failed with exit code {USAGE} "],
        },
        {
            "name": "stopped",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        },
    ]
    pods = job.hosts // job.slices
    spec = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "activeDeadlineSeconds": job.seconds,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": [USAGE, STOPPED],
                    },
                },
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {"spec": _pod(job, settings)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _set_fields(metadata),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": job.name,
            },
            "failurePolicy": {"maxRestarts": job.restarts, "rules": rules},
            "replicatedJobs": [
                {
                    "name": _group(job),
                    "replicas": job.slices,
                    "template": {"spec": _set_fields(spec)},
                }
            ],
        },
    }


def _group(job: Job) -> str:
    """Names the Jobs of the JobSet."""
    return "slice" if is_tpu(job) else "hosts"


def _set_fields(fields: JsonObject) -> JsonObject:
    """Fields without those that are not set."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, ())}


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _pod(job: Job, settings: KubernetesSettings) -> JsonObject:
    selector = _pairs(settings.node_selector)
    if is_tpu(job):
        selector = {
            "cloud.google.com/gke-tpu-accelerator": kind_of(job).node,
            "cloud.google.com/gke-tpu-topology": shape_of(job),
            **selector,
        }
    claims = [text.partition(":")[0] for text in settings.volumes]
    chips = _chips(job)
    return _set_fields(
        {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": settings.save_seconds,
            "serviceAccountName": settings.service_account,
            "priorityClassName": settings.priority_class,
            "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
            "nodeSelector": selector,
            "tolerations": [
                {"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in chips
            ],
            **(
                {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
                if settings.host_network
                else {}
            ),
            "containers": [_container(job, settings)],
            "volumes": [
                {
                    "name": "shm",
                    "emptyDir": _set_fields(
                        {"medium": "Memory", "sizeLimit": settings.shared_memory}
                    ),
                },
                *(
                    {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}}
                    for i, claim in enumerate(claims)
                ),
            ],
        }
    )


def _container(job: Job, settings: KubernetesSettings) -> JsonObject:
    paths = [text.partition(":")[2] for text in settings.volumes]
    return _set_fields(
        {
            "name": CONTAINER,
            "image": job.image,
            "workingDir": settings.workdir,
            "command": [_literal(word) for word in _command(job)],
            "env": [
                *(
                    {"name": name, "value": _literal(value)}
                    for name, value in job.environment.items()
                ),
                *_place(job, settings),
            ],
            "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
            "resources": {"limits": {**_chips(job), **_pairs(settings.resources)}},
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                *({"name": f"claim-{i}", "mountPath": path} for i, path in enumerate(paths)),
            ],
        }
    )


def _command(job: Job) -> list[str]:
    """The words that a pod starts with."""
    return (
        list(job.words)
        if job.host_processes == 1
        else [
            "bash",
            "-c",
            "\n".join(host_script(job, "$JOB_COMPLETION_INDEX")) + "\n",
            "host",
            *job.words,
        ]
    )


def _literal(value: str) -> str:
    """A word as Kubernetes has to read it: it expands $(NAME), and takes $$ for one dollar sign."""
    return re.sub(r"\$(?=[$(])", "$$", value)


def _chips(job: Job) -> dict[str, int]:
    """The chips of a pod, which has a whole host."""
    if is_tpu(job):
        return {"google.com/tpu": chips_per_host(job)}
    return {"nvidia.com/gpu": job.devices_per_host} if job.machine.chip.vendor == "nvidia" else {}


def _place(job: Job, settings: KubernetesSettings) -> list[JsonObject]:
    """Variables by which processes find each other."""
    if job.processes == 1:
        return []
    if is_tpu(job):
        return [{"name": "SHARDLIB_PROCESSES", "value": AUTO}]
    fixed = {
        "SHARDLIB_COORDINATOR": f"{job.name}-{_group(job)}-0-0.{job.name}:{settings.port}",
        **common_place(job),
    }
    number = [
        {"name": "SHARDLIB_START", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}},
        {"name": "SHARDLIB_SECRET", "valueFrom": {"fieldRef": {"fieldPath": UID}}},
    ]
    if job.host_processes == 1:
        number.append({"name": "SHARDLIB_PROCESS", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    return [*({"name": name, "value": value} for name, value in fixed.items()), *number]


# --------------------------------------------------------------------------------------------------
# The engine.
#
# One JobSet: a Job for all hosts of GPUs, or one for every slice of TPUs, each with one pod a
# host. What happens when pods end:
#
# - code 2, a mistake of the user: the JobSet fails.
# - code 75, stopped and saved, or a pod that was evicted or preempted: all pods start again, and it
#   does not count.
# - any other: all pods start again, at most as often as the job allows. Kubernetes does not know of
#   checkpoints, so progress does not set the count back.
#
# Pods of GPUs find each other by the names of the JobSet's headless service. On GKE, TPU pods are
# told of each other by GKE itself (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and, for several slices,
# MEGASCALE_*), and JAX reads that. Secrets are named, never written.
#
# Formats: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 (failure rules with message patterns:
# v0.10), kubernetes.io/docs/concepts/workloads/controllers/job (pod failure policy, messages of
# the Job controller), docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice,
# kueue.sigs.k8s.io/docs/tasks/run/jobsets (read 2026-11).

MANIFEST = "jobset.yaml"


def kubernetes(job: Job, settings: KubernetesSettings | None = None) -> Submission:
    """A JobSet and the command that creates it."""
    settings = settings or KubernetesSettings()
    check_job(job, "Kubernetes", _failures(job, settings), hint="see docs/launching.md")
    text = yaml_text(jobset(job, settings))
    namespace = ("--namespace", settings.namespace) if settings.namespace else ()
    first = (
        f"jobset.sigs.k8s.io/jobset-name={job.name},jobset.sigs.k8s.io/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0"
    )
    all_pods = ("--selector", f"jobset.sigs.k8s.io/jobset-name={job.name}")
    return Submission(
        engine="Kubernetes",
        files={MANIFEST: text},
        commands=(("kubectl", "create", "--filename", MANIFEST),),
        later=(
            ("look", ("kubectl", *namespace, "get", "jobset,pods", *all_pods)),
            ("log", ("kubectl", *namespace, "logs", "--follow", "--selector", first)),
            ("stop", ("kubectl", *namespace, "delete", "jobset", job.name)),
        ),
    )


KUBERNETES = Engine(
    name="kubernetes",
    help="Create a JobSet.",
    settings=KubernetesSettings,
    submission=kubernetes,
)


def _failures(job: Job, settings: KubernetesSettings) -> list[str]:
    failures = [] if job.image else ["it has no container image"]
    failures += check_tpu(job)
    if is_tpu(job) and job.slices > 1 and job.hosts == job.slices:
        failures.append(
            f"slices of {shape_of(job)} have one host, and GKE joins only slices of several"
        )
    paths = [text.partition(":")[2].rstrip("/") for text in settings.volumes]
    if (
        job.run is not None
        and "://" not in job.run
        and not any(job.run == path or job.run.startswith(f"{path}/") for path in paths)
    ):
        failures.append(
            f"the folder {job.run} of the run is in no volume, and would be lost with the pods;"
            f" volumes are {', '.join(settings.volumes) or 'not given'}"
        )
    return failures


def chips_per_host(job: Job) -> int:
    """Chips of a host; a chip can be several JAX devices."""
    return job.devices_per_host // job.machine.chip.devices_per_chip
