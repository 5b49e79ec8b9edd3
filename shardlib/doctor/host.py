"""What one process sees of its host.

Nothing here talks to another process, so that it can be asked of a host that cannot reach the
others.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import jax

from shardlib import _jax_compat
from shardlib.errors import LaunchError
from shardlib.processes.code import versions
from shardlib.report import Finding
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Open files that a process of a job over many hosts may need: every peer is a connection, every
#: shard of a checkpoint a file.
FILES = 4096
#: Free bytes of /dev/shm below which NCCL cannot set up its rings between the GPUs of a host
#: [docs.nvidia.com/deeplearning/nccl, troubleshooting, "Shared memory"; containers have 64 MiB by
#: default].
SHARED_BYTES = 512 << 20
#: Files of a host that say that it has an accelerator, the platform of JAX that uses it, and what
#: to install.
ACCELERATORS: tuple[tuple[str, str, str], ...] = (
    ("/dev/nvidia0", "gpu", 'pip install "jax[cuda13]"'),
    ("/dev/kfd", "gpu", "JAX's plugin for ROCm"),
    ("/dev/accel0", "tpu", 'pip install "jax[tpu]"'),
    ("/dev/vfio/0", "tpu", 'pip install "jax[tpu]"'),
)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A host, as one process on it sees it.

    Attributes:
        process: number of the process.
        host: name of the host.
        platform: of JAX's devices: "cpu", "gpu", "tpu".
        kinds: kind of every device of this process, by its number.
        versions: of Python and packages.
        clock: seconds since 1970, when all processes met.
        files: open files that the process may have.
        shared_bytes: free in /dev/shm; -1 where there is none.
        unused: accelerators that the host has and JAX does not use, with what to install.
        run: state of the folder of the run: "" where none was asked about.
        seconds: of a matmul on every device, by its number; empty where none was measured.
    """

    process: int
    host: str
    platform: str
    kinds: Mapping[int, str]
    versions: Mapping[str, str]
    clock: float = 0.0
    files: int = 0
    shared_bytes: int = -1
    unused: Sequence[str] = ()
    run: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def name(self) -> str:
        """Host and process, for messages."""
        return f"process {self.process} on {self.host}"

    def to_json(self) -> JsonObject:
        """The facts as plain data."""
        return {**asdict(self), "unused": list(self.unused)}

    @classmethod
    def from_json(cls, data: JsonMapping) -> HostFacts:
        """What `to_json` made, also after JSON has made texts of numbers."""
        return cls(
            **{
                **data,
                "unused": tuple(data["unused"]),
                **{
                    name: {int(number): value for number, value in data[name].items()}
                    for name in ("kinds", "seconds")
                },
            }
        )


def look(run: str | None = None) -> HostFacts:
    """Looks at this host.

    Args:
        run: folder of the run, which is tried for writing; None for none.
    """
    devices = _devices()
    shared = Path("/dev/shm")
    return HostFacts(
        process=jax.process_index(),
        host=socket.gethostname(),
        platform=devices[0].platform,
        kinds={device.id: device.device_kind for device in devices},
        versions=versions(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_bytes=shutil.disk_usage(shared).free if shared.is_dir() else -1,
        unused=_unused(devices[0].platform),
        run="" if run is None else _writable(Path(run)),
    )


def _devices() -> list[jax.Device]:
    """The devices of this process; what keeps JAX from starting them is said with the host's
    name.
    """
    try:
        return jax.local_devices()
    except RuntimeError as error:
        host = socket.gethostname()
        hint = (
            f"give the host an address for its own name, in /etc/hosts or DNS: {host!r} has none,"
            " and collectives between CPU hosts look for it"
            if not _resolves(host)
            else (
                "look at what its plugin says: nvidia-smi, the driver's version, another process"
                " that holds the devices"
            )
        )
        raise LaunchError(
            f"JAX cannot start its devices in process {_process()} on {host}:"
            f" {str(error).strip().splitlines()[-1]}\nTry: {hint}"
        ) from error


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _process() -> int:
    coordination = _jax_compat.coordination()
    return 0 if coordination is None else coordination[1]


def _unused(platform: str) -> tuple[str, ...]:
    if platform != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):  # somebody wants it so
        return ()
    return tuple(
        f"{file} is there, and JAX sees CPU devices alone; {hint}"
        for file, _, hint in ACCELERATORS
        if Path(file).exists()
    )


def _writable(folder: Path) -> str:
    """What keeps a process from writing into a folder; "writable" where nothing does."""
    probe = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("shardlib doctor\n")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return "writable"


def alone(facts: HostFacts) -> list[Finding]:
    """What is wrong with one host, whatever the others are."""
    findings = [
        Finding(
            code="accelerator-unused",
            severity="error",
            where=facts.name,
            message=text,
            hint="install it in the environment of this host",
        )
        for text in facts.unused
    ]
    if facts.run not in ("", "writable"):
        findings.append(
            Finding(
                code="run-folder",
                severity="error",
                where=facts.name,
                message=f"the folder of the run cannot be written: {facts.run}",
                hint="mount it there, with permission to write",
            )
        )
    if 0 < facts.files < FILES:
        findings.append(
            Finding(
                code="open-files",
                severity="warning",
                where=facts.name,
                message=(
                    f"a process may have {facts.files} open files; many hosts and checkpoints may"
                    f" need {FILES}"
                ),
                hint=f"ulimit -n {FILES}",
            )
        )
    if facts.platform == "gpu" and len(facts.kinds) > 1 and 0 <= facts.shared_bytes < SHARED_BYTES:
        findings.append(
            Finding(
                code="shared-memory",
                severity="warning",
                where=facts.name,
                message=(
                    f"/dev/shm has {facts.shared_bytes >> 20} MiB free, of which NCCL may need more"
                    " between GPUs"
                ),
                hint=(
                    "a larger /dev/shm: --shm-size of containers, an emptyDir of medium Memory in"
                    " Kubernetes"
                ),
            )
        )
    if (
        facts.platform == "gpu"
        and find_spec("nvidia") is None
        and any("NVIDIA" in kind for kind in facts.kinds.values())
    ):
        findings.append(
            Finding(
                code="libraries",
                severity="info",
                where=facts.name,
                message=(
                    "CUDA's libraries come from the system and not from JAX's packages; another"
                    " host may have others"
                ),
            )
        )
    return findings
