"""Verification of served programs: what a machine's compiler makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import jax

from shardlib.annotation.model import Init, read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.findings import Finding
from shardlib.jax_types import Leaf
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology
from shardlib.machines.topology import topology as parse_topology
from shardlib.report.elements import bytes_text
from shardlib.serve.cache import Pages
from shardlib.serve.program import Forward, TracedForward, traced_forward
from shardlib.serve.requests import Capacity, Shape
from shardlib.serve.sampling import choices
from shardlib.serve.step import PlacedModel, arranged, operands, placed, step_function
from shardlib.untrusted.data import JsonObject
from shardlib.verification.isolation import (
    Compiled,
    ExportedStep,
    Failure,
    Limits,
    Target,
    compile_apart,
    exported,
    require_compiler,
    target,
)
from shardlib.verification.report import CompiledStep
from shardlib.verification.verify import read_compiled


def exported_step(
    model: Model,
    traced: TracedForward,
    on: PlacedModel,
    size: Capacity,
    shape: Shape,
    platform: str,
) -> tuple[ExportedStep, dict[str, int]]:
    """The program of a step, and bytes that a device has of weights and pages."""

    params = on.described(model.params)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on.whole), model.state
    )
    pages = on.of_pages(traced, size.groups, size.page)
    inputs = operands(size, shape, on.grid.groups)
    row_choices = choices(
        [None] * len(inputs.rows), vocab=traced.vocab, longest=size.table * size.page
    )
    beside = (inputs.tokens, inputs.where, inputs.rows, row_choices)
    beside = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        beside,
        on.grid.by_group(beside),
    )
    function = step_function(traced, size.groups, on.grid)

    def step(pages: Mapping[str, Pages], weights: tuple[Tree, Tree], beside: Tree) -> Tree:
        chosen, after = function(weights, pages, *beside)
        return after, tuple(jax.tree.leaves(chosen))

    step.__name__ = step.__qualname__ = f"shardlib_serve_{len(inputs.tokens)}"
    leaves = jax.tree.leaves(pages)
    step_program = exported(
        step,
        (pages, (params, state), beside),
        results=leaves,
        mesh=on.mesh,
        platform=platform,
        what="the program that serves",
    )
    weight_names = [
        path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, state))
    ]
    others = len(step_program.arguments) - len(leaves) - len(weight_names)
    names = (
        *(f"pages.{number}" for number in range(len(leaves))),
        *(f"weights.{name}" for name in weight_names),
        *(f"operand.{number}" for number in range(others)),
    )
    predicted = {"weights": _bytes((params, state)), "pages": _bytes(pages)}
    return replace(step_program, arguments=names), predicted


def _bytes(tree: Tree) -> int:
    """Returns the bytes of some arrays on a device."""

    def size(leaf: Leaf) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


# --------------------------------------------------------------------------------------------------
# The programs that serve a model, compiled for a machine.
#
#     for program in verify_serving(init, forward, topology="v5e:2x4", tensor=8):
#         print(program)
#
# Neither the machine nor weights are needed. Three things go wrong silently in programs that
# serve: the compiler gathers weights where activations are a thousand times smaller, copies the
# cache that a step writes a row of, or keeps the old one beside the new.

#: Part by which the arguments of a program may differ from what was predicted.
ALLOWED = 0.03


@dataclass(frozen=True, kw_only=True)
class ServedProgram:
    """One of the programs that serve a model, compiled.

    Attributes:
        topology: the machine.
        tensor: devices that share every layer.
        data: groups of so many devices.
        tokens: of a step.
        table: pages of a request.
        predicted: bytes a device: "weights", "pages".
        compiled: what the compiler made; None where it failed.
        seconds: that it took.
        findings: what is wrong.
    """

    topology: str
    tensor: int
    data: int
    tokens: int
    table: int
    predicted: Mapping[str, int]
    compiled: CompiledStep | None
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.predicted.items())
        head = (
            f"{self.tokens} tokens, {self.table} pages a request, on {self.topology}, tensor"
            f" {self.tensor}{f', data {self.data}' if self.data > 1 else ''}: {parts} per device"
        )
        lines = [str(finding) for finding in self.findings]
        if self.compiled is not None:
            sizes = self.compiled.device_bytes
            lines = [
                f"compiled: {bytes_text(sizes['arguments'])} of arguments,"
                f" {bytes_text(sizes['temporaries'])} of temporaries, peak"
                f" {bytes_text(sizes['peak'])}",
                *(
                    f"{collective.kind} over {'+'.join(collective.axes) or 'no axes'}:"
                    f" {collective.count} x {bytes_text(collective.bytes)} ({collective.cause})"
                    for collective in self.compiled.collectives
                ),
                *lines,
            ]
        return "\n  ".join([head, *lines])

    def to_json(self) -> JsonObject:
        """The program as plain data."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "predicted": dict(self.predicted),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def verify_serving(
    init: Init,
    forward: Forward,
    *,
    topology: str | Topology,
    tensor: int,
    data: int = 1,
    capacity: Capacity | None = None,
    limits: Limits | None = None,
) -> tuple[ServedProgram, ...]:
    """Compiles the programs for next tokens and for prompts, with the longest requests.

    Args:
        init, forward: see `Engine`.
        topology: the machine.
        tensor: devices that share every layer.
        data: groups of so many devices, each with requests of its own.
        capacity: how many requests and tokens are served by a group.
        limits: time and memory that the compiler may take.

    Raises:
        ModelError: the model cannot be served with a cache.
        ArgumentError: pages cannot be sharded over so many devices.
        TopologyError: the devices are not part of the machine, or no compiler knows it.
        MissingPackageError: the compiler is not installed.
        VerificationError: the program does not lower for the platform.
    """
    machine = parse_topology(topology) if isinstance(topology, str) else topology
    size = capacity or Capacity()
    model = read(init)
    traced = traced_forward(model, forward, longest=size.longest)
    size = size.within(traced.windows)
    arrangement = arranged(model, forward, traced, tensor=tensor, data=data)
    compile_target = target(machine, arrangement.mesh)
    require_compiler(compile_target.platform)
    on = placed(model, arrangement, arrangement.abstract(), size.storage)
    programs: list[ServedProgram] = []
    for shape in size.shapes:
        step, predicted = exported_step(model, traced, on, size, shape, compile_target.platform)
        outcome = compile_apart(step, compile_target, limits)
        logits = 4 * traced.vocab * data * shape.tokens
        compiled, issues = _judged(
            arrangement.mesh, machine, compile_target, step, outcome, predicted, logits
        )
        programs.append(
            ServedProgram(
                topology=machine.name,
                tensor=tensor,
                data=data,
                tokens=data * shape.tokens,
                table=size.table,
                predicted=predicted,
                compiled=compiled,
                seconds=outcome.seconds,
                findings=issues,
            )
        )
    return tuple(programs)


