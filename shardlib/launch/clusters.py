"""The engines of clusters, which give a job machines that are there: Slurm, Kubernetes and Ray."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardlib.errors import PAGES, LaunchError, raise_all
from shardlib.launch.job import Job, too_small
from shardlib.launch.submission import (
    Engine,
    Submission,
    check_job,
    check_one_line,
    check_options,
    check_plain,
    check_tpu,
    common_place,
    exports,
    host_script,
    inside,
    is_tpu,
    kind_of,
    shape_of,
    yaml_text,
)
from shardlib.processes.place import AUTO, FIRST_PORT, PORTS, STOPPED, USAGE
from shardlib.untrusted.data import JsonObject, construct, parse_json, shown

# --------------------------------------------------------------------------------------------------
# Slurm: its settings, and the parts of the batch script.

#: How GPUs can be asked for; "none" where a partition gives whole nodes without.
GPU_OPTIONS = ("gpus-per-node", "gres", "none")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of Slurm beyond the job.

    Attributes:
        partition, account, qos, constraint, reservation: as `sbatch` has them; None for the site's
            defaults.
        gpus: option that asks for the GPUs of a node, one of `GPU_OPTIONS`.
        gpu_type: name that the site gives its GPUs, where it needs one.
        exclusive: whether the job has its nodes for itself, with all of their memory; by default
            where it has several.
        cpus: cores of a process; None for what the site gives.
        interface: network interface by which processes find each other, "ib0"; None for the name of
            the first node.
        mounts: FROM:TO folders that a container sees, besides the folder of the run and `workdir`.
        setup: lines of shell before the processes start, "module load cuda".
        workdir: folder in which the processes start; None for that of the submission.
        notice_seconds: before the time limit, that training has to save.
        chain: jobs that are submitted at once and run one after the other, each going on where the
            one before had to stop.
        options: further options of `sbatch`, "--comment=x".

    Raises:
        LaunchError: fields that no script can have, all of them listed.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus: str = "gpus-per-node"
    gpu_type: str | None = None
    exclusive: bool | None = None
    cpus: int | None = None
    interface: str | None = None
    mounts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    workdir: str | None = None
    notice_seconds: int = 120
    chain: int = 1
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        failures = check_plain(
            self, ("partition", "account", "qos", "reservation", "gpu_type", "interface", "options")
        ) + check_one_line(self)
        if self.gpus not in GPU_OPTIONS:
            failures.append(f"gpus is {self.gpus!r}; it must be one of {', '.join(GPU_OPTIONS)}")
        failures += check_options(self.options)
        if self.constraint and not re.fullmatch(r"[\w\-.,&|*()\[\]]+", self.constraint):
            failures.append(f"constraint is {self.constraint!r}, which no sbatch reads")
        if self.workdir is not None and not self.workdir.startswith("/"):
            failures.append(f"workdir is {self.workdir!r}; it must be a whole path")
        failures += [
            f"mounts has {text!r}; it needs FROM:TO of whole paths with no ',' in them, once for"
            " each"
            for text in self.mounts
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[a-z+]+)?", text)
        ]
        failures += too_small(self, cpus=1, chain=1, notice_seconds=1)
        if failures:
            raise_all(LaunchError, "settings of Slurm are not usable", failures)


#: What every task does first: it says which process it is. The rest of the words is the command.
SRUN_TASK = 'export SHARDLIB_PROCESS=$SLURM_PROCID SHARDLIB_HOST_PROCESS=$SLURM_LOCALID; exec "$@"'


def batch_options(job: Job, settings: SlurmSettings) -> list[str]:
    """The options that stand in the script."""
    values = {
        "job-name": job.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint and shlex.quote(settings.constraint),
        "reservation": settings.reservation,
        "nodes": job.hosts,
        "ntasks-per-node": job.host_processes,
        "cpus-per-task": settings.cpus,
        "time": None if job.seconds is None else _clock(job.seconds),
    }
    listed = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if job.machine.chip.vendor != "cpu" and settings.gpus != "none":
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        listed.append(
            f"--gres=gpu:{kind}{job.devices_per_host}"
            if settings.gpus == "gres"
            else f"--gpus-per-node={kind}{job.devices_per_host}"
        )
    if settings.exclusive if settings.exclusive is not None else job.hosts > 1:
        listed += ["--exclusive", "--mem=0"]
    if settings.chain > 1:
        listed.append("--dependency=singleton")
    return [
        *listed,
        f"--signal=B:USR1@{settings.notice_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        *settings.options,
    ]


def _clock(seconds: int) -> str:
    """Seconds as sbatch reads them.

    >>> _clock(90061)
    '1-01:01:01'
    """
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{m:02}:{s:02}"


def batch_start() -> list[str]:
    return [
        "# The run has ended in an earlier job of this name.",
        'if [ -s ended ]; then exit "$(cat ended)"; fi',
    ]


def run_folder(job: Job, settings: SlurmSettings) -> str | None:
    """The folder of the run, where nodes see it as a folder.

    Returns:
        None where the job has none, or one in object storage.
    """
    return None if job.run is None or "://" in job.run else inside(settings.workdir, job.run)


def batch_prepare(job: Job, settings: SlurmSettings) -> list[str]:
    """Lines before the processes; a container cannot mount a folder that is not there yet."""
    run = run_folder(job, settings)
    return [
        *settings.setup,
        *exports(job.environment),
        *([f"mkdir -p -- {shlex.quote(run)}"] if job.image and run else []),
    ]


def batch_place(job: Job, settings: SlurmSettings) -> list[str]:
    """Lines that find process 0: this script runs on the first node, and so does task 0."""
    if settings.interface:
        address = [
            (
                f"address=$(ip -4 -oneline address show dev {settings.interface} | awk 'NR == 1 {{"
                ' split($4, part, "/"); print part[1] }\')'
            ),
            (
                f'if [ -z "$address" ]; then echo "{settings.interface} of $(hostname) has no IPv4'
                ' address" >&2; exit 1; fi'
            ),
        ]
    else:
        address = ['address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
    return [
        "# Process 0 is on the first node, where this script runs.",
        *address,
        f"export SHARDLIB_COORDINATOR=$address:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
        *exports(common_place(job)),
    ]


def batch_functions(job: Job, settings: SlurmSettings) -> list[str]:
    """Functions of bash that the loop calls."""
    newest = "newest() { :; }  # without a folder of the run no start can show what it has saved"
    run = run_folder(job, settings)
    if run is not None:
        newest = (
            f"newest() {{ ls -1 -- {shlex.quote(f'{run}/checkpoints')} 2>/dev/null | grep -xE"
            " '[0-9]+' | sort -n | tail -n 1; }"
        )
    return [
        newest,
        'running() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }',
    ]


def batch_loop(job: Job, settings: SlurmSettings) -> list[str]:
    again = ['scontrol requeue "$SLURM_JOB_ID"'] if settings.chain == 1 else []
    return [
        "told= starts=0",
        "trap 'told=1; kill -USR1 \"$step\" 2>/dev/null' USR1",
        "while :; do",
        "  before=$(newest) starts=$((starts + 1))",
        "  export SHARDLIB_START=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$starts",
        (
            "  SHARDLIB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n'); export"
            " SHARDLIB_SECRET  # made here, written nowhere"
        ),
        f"  {_step(job, settings)} &",
        "  step=$!",
        '  wait "$step"; code=$?',
        (
            '  while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # the signal has'
            " ended the wait, not the step"
        ),
        f'  case $code in 0 | {USAGE}) echo "$code" > ended; exit "$code" ;; esac',
        '  running || exit "$code"  # cancelled, or on its way back into the queue',
        f'  if [ -n "$told" ] && [ "$code" -eq {STOPPED} ]; then',
        "    rm -f failures",
        "  else",
        "    failures=$(($(cat failures 2>/dev/null || echo 0) + 1))",
        '    if [ "$(newest)" != "$before" ]; then failures=1; fi',
        '    echo "$failures" > failures',
        (
            '    echo "the processes ended with code $code; failures without a new checkpoint:'
            ' $failures" >&2'
        ),
        f'    if [ "$failures" -gt {job.restarts} ]; then',
        f'      if [ "$code" -ne {STOPPED} ]; then echo "$code" > ended; fi',
        '      exit "$code"',
        "    fi",
        '    if [ -z "$told" ]; then sleep $((2 ** (failures < 6 ? failures : 6))); fi',
        "  fi",
        '  if [ -n "$told" ]; then',
        *(f"    {line}" for line in again),
        '    exit "$code"',
        "  fi",
        "done",
    ]


def _step(job: Job, settings: SlurmSettings) -> str:
    """The line that starts all processes."""
    words = (
        ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none"]
        if settings.cpus is None
        else ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={settings.cpus}"]
    )
    if settings.workdir and not job.image:
        words.append(f"--chdir={settings.workdir}")
    if job.image is not None:
        seen = [
            f"{path}:{path}"
            for path in (settings.workdir, run_folder(job, settings))
            if path is not None
        ]
        mounts = ",".join(dict.fromkeys([*seen, *settings.mounts]))
        words += [
            f"--container-image={job.image}",
            *([f"--container-mounts={mounts}"] if mounts else []),
            *([f"--container-workdir={settings.workdir}"] if settings.workdir else []),
        ]
    return shlex.join([*words, "bash", "-c", SRUN_TASK, "task", *job.words])


# --------------------------------------------------------------------------------------------------
# The engine of Slurm.
#
# One batch script: it asks for the nodes, says where process 0 is, starts a task for every process
# with `srun`, and decides what happens when they end:
#
# - code 0, or 2 for a mistake of the user: the run has ended. Later jobs of a chain see that and
#   end at once.
# - after Slurm has told the script that the time limit is near (`--signal=B:USR1@...`), and the
#   script the processes: they have saved and ended with code 75. The job goes back into the queue,
#   or the next one of the chain goes on.
# - any other: the processes start again on the same nodes, so often without a new checkpoint as the
#   job allows. That is so for code 75, too: when one process fails, `srun` stops the others, which
#   save, and its own code is the highest of theirs.
#
# A job that somebody cancels stays cancelled. When a node fails, Slurm itself puts the job back
# into the queue (`--requeue`).
#
# The folder of the submission must be on a file system that all nodes share; logs and two small
# files, `ended` and `failures`, are written there. Formats: slurm.schedmd.com, sbatch.html,
# srun.html and scontrol.html; containers: github.com/NVIDIA/pyxis, README (read 2026-11).

SCRIPT = "job.sbatch"


def slurm(job: Job, settings: SlurmSettings | None = None) -> Submission:
    """A batch script and the commands that submit it."""
    settings = settings or SlurmSettings()
    failures = (
        [f"{job.topology} is made of TPUs, which Slurm does not manage"]
        if job.machine.chip.vendor == "google"
        else []
    )
    if job.seconds is not None and job.seconds <= settings.notice_seconds:
        failures.append(
            f"the time limit of {job.seconds} s leaves nothing beside the notice of"
            f" {settings.notice_seconds} s"
        )
    seen = (
        (("the folder of the run", run_folder(job, settings)), ("workdir", settings.workdir))
        if job.image
        else ()
    )
    failures += [
        f"{what} is {path!r}, and a container cannot see a folder with ':' or ',' in its name,"
        " where the list of its mounts is divided"
        for what, path in seen
        if path is not None and re.search("[:,]", path)
    ]
    check_job(job, "Slurm", failures)
    parts = (
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in batch_options(job, settings))],
        batch_start(),
        batch_prepare(job, settings),
        batch_place(job, settings),
        batch_functions(job, settings),
        batch_loop(job, settings),
    )
    script = "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"
    return Submission(
        engine="Slurm",
        files={SCRIPT: script},
        commands=(
            ("rm", "-f", "ended", "failures"),
            *(("sbatch", "--parsable", SCRIPT),) * settings.chain,
        ),
        later=(
            ("look", ("squeue", f"--name={job.name}")),
            ("stop", ("scancel", f"--name={job.name}")),
        ),
    )


SLURM = Engine(
    name="slurm",
    help="Submit to Slurm.",
    settings=SlurmSettings,
    submission=slurm,
    # nodes share folders with the machine that submits: relative paths are those of the user
    defaults=lambda: {"workdir": str(Path.cwd())},
)


# --------------------------------------------------------------------------------------------------
# Kubernetes: its settings, and the JobSet.

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
# The engine of Kubernetes.
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
    check_job(job, "Kubernetes", _failures(job, settings), hint=f"see {PAGES}/launching.html")
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


# --------------------------------------------------------------------------------------------------
# Ray: its settings, and the command that submits a job.
#
# As a Ray job whose entrypoint is `shardlib.launch.ray_driver`: it reserves a node for every host
# and starts the processes there. shardlib must be installed on the nodes.
#
# Formats: docs.ray.io/en/latest/cluster/running-applications/job-submission/cli.html (read
# 2026-11, Ray 2.60).


@dataclass(frozen=True, kw_only=True)
class RayHosts:
    """The hosts of the driver, as one word.

    Attributes:
        words: the command of every process.
        hosts: number of nodes.
        host_processes: processes on each.
        place: variables by which processes find each other, as far as they are the same for all.
        resources: of each host, as Ray names them: "GPU", "CPU".
        environment: variables of every process.
        workdir: folder of the processes; None for that of the actor, which Ray sets to the working
            directory of the Ray job.
        run: folder of the run, or None.
        restarts: starts in a row without a new checkpoint, after the first.
        seconds: time limit of one start, or None.
        wait_seconds: for the nodes.
    """

    words: tuple[str, ...]
    hosts: int
    host_processes: int = 1
    place: Mapping[str, str]
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    workdir: str | None = None
    run: str | None = None
    restarts: int = 3
    seconds: int | None = None
    wait_seconds: int = 3600

    def to_json(self) -> str:
        """All fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RayHosts:
        """The opposite of `to_json`."""
        return construct(cls, parse_json(text, "the job", LaunchError), "the job", LaunchError)

    def to_word(self) -> str:
        """All fields as one word of letters, digits, "-" and "_": Ray puts the words of an
        entrypoint together with the quoting of Windows, and gives them to a shell of the head node,
        which would carry out what stands in them.
        """
        return base64.urlsafe_b64encode(self.to_json().encode()).decode().rstrip("=")

    @classmethod
    def from_word(cls, word: str) -> RayHosts:
        """The opposite of `to_word`."""
        try:
            text = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        except ValueError as error:
            raise LaunchError(
                f"the driver was given {shown(word)}, which is not a job\nTry: shardlib launch"
                " --ray, which starts it"
            ) from error
        return cls.from_json(text)


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Settings of Ray beyond the job.

    Attributes:
        address: of the cluster's job server, "http://head:8265"; None for that of
            RAY_API_SERVER_ADDRESS.
        upload: folder of this machine that Ray copies to all nodes; the processes start in it.
        workdir: folder that all nodes have already, in which the processes start; instead of
            `upload`.
        cpus: cores that are reserved on every node.
        wait_seconds: for nodes that are not there yet.

    Raises:
        LaunchError: fields that no job can have, all of them listed.
    """

    address: str | None = None
    upload: str | None = None
    workdir: str | None = None
    cpus: int = 1
    wait_seconds: int = 3600

    def __post_init__(self) -> None:
        failures = check_one_line(self) + too_small(self, cpus=1, wait_seconds=1)
        if self.upload and self.workdir:
            failures.append("upload and workdir exclude each other: processes start in one folder")
        if failures:
            raise_all(LaunchError, "settings of Ray are not usable", failures)


def ray(job: Job, settings: RaySettings | None = None) -> Submission:
    """The command that submits a job to Ray."""
    settings = settings or RaySettings()
    failures = (
        [
            f"{job.topology} is made of TPUs, whose hosts this driver does not know; --kubernetes"
            " and --tpu-vm do"
        ]
        if is_tpu(job)
        else []
    )
    if (
        job.run is not None
        and settings.workdir is None
        and not job.run.startswith("/")
        and "://" not in job.run
    ):
        failures.append(
            f"the folder {job.run} of the run is relative, and nodes have no common folder; it"
            " needs a whole path"
        )
    if job.image and settings.upload:
        failures.append(
            "Ray copies no folder into a container: `upload` and an image exclude each other"
        )
    check_job(job, "Ray", failures)
    address = (f"--address={settings.address}",) if settings.address else ()
    command = (
        "ray",
        "job",
        "submit",
        *address,
        "--submission-id",
        job.name,
        "--no-wait",
        *((f"--working-dir={settings.upload}",) if settings.upload else ()),
        *(("--runtime-env-json", json.dumps({"image_uri": job.image})) if job.image else ()),
        "--",
        "python",
        "-m",
        "shardlib.launch.ray_driver",
        ray_hosts(job, settings).to_word(),
    )
    return Submission(
        engine="Ray",
        files={},
        commands=(command,),
        notes=(f"the driver is told: {ray_hosts(job, settings).to_json()}",),
        later=tuple(
            (what, ("ray", "job", verb, *address, *extra, job.name))
            for what, verb, extra in (
                ("look", "status", ()),
                ("log", "logs", ("--follow",)),
                ("stop", "stop", ()),
            )
        ),
    )


RAY = Engine(
    name="ray",
    help="Submit to a Ray cluster.",
    settings=RaySettings,
    submission=ray,
)


def ray_hosts(job: Job, settings: RaySettings) -> RayHosts:
    """Returns the hosts of the driver."""
    gpus = {} if job.machine.chip.vendor == "cpu" else {"GPU": job.devices_per_host}
    return RayHosts(
        words=job.words,
        hosts=job.hosts,
        host_processes=job.host_processes,
        place=common_place(job),
        resources={**gpus, "CPU": settings.cpus},
        environment=job.environment,
        workdir=settings.workdir,
        run=job.run and inside(settings.workdir, job.run),
        restarts=job.restarts,
        seconds=job.seconds,
        wait_seconds=settings.wait_seconds,
    )
