"""Compilation in a child process, which a failing compiler ends instead of this one.

In a child process with limits of time and memory. What goes wrong there (an abort, too little
memory, no end) comes back as a `Failure`, a value like any other. Several may run side by side. A
child ends with this process, whatever ends that, and so does what the compiler has started in its
turn.

The machine that a compiler compiles for, and where its devices sit on the mesh.

A `Target` is plain data, made without JAX, and travels to the process that compiles; only
`compile_devices`, which runs there, loads a compiler.

>>> from shardlib.machines import topology
>>> from shardlib.layout import MeshShape
>>> target(topology("2*v5e:4x4"), MeshShape(data=2, fsdp=16)).name
'v5e:4x4'
>>> target(topology("16*h100:8"), MeshShape(data=16, tensor=8)).name
'1x16x8'

A compiler that made no program, as a finding: out of memory, out of time, or aborted.

>>> out_of_memory_text("XLA:TPU ... Used 20.1G of 15.75G hbm. Exceeded hbm capacity by 4.4G")
'the program needs 20.1GiB per device and there are 15.75GiB.'
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.errors import MissingPackageError, TopologyError, VerificationError
from shardlib.findings import Finding
from shardlib.jax_types import Function, KeyPath
from shardlib.layout import MeshShape
from shardlib.lowering.mesh import HOST
from shardlib.machines.topology import Topology, device_order, slice_of
from shardlib.planner.plan import Plan
from shardlib.processes.kin import Guard, finish
from shardlib.processes.kin import start as begin
from shardlib.processes.progress import Progress
from shardlib.report.elements import bytes_text
from shardlib.untrusted.data import JsonMapping, JsonObject

#: What JAX calls the compiler of a chip's vendor.
PLATFORMS: Mapping[str, str] = {"google": "tpu", "nvidia": "cuda", "cpu": "cpu"}
GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine in the words of a compiler.

    Attributes:
        platform: "tpu", "cuda" or "cpu", as JAX says it.
        name: what the compiler calls the topology: "v5e:16x16", or "slices x hosts x GPUs".
        slices: TPU slices joined by the data-centre network.
        spec: description of the GPU as a text proto; empty elsewhere.
        devices: devices of the whole topology.
        order: the device at each place of the mesh, first axis major; on a TPU (slice, x, y, z,
            core), elsewhere (number,).
        flops_per_cycle: dense bfloat16 FLOPs that the matrix units of one device do in a cycle; 0
            where cycles are not estimated.
        peak_flops_per_s: of one device in bfloat16.
        usable_bytes: memory that a program can have.
    """

    platform: str
    name: str
    slices: int = 1
    spec: str = ""
    devices: int
    order: tuple[tuple[int, ...], ...]
    flops_per_cycle: float = 0.0
    peak_flops_per_s: float
    usable_bytes: int

    @property
    def cycles_per_s(self) -> float:
        """Clock of the matrix units; 0 where it is not known."""
        return self.peak_flops_per_s / self.flops_per_cycle if self.flops_per_cycle else 0.0

    @property
    def positions(self) -> list[list[int]]:
        """Mesh positions of the devices of each TPU slice; one list of all elsewhere."""
        if self.slices == 1:
            return [list(range(len(self.order)))]
        used = sorted({place[0] for place in self.order})
        return [[i for i, place in enumerate(self.order) if place[0] == number] for number in used]

    def to_json(self) -> JsonObject:
        """The target as plain data."""
        return {**self.__dict__, "order": [list(place) for place in self.order]}

    @classmethod
    def from_json(cls, data: JsonMapping) -> Target:
        """Reads what `to_json` wrote."""
        return cls(**{**data, "order": tuple(tuple(place) for place in data["order"])})


#: Multiply-adds of the matrix units of one JAX device in a cycle, times two (jax-ml/scaling-book
#: tpus.md: MXUs of 128x128, 256x256 since v6e, four of them a TensorCore; v4 and v5p have two
#: TensorCores a device). With the peak rate they give the clock: 1.05, 1.5, 1.75 GHz.
TPU_FLOPS_PER_CYCLE: Mapping[str, float] = {
    "v4": 2 * 4 * 128 * 128 * 2,
    "v5e": 4 * 128 * 128 * 2,
    "v5p": 2 * 4 * 128 * 128 * 2,
    "v6e": 4 * 256 * 256 * 2,
    "tpu7x": 4 * 256 * 256 * 2,
}


