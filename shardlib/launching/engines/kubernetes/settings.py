"""What Kubernetes has to know beyond the job: namespace, queue, volumes, secrets by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.processes.place import FIRST_PORT

#: RFC 1123 names of objects, as Secrets, queues and claims have them.
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """What Kubernetes has to know beyond the job.

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
            f"{name} has {text!r}, which is no name of an object"
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
        failures += (
            [f"shared_memory is {self.shared_memory!r}, which is no quantity such as 64Gi"]
            if self.shared_memory is not None
            and not re.fullmatch(r"\d+(\.\d+)?([KMGT]i?)?", self.shared_memory)
            else []
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