def _judged(
    mesh: MeshShape,
    machine: Topology,
    compile_target: Target,
    step: ExportedStep,
    outcome: Compiled | Failure,
    predicted: Mapping[str, int],
    logits: int,
) -> tuple[CompiledStep | None, tuple[Finding, ...]]:
    if isinstance(outcome, Failure):
        return None, (_finding(outcome.kind, "error", outcome.message[:600], "smaller sizes"),)
    compiled, traffic = read_compiled(mesh, (), machine, compile_target, step, outcome)
    return compiled, tuple(
        findings(
            machine,
            compiled,
            donated=step.donated,
            aliased=traffic.aliased,
            predicted=predicted,
            logits=logits,
        )
    )


def findings(
    machine: Topology,
    compiled: CompiledStep,
    *,
    donated: int,
    aliased: int,
    predicted: Mapping[str, int],
    logits: int,
) -> Iterator[Finding]:
    """Yields the faults of a program that serves.

    Args:
        predicted: bytes a device: "weights", "pages".
        logits: bytes of those of all tokens of the step: a gather of more than twice as much is
            one of weights, whatever the compiler calls it.
    """
    sizes, pages = compiled.device_bytes, predicted["pages"]
    gathered = [
        collective
        for collective in compiled.collectives
        if collective.kind == "all-gather"
        and (collective.cause.startswith("weights.") or collective.bytes > 2 * logits)
    ]
    if gathered:
        size = sum(collective.total_bytes for collective in gathered)
        yield _finding(
            "weights-gathered",
            "error",
            f"the program gathers {bytes_text(size)} of weights in a step:"
            f" {', '.join(collective.cause for collective in gathered[:3])}",
            "another number of devices along tensor",
        )
    if aliased < donated:
        yield _finding(
            "not-aliased",
            "error",
            f"{donated - aliased} of {donated} arrays of pages are not written in place",
            "",
        )
    if sizes["temporaries"] >= pages:
        yield _finding(
            "cache-copied",
            "warning",
            f"temporaries of {bytes_text(sizes['temporaries'])} are more than the pages,"
            f" {bytes_text(pages)}: the cache is copied, a step reads all of it at once, or weights"
            " of a layer are copied, as those of experts may be",
            "fewer slots, or a smaller budget",
        )
    expected = sum(predicted.values())
    if abs(sizes["arguments"] - expected) > ALLOWED * expected:
        yield _finding(
            "memory-differs",
            "warning",
            f"weights and pages are {bytes_text(expected)}, the arguments of the program"
            f" {bytes_text(sizes['arguments'])}",
            "",
        )
    if sizes["peak"] > machine.chip.usable_bytes:
        yield _finding(
            "does-not-fit",
            "error",
            f"the program needs {bytes_text(sizes['peak'])} of"
            f" {bytes_text(machine.chip.usable_bytes)}",
            "fewer pages, or more devices along tensor",
        )


def _finding(code: str, severity: str, message: str, hint: str) -> Finding:
    return Finding(code=code, severity=severity, where="serving", message=message, hint=hint)