def target(topology: Topology, mesh: MeshShape, axes: tuple[str, ...] = ()) -> Target:
    """Says a topology in the words of its compiler."""
    part = slice_of(topology, mesh.devices)
    if part is not None:
        return target(part, mesh, axes)
    order = device_order(mesh, topology, axes)
    if order is None:
        raise TopologyError(
            f"the mesh {mesh} has {mesh.devices} devices and does not fit {topology.name}, which"
            f" has {topology.devices}"
        )
    numbers = order.reshape(-1)
    make = {"google": _tpu, "nvidia": _gpu, "cpu": _cpu}[topology.chip.vendor]
    return make(topology, numbers)


def _cpu(topology: Topology, numbers: np.ndarray) -> Target:
    return Target(
        platform="cpu",
        name=topology.name,
        devices=topology.devices,
        order=_single(numbers),
        usable_bytes=topology.chip.usable_bytes,
        peak_flops_per_s=topology.chip.peak("float32"),
    )


def _single(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple((int(number),) for number in numbers)


def _gpu(topology: Topology, numbers: np.ndarray) -> Target:
    chip = topology.chip
    spec = resources.files("shardlib.verification") / "gpu_specs" / f"{chip.name}.txtpb"
    if not spec.is_file():
        described = sorted(
            file.name.removesuffix(".txtpb")
            for file in (resources.files("shardlib.verification") / "gpu_specs").iterdir()
        )
        raise TopologyError(
            f"there is no device description of the GPU {chip.name!r} of {topology.name}; described"
            f" are {', '.join(described)}"
        )
    inner = topology.tiers[-1].devices
    return Target(
        platform="cuda",
        name=f"1x{topology.devices // inner}x{inner}",
        spec=spec.read_text(encoding="utf-8"),
        devices=topology.devices,
        order=_single(numbers),
        usable_bytes=chip.usable_bytes,
        peak_flops_per_s=chip.peak("bfloat16"),
    )


def _tpu(topology: Topology, numbers: np.ndarray) -> Target:
    chip, tiers = topology.chip, list(topology.tiers)
    if chip.name not in TPU_FLOPS_PER_CYCLE:
        raise TopologyError(
            f"the TPU compiler does not know the chip {chip.name!r} of {topology.name}; it knows"
            f" {', '.join(TPU_FLOPS_PER_CYCLE)}"
        )
    torus = [i for i, tier in enumerate(tiers) if tier.kind == "torus"]
    if len(torus) != 1 or len(tiers[torus[0]].shape) > 3:
        raise TopologyError(
            f"the TPU compiler wants one torus of 2 or 3 dims, {topology.name} has"
            f" {[tier.kind for tier in tiers]}"
        )
    shape = tiers[torus[0]].shape
    slices = math.prod(tier.devices for tier in tiers[: torus[0]])
    cores = math.prod(tier.devices for tier in tiers[torus[0] + 1 :])
    places = np.stack(
        np.unravel_index(numbers, (slices, *shape, *(1,) * (3 - len(shape)), cores)), axis=-1
    )
    return Target(
        platform="tpu",
        name=f"{chip.name}:{'x'.join(map(str, shape))}",
        slices=slices,
        devices=topology.devices,
        order=tuple(tuple(int(i) for i in place) for place in places),
        flops_per_cycle=TPU_FLOPS_PER_CYCLE[chip.name],
        peak_flops_per_s=chip.peak("bfloat16"),
        usable_bytes=chip.usable_bytes,
    )


def require_compiler(platform: str) -> None:
    """Checks that the packages of a compiler are installed, without loading them."""
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingPackageError(
            "the TPU compiler is not installed: there is no package libtpu\nTry: pip install"
            " 'shardlib[tpu]'  (or: pip install libtpu)"
        )
    if platform == "cuda" and not any(importlib.util.find_spec(name) for name in GPU_PLUGINS):
        raise MissingPackageError(
            f"the GPU compiler is not installed: there is neither of {' and '.join(GPU_PLUGINS)}\n"
            "Try: pip install 'shardlib[gpu]'"
        )


def environment(platform: str, devices: int) -> dict[str, str]:
    """Environment variables that a compiling process needs before JAX is imported."""
    common = {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }  # a cache entry cannot be read back without a device
    if platform == "tpu":
        return {
            **common,
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "1",
            "XLA_FLAGS": "",
        }
    if platform == "cuda":
        return {
            "JAX_PLATFORMS": "",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        }
    return {**common, "JAX_NUM_CPU_DEVICES": str(devices)}


# --------------------------------------------------------------------------------------------------
# A serialised training step, for the process that compiles it.
#
# As a portable StableHLO program (`jax.export`) lowered once, here, for an abstract mesh, with the
# layouts of its arguments and results beside it. No Python object of the user's has to be pickled,
# and no compiler is loaded here.

#: A partition spec as plain data: for every dim the mesh axes that shard it.
Spec = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ExportedStep:
    """One training step, ready to be compiled elsewhere.

    Attributes:
        program: the serialised program over the flat leaves of (state, batch).
        mesh: (axis, size) of every mesh axis.
        arguments: a name for every argument: "params.layers.mlp.up", "batch.inputs".
        in_specs: how each argument is sharded.
        out_specs: how each leaf of the new state is sharded; metrics are replicated.
        in_kinds, out_kinds: the memory of each argument and of each leaf of the new state,
            "pinned_host"; "" for that of the device.
        donated: how many of the first arguments are donated.
    """

    program: bytes
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    in_kinds: tuple[str, ...]
    out_kinds: tuple[str, ...]
    donated: int

    def to_json(self) -> JsonObject:
        """All but the program, as plain data."""
        return {name: value for name, value in self.__dict__.items() if name != "program"}


def exported(
    function: Function,
    arguments: tuple[Tree, ...],
    *,
    results: Sequence[Tree],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    platform: str,
    what: str,
) -> ExportedStep:
    """A function of trees as a serialised program over their flat leaves."""
    paths, tree = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [leaf for _, leaf in paths]

    def flat(*leaves: Any) -> tuple[tuple[Any, ...], Any]:
        after, metrics = function(*tree.unflatten(leaves))
        return tuple(jax.tree.leaves(after)), metrics

    flat.__name__ = flat.__qualname__ = function.__name__
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(
        flat,
        in_shardings=tuple(leaf.sharding for leaf in leaves),
        out_shardings=(tuple(leaf.sharding for leaf in results), replicated),
        donate_argnums=tuple(range(len(results))),
    )
    try:
        with _jax_compat.in_mesh(mesh):
            program = export.export(jitted, platforms=[platform], disabled_checks=unstable_calls())(
                *leaves
            )
        data = bytes(program.serialize())
    except Exception as error:
        raise VerificationError(
            f"{what} does not lower for {platform}: {type(error).__name__}: {str(error)[:800]}"
        ) from error
    return ExportedStep(
        program=data,
        mesh=tuple((axis, size) for axis, size in mesh.shape.items()),
        arguments=tuple(_name(path) for path, _ in paths),
        in_specs=tuple(_spec(leaf) for leaf in leaves),
        out_specs=tuple(_spec(leaf) for leaf in results),
        in_kinds=tuple(_kind(leaf) for leaf in leaves),
        out_kinds=tuple(_kind(leaf) for leaf in results),
        donated=len(results),
    )


def unstable_calls() -> list[export.DisabledSafetyCheck]:
    """Programs are compiled with the very JAX that exported them: a custom call need not stay
    stable over versions.
    """
    return [
        export.DisabledSafetyCheck.custom_call(name)
        for name in ("tpu_custom_call", "LayoutConstraint", "AllocateBuffer")
    ]


def _spec(leaf: Tree) -> Spec:
    spec = leaf.sharding.spec
    return [
        [] if axes is None else [axes] if isinstance(axes, str) else list(axes) for axes in spec
    ]


def _kind(leaf: Tree) -> str:
    return leaf.sharding.memory_kind if leaf.sharding.memory_kind == HOST else ""


def _name(path: KeyPath) -> str:
    """A readable name of a leaf of (state, batch)."""
    words = [
        str(
            getattr(key, "name", None) or getattr(key, "key", None)
            if not hasattr(key, "idx")
            else key.idx
        )
        for key in path
    ]
    return ".".join((["batch"] if words[0] == "1" else []) + words[1:])


POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a compilation.

    Attributes:
        seconds: wall time.
        memory_bytes: resident memory of the child; read from `/proc`, so not enforced where there
            is none.
    """

    seconds: float = 1800.0
    memory_bytes: int = 48 * 2**30


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of a compilation.

    Attributes:
        text: the optimised program.
        memory: bytes per device: "arguments", "outputs", "aliased", "temporaries", "peak".
        seconds: wall time of compiling.
        device_kind: what the compiler calls the device.
        versions: package -> version.
        log: what the compiler wrote to its streams.
    """

    text: str
    memory: dict[str, int]
    seconds: float
    device_kind: str
    versions: dict[str, str]
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why there is no compiled program.

    Attributes:
        kind: "out-of-memory" (of the device), "compile-error", "compiler-abort", "compile-timeout"
            or "compiler-memory" (of this machine).
        message: what the compiler said, as far as it said anything.
        seconds: wall time until then.
    """

    kind: str
    message: str
    seconds: float


def compile_apart(
    step: ExportedStep,
    target: Target,
    limits: Limits | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Compiled | Failure:
    """Compiles a step for a target in a process of its own."""
    require_compiler(target.platform)
    with (
        Guard() as guard,
        tempfile.TemporaryDirectory(prefix="shardlib-verify-") as name,
    ):  # the guard deletes the folder where this process is killed
        folder = Path(name)
        guard.clear(folder)
        (folder / "program.bin").write_bytes(step.program)
        (folder / "job.json").write_text(
            json.dumps(
                {"target": target.to_json(), "options": dict(options or {}), **step.to_json()}
            ),
            encoding="utf-8",
        )
        return run_child(
            [sys.executable, "-m", "shardlib.verification.isolation", name],
            folder,
            target,
            limits or Limits(),
            guard,
        )


def run_child(
    command: list[str], folder: Path, target: Target, limits: Limits, guard: Guard | None = None
) -> Compiled | Failure:
    """Runs the process that compiles the job of a folder, and says what came of it; under a guard
    of its own where none is given.

    Args:
        limits: seconds of wall time and bytes of the child's memory.
    """
    if guard is None:
        with Guard() as guard:
            return run_child(command, folder, target, limits, guard)
    start = time.monotonic()
    search = os.pathsep.join(path for path in (str(Path(__file__).parents[2]), *sys.path) if path)
    env = {
        **os.environ,
        **environment(target.platform, len(target.order)),
        "PYTHONPATH": search,
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / "log").open("wb") as log:
        child = begin(command, guard, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            with Progress(f"compiling for {target.platform}"):
                broken = _watch(child, start, limits)
        finally:
            finish(child, guard)
    seconds = time.monotonic() - start
    log_text = (folder / "log").read_text(encoding="utf-8", errors="replace")
    if broken:
        what = {
            "compile-timeout": f"the compiler was stopped after {limits.seconds:.0f} s",
            "compiler-memory": (
                f"the compiler was stopped: it took more than {limits.memory_bytes} bytes of this"
                " machine's memory"
            ),
        }[broken]
        return Failure(kind=broken, message=what, seconds=seconds)
    if not (folder / "result.json").is_file():
        return Failure(
            kind="compiler-abort",
            message=f"the compiler ended with {_ending(child.returncode)}: {last_words(log_text)}",
            seconds=seconds,
        )
    return _outcome(
        json.loads((folder / "result.json").read_text(encoding="utf-8")), folder, seconds, log_text
    )


def _watch(child: subprocess.Popen[bytes], start: float, limits: Limits) -> str:
    """Waits for the end, or until the child goes over a limit; says which."""
    broken = ""
    while child.poll() is None and not broken:
        if time.monotonic() - start > limits.seconds:
            broken = "compile-timeout"
        elif resident_bytes(child.pid) > limits.memory_bytes:
            broken = "compiler-memory"
        else:
            time.sleep(POLL_S)
    return broken


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_words(log: str) -> str:
    """The line of a log that says why, where there is one: a failed check, a fatal error, or else
    the last line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check fail|CHECK|Fatal|F\d{4} ", line)]
    return (telling or lines or ["it left no message"])[-1 if not telling else 0][:600]


def _outcome(result: dict[str, Any], folder: Path, seconds: float, log: str) -> Compiled | Failure:
    if "error" in result:
        message = result["error"]["message"]
        kind = (
            "out-of-memory"
            if "RESOURCE_EXHAUSTED" in message or "Ran out of memory" in message
            else "compile-error"
        )
        return Failure(
            kind=kind,
            message=message if kind == "out-of-memory" else f"{result['error']['kind']}: {message}",
            seconds=seconds,
        )
    return Compiled(
        text=(folder / "compiled.hlo").read_text(encoding="utf-8"),
        memory=result["memory"],
        seconds=result["compile_seconds"],
        device_kind=result["device_kind"],
        versions=result["versions"],
        log=log,
    )


def failed(failure: Failure, plan: Plan) -> Finding:
    """Returns why there is no compiled step."""
    if failure.kind == "out-of-memory":
        parts = sorted(
            dataclasses.asdict(plan.estimate.device_bytes).items(), key=lambda part: -part[1]
        )
        predicted = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:3])
        return Finding(
            code="out-of-memory",
            severity="error",
            message=(
                f"{out_of_memory_text(failure.message)} The plan's largest parts are {predicted}."
            ),
            hint=(
                "shard more: a higher zero stage, remat=full, more microbatches, or a smaller batch"
            ),
        )
    hint = {
        "compile-timeout": "allow more seconds, or verify a shallower model",
        "compiler-memory": "allow more memory, or verify on a larger machine",
        "compiler-abort": "this is a fault of the compiler; another mesh or rule may avoid it",
    }.get(failure.kind, "")
    return Finding(code=failure.kind, severity="error", message=failure.message, hint=hint)


