"""JobSets against the published schemas, and what their pods would see."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shardlib.launch.clusters import MANIFEST, KubernetesSettings, kubernetes
from shardlib.launch.job import Job
from shardlib.processes.place import read_place

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent / "schemas" / "jobset.json").read_text())
)
GPUS = Job(
    name="llama",
    command=("train",),
    topology="16*h100:8",
    image="image:1",
    run="/runs/llama",
    environment={"XLA_FLAGS": "--a=1"},
    seconds=3600,
    restarts=5,
)
SLICES = Job(
    name="llama", command=("train",), topology="2*v5p:4x4x8", image="image:1", run="/runs/llama"
)
VOLUME = KubernetesSettings(volumes=("runs:/runs", "data:/data"))
FULL = KubernetesSettings(
    namespace="team",
    queue="gpus",
    priority_class="high",
    service_account="trainer",
    secrets=("hub",),
    image_pull_secrets=("registry",),
    volumes=("runs:/runs",),
    node_selector=("pool=h100",),
    resources=("rdma/hca=8", "memory=900Gi"),
    exclusive_topology="rack",
    host_network=True,
    shared_memory="64Gi",
    save_seconds=300,
    workdir="/app",
)


def manifest(job: Job, settings: KubernetesSettings | None = None) -> dict[str, Any]:
    found = yaml.safe_load(kubernetes(job, settings).files[MANIFEST])
    SCHEMA.validate(found)
    return found


def pod(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def expanded(text: str, names: dict[str, str]) -> str:
    """What Kubernetes makes of a value: $(NAME) is the variable where there is one, $$ is a dollar
    sign.
    """
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else names.get(found[1], found[0]),
        text,
    )


def environ(found: dict[str, Any], index: int) -> dict[str, str]:
    """Variables of the pod with a completion index, after JobSet has started all pods four
    times.
    """
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": index,
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": 3,
        "metadata.labels['batch.kubernetes.io/controller-uid']": "6f0e",
    }
    values: dict[str, str] = {}
    for entry in pod(found)["containers"][0]["env"]:
        values[entry["name"]] = (
            expanded(entry["value"], values)
            if "value" in entry
            else str(fields[entry["valueFrom"]["fieldRef"]["fieldPath"]])
        )
    return values


def test_the_schema_refuses_what_kubernetes_would():
    found = manifest(GPUS, VOLUME)
    pod(found)["containers"][0]["gpus"] = 8
    with pytest.raises(jsonschema.ValidationError, match="gpus"):
        SCHEMA.validate(found)


def test_every_pod_of_gpus_has_its_place():
    found = manifest(GPUS, VOLUME)
    group = found["spec"]["replicatedJobs"][0]
    spec = group["template"]["spec"]
    assert (
        group["replicas"],
        spec["parallelism"],
        spec["completions"],
        spec["completionMode"],
    ) == (1, 16, 16, "Indexed")
    assert pod(found)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    places = [read_place(environ(found, index)) for index in range(16)]
    assert [place and place.process for place in places] == list(range(16))
    # <jobSet.name>-<spec.replicatedJob.name>-<job-index>-<pod-index>.<subdomain>, as JobSet names
    # pods
    assert {place.coordinator for place in places if place} == {
        f"{found['metadata']['name']}-{group['name']}-0-0.{found['spec']['network']['subdomain']}:61000"
    }
    assert environ(found, 0).items() >= {"XLA_FLAGS": "--a=1", "SHARDLIB_START": "3"}.items()


def test_slices_are_jobs_and_jax_finds_their_hosts():
    found = manifest(SLICES, VOLUME)
    group = found["spec"]["replicatedJobs"][0]
    assert (group["replicas"], group["template"]["spec"]["parallelism"]) == (2, 32)
    assert pod(found)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
    }
    assert pod(found)["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    place = read_place(environ(found, 3))
    assert place is not None
    assert place.automatic


def test_a_chip_with_two_devices_is_asked_for_once():
    assert pod(manifest(Job(name="iron", command=("train",), topology="tpu7x:4x4x4", image="i")))[
        "containers"
    ][0]["resources"]["limits"] == {"google.com/tpu": 4}


def test_codes_decide_whether_pods_start_again():
    found = manifest(GPUS, VOLUME)["spec"]
    rules = found["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    policy = found["failurePolicy"]

    def action(code: int) -> str:
        """What the controllers of Job and JobSet do: the first rule that matches; without one,
        JobSet restarts and counts.
        """
        matched = any(
            code in rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
        )
        reason, message = (
            (
                "PodFailurePolicy",
                (
                    f"Container main for pod default/llama failed with exit code {code} matching"
                    " FailJob rule at index 0"
                ),
            )
            if matched
            else ("BackoffLimitExceeded", "")
        )
        return next(
            (
                rule["action"]
                for rule in policy["rules"]
                if reason in rule["onJobFailureReasons"]
                and all(re.search(p, message) for p in rule.get("onJobFailureMessagePatterns", []))
            ),
            "RestartJobSet",
        )

    assert {code: action(code) for code in (1, 2, 75, 86, 137)} == {
        1: "RestartJobSet",
        2: "FailJobSet",
        75: "RestartJobSetAndIgnoreMaxRestarts",
        86: "RestartJobSet",
        137: "RestartJobSet",
    }
    assert policy["maxRestarts"] == 5


def test_settings_reach_the_manifest():
    found = manifest(GPUS, FULL)
    container = pod(found)["containers"][0]
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": 8,
        "rdma/hca": "8",
        "memory": "900Gi",
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/runs"}
    assert pod(found)["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert found["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3600
