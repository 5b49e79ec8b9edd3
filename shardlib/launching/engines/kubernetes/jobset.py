"""The JobSet of a job, as plain data: its failure rules, its pods and how they find each other."""

from __future__ import annotations

import re

from shardlib.launching.engines.kubernetes.settings import KubernetesSettings
from shardlib.launching.engines.shared.shell import (
    STOPPED,
    USAGE,
    common_place,
    host_script,
)
from shardlib.launching.engines.shared.tpus import (
    chips_per_host,
    is_tpu,
    kind_of,
    shape_of,
)
from shardlib.launching.job import Job
from shardlib.processes.place import AUTO
from shardlib.untrusted.json_types import JsonObject

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
        "metadata": _given(metadata),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": job.name,
            },
            "failurePolicy": {"maxRestarts": job.restarts, "rules": rules},
            "replicatedJobs": [
                {"name": _group(job), "replicas": job.slices, "template": {"spec": _given(spec)}}
            ],
        },
    }


def _group(job: Job) -> str:
    """What the Jobs of the JobSet are called."""
    return "slice" if is_tpu(job) else "hosts"


def _given(fields: JsonObject) -> JsonObject:
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
    return _given(
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
                    "emptyDir": _given({"medium": "Memory", "sizeLimit": settings.shared_memory}),
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
    return _given(
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
    number += (
        [{"name": "SHARDLIB_PROCESS", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
        if job.host_processes == 1
        else []
    )
    return [*({"name": name, "value": value} for name, value in fixed.items()), *number]