#: The two forms in which the TPU compiler says how much is needed and how much there is.
_NEEDED = (
    re.compile(r"Used (?P<need>[\d.]+[KMGT]?) of (?P<have>[\d.]+[KMGT]?) hbm"),
    re.compile(
        r"required for (?P<what>[^()]*?) \((?P<need>[\d.]+[KMGT]?)\) exceeds available HBM"
        r" \((?P<have>[\d.]+[KMGT]?)\)"
    ),
)


def out_of_memory_text(message: str) -> str:
    """Returns what a compiler says about memory that does not suffice, in one line: the sums, then
    the largest buffers where it names them.
    """
    sums = next((match for form in _NEEDED if (match := form.search(message))), None)
    what = f" for {sums['what']}" if sums and sums.re.groups == 3 else ""
    headline = (
        f"the program needs {sums['need']}iB per device{what} and there are {sums['have']}iB"
        if sums
        else message.strip().splitlines()[0][:300].rstrip(".")
    )
    sizes = re.findall(r"\d+\. Size: ([\d.]+\w)", message)
    names = re.findall(r"Operator: op_name=\"([^\"]*)\"", message)
    shapes = re.findall(r"Shape: (\S+)", message)
    largest = [
        " ".join(filter(None, (f"{size}iB", *shapes[i : i + 1], *names[i : i + 1])))
        for i, size in enumerate(sizes[:5])
    ]
    return headline + (f"; largest buffers: {'; '.join(largest)}" if largest else "") + "."


