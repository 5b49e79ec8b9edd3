"""Kubernetes: the JobSet of a job.

One JobSet: a Job for all hosts of GPUs, or one for every slice of TPUs, each with one pod a host.
What happens when pods end:

- code 2, a mistake of the user: the JobSet fails.
- code 75, stopped and saved, or a pod that was evicted or preempted: all pods start again, and it
  does not count.
- any other: all pods start again, at most as often as the job allows. Kubernetes does not know of
  checkpoints, so progress does not set the count back.

Pods of GPUs find each other by the names of the JobSet's headless service. On GKE, TPU pods are
told of each other by GKE itself (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and, for several slices,
MEGASCALE_*), and JAX reads that. Secrets are named, never written.

Formats: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 (failure rules with message patterns:
v0.10), kubernetes.io/docs/concepts/workloads/controllers/job (pod failure policy, messages of the
Job controller), docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice,
kueue.sigs.k8s.io/docs/tasks/run/jobsets (read 2026-11).
"""

from __future__ import annotations

from shardlib.launching.engines.kubernetes.jobset import jobset
from shardlib.launching.engines.kubernetes.settings import KubernetesSettings
from shardlib.launching.engines.shared.shell import (
    check_job,
    yaml_text,
)
from shardlib.launching.engines.shared.submission import Submission
from shardlib.launching.engines.shared.tpus import (
    check_tpu,
    is_tpu,
    shape_of,
)
from shardlib.launching.job import Job
from shardlib.untrusted.json_types import JsonMapping

MANIFEST = "jobset.yaml"


def kubernetes(job: Job, settings: KubernetesSettings | None = None) -> Submission:
    """A JobSet and the command that creates it.

    Args:
        settings: of the cluster; by default those of `KubernetesSettings()`.
    """
    settings = settings or KubernetesSettings()
    check_job(job, "Kubernetes", _failures(job, settings), hint="see docs/launching.md")
    text = yaml_text(jobset(job, settings))
    namespace = ("--namespace", settings.namespace) if settings.namespace else ()
    first = (
        f"jobset.sigs.k8s.io/jobset-name={job.name},jobset.sigs.k8s.io/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0"
    )
    return Submission(
        engine="Kubernetes",
        files={MANIFEST: text},
        commands=(("kubectl", "create", "--filename", MANIFEST),),
        later=(
            (
                "look",
                (
                    "kubectl",
                    *namespace,
                    "get",
                    "jobset,pods",
                    "--selector",
                    f"jobset.sigs.k8s.io/jobset-name={job.name}",
                ),
            ),
            ("log", ("kubectl", *namespace, "logs", "--follow", "--selector", first)),
            ("stop", ("kubectl", *namespace, "delete", "jobset", job.name)),
        ),
    )


class Kubernetes:
    """The engine `--kubernetes`."""

    name = "kubernetes"
    help = "Create a JobSet."
    settings = KubernetesSettings

    def defaults(self) -> JsonMapping:
        """See `Engine`."""
        return {}

    def submission(self, job: Job, settings: KubernetesSettings) -> Submission:
        """See `kubernetes`."""
        return kubernetes(job, settings)


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