# --------------------------------------------------------------------------------------------------
# The process that compiles: `python -m shardlib.verification.isolation FOLDER`.
#
# Reads `job.json` and `program.bin` from the folder and leaves `result.json` and `compiled.hlo`
# there; an abort of the compiler ends this process and no other.


def main(folder: Path, run: Callable[[Path], JsonObject]) -> None:
    """Runs the job of a folder, and writes what it returns or raises there."""
    try:
        result = run(folder)
    except Exception as error:
        result = {"error": {"kind": type(error).__name__, "message": str(error)}}
    draft = folder / "result.json.tmp"
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.replace(folder / "result.json")


#: Chips whose two TensorCores form one device only when libtpu is told so (as the catalogue counts
#: them).
MEGACORE: Mapping[str, str] = {"v4": "megacore"}


def compile_devices(target: Target) -> list[jax.Device]:
    """The devices of a target in mesh order; loads the compiler."""
    from jax.experimental import topologies

    if target.platform == "cpu":
        devices, key = list(jax.devices("cpu")), _number
    elif target.platform == "cuda":
        jax.devices("cpu")  # lets JAX discover its plugins before the topology is asked for
        devices, key = (
            topologies.get_topology_desc(
                "", platform="cuda", target_config=target.spec, topology=target.name
            ).devices,
            _number,
        )
    else:
        options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
        if target.name.split(":")[0] in MEGACORE:
            options["chip_config_name"] = MEGACORE[target.name.split(":")[0]]
        devices, key = (
            topologies.get_topology_desc(
                platform="tpu", topology_name=target.name, **options
            ).devices,
            _tpu_key,
        )
    by_key = {key(i, device): device for i, device in enumerate(devices)}
    missing = [place for place in target.order if place not in by_key]
    if missing or (len(devices) != target.devices and target.platform != "cpu"):
        raise TopologyError(
            f"the {target.platform} compiler makes {len(devices)} devices of {target.name!r}, the"
            f" catalogue {target.devices}"
        )
    return [by_key[place] for place in target.order]


def _number(i: int, device: jax.Device) -> tuple[int, ...]:
    return (i,)


def _tpu_key(i: int, device: Any) -> tuple[int, ...]:
    return (getattr(device, "slice_index", 0), *device.coords, device.core_on_chip)


def read_job(
    folder: Path,
) -> tuple[dict[str, Any], export.Exported, list[jax.Device], Mesh]:
    """The job of a folder, its program, the devices that it is compiled for, and their mesh, whose
    axes are automatic unless the job's "kinds" says otherwise.
    """
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    exported = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    devices = compile_devices(Target.from_json(job["target"]))
    names, sizes = zip(*job["mesh"], strict=True)
    kinds = [AxisType[kind] for kind in job.get("kinds", ["Auto"] * len(names))]
    mesh = Mesh(np.array(devices, dtype=object).reshape(sizes), names, axis_types=tuple(kinds))
    return job, exported, devices, mesh


def compile_job(folder: Path) -> JsonObject:
    """Compiles the program of a folder and writes its text there; returns what else is worth
    knowing.
    """
    job, exported, devices, mesh = read_job(folder)

    def sharding(spec: list[list[str]], kind: str = "") -> NamedSharding:
        return NamedSharding(
            mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)), memory_kind=kind or None
        )

    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding(spec, kind))
        for aval, spec, kind in zip(
            exported.in_avals, job["in_specs"], job["in_kinds"], strict=True
        )
    ]
    results = (
        tuple(
            sharding(spec, kind)
            for spec, kind in zip(job["out_specs"], job["out_kinds"], strict=True)
        ),
        sharding([]),
    )
    step = jax.jit(
        exported.call, donate_argnums=tuple(range(job["donated"])), out_shardings=results
    )
    start = time.perf_counter()
    compiled = step.lower(*arguments).compile(compiler_options=job.get("options") or None)
    seconds = time.perf_counter() - start
    (folder / "compiled.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    return {
        "compile_seconds": seconds,
        "memory": _jax_compat.compiled_memory(compiled, offloaded=any(job["in_kinds"])),
        "device_kind": devices[0].device_kind,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    from importlib import metadata

    versions: dict[str, str] = {}
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    main(Path(sys.argv[1]), compile_job)
