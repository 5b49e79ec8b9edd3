"""Framework profiles and training frameworks: the effects of the software between a model and its
chips, as tables of facts with their sources.

A traced program says what is computed. How often gradients are reduced, whether attention scores
are written to memory, what an optimizer keeps, and which communication is hidden depend on the
software that runs it: a `FrameworkProfile`. `XLA` is the default and changes nothing; the profiles
of other frameworks are data of `shardlib.frameworks`.

>>> FrameworkProfile.from_json(XLA.to_json()) == XLA
True
>>> FrameworkProfile(name="ours").reduction, FrameworkProfile(name="ours", scaling="rows").scaling
('microbatch', 'rows')

`Abilities` are the decisions that a training framework can implement. A `Framework` has abilities
and the profile that it is priced as.

>>> abilities = Abilities(axes=("data", "tensor"), zero=(0, 1), remat=("none", "full"))
>>> abilities.refusals({"zero": 3, "mesh": {"data": 8}}, {"data": 8})
['zero=3 (it supports zero 0, 1)']

An `Interval` says how far published runs under a profile were from their predicted times. No figure
was fitted to them.

>>> megatron = interval("megatron-core-2024", "nvidia")
>>> megatron.low < 1 < megatron.high, interval("xla", "cpu") is None
(True, True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from shardlib.compact import plain_fields
from shardlib.decisions.table import PinValue
from shardlib.errors import PinError, raise_all
from shardlib.formats import FORMATS
from shardlib.graph import ITEMSIZE
from shardlib.layout import INNER_AXES
from shardlib.schedules import SCHEDULES
from shardlib.untrusted.data import JsonMapping, JsonObject, construct, shown
from shardlib.wings import required

#: Legal values of the fields that are strings.
FIELD_CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": ("traced", "fused", "blocks", "rematerialised"),
    "saves": ("traced", "operands", "eager"),
    "layers": ("written", "looped"),
    "routed_saves": ("as others", "rows"),
    "products": ("traced", "half"),
    "scaling": ("current", "delayed", "rows"),
    "reduction": ("microbatch", "step", "last"),
    "embedding_and_head": ("spread", "owners"),
    "pipeline": ("lockstep", "asynchronous"),
    "balance": ("layers", "work"),
    "gathered_inputs": ("again", "kept", "shared"),
    "stage_gathers": ("use", "step"),
    "collected": ("apart", "together"),
    "exchange": ("whole", "gathered", "ranks"),
}
#: Names of the results of a layer (`shardlib.cost.facts`).
RESULTS: tuple[str, ...] = (
    "layer_input",
    "query",
    "key",
    "value",
    "context",
    "out",
    "gate",
    "wide",
    "narrow",
)
#: Fields that are between 0 and 1 if given.
OVERLAPS: tuple[str, ...] = (
    "gather_overlap",
    "reduce_overlap",
    "tensor_overlap",
    "expert_overlap",
    "send_overlap",
    "replicated_overlap",
)


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """A training framework as a table of facts. None, "" and "traced" stand for the traced program
    and the vendor's figures.

    Attributes:
        name: its name in pins and output.
        attention: "traced" as the model is written; "fused" for one kernel that does not write
            scores (arXiv:2205.14135); "blocks" for a blockwise XLA program, which writes scores but
            does not save them; "rematerialised" if scores and softmax are recomputed, not saved
            (selective recomputation, arXiv:2205.05198, section 5).
        attention_block: block size, in queries and keys, of a fused attention kernel; a causal mask
            skips whole blocks.
        saves: values that the forward pass saves for the backward pass. "traced": what JAX's
            autodiff saves. "operands": what hand-written layers save, operands of matmuls and
            inputs of non-linear functions; the rest of an element-wise chain is recomputed inside
            the backward kernels (arXiv:2205.05198, section 4.1). "eager": those and both operands
            of a product of two branches, as with one kernel per op.
        layers: how layers run that the model writes one after the other: "written", where XLA
            recomputes what is cheap in the kernels that read it; or "looped", as in stages of our
            pipelines, where all that is saved is stacked.
        routed_saves: the same for experts with routed tokens: "as others" follows `saves`; "rows"
            saves the rows and products that their matmuls and activations read, as
            `shardlib.lowering.experts` does.
        kept: results of a layer, by name (`shardlib.cost.facts`), that the forward pass saves
            besides the layer's input; everything else is rematerialised. (): as `saves` says.
        offloaded: results of a layer, by name, that are offloaded to host memory until the backward
            pass; two layers' worth is in transit.
        attention_copies: extra bytes saved by the attention kernel, over those of its result:
            buffers of which it reads only a part, transposed copies.
        gathered_inputs: with sequence parallelism, whether a matmul input that was gathered along
            the sequence is "kept" for the backward pass, or gathered "again" (arXiv:2205.05198,
            section 4.2.2); "shared" if one gather in the backward pass serves both
            rematerialisation and the weight gradient.
        logit_bytes: peak bytes per logit while the loss and its gradient are computed; None: as
            traced and fused.
        early_remat: True if rematerialisation of the last layer overlaps with the backward pass of
            the head, and weight gradients come last, as XLA schedules them; only with "traced"
            saves.
        embedding_and_head_gathered: True if parameters outside of the layers stay gathered for the
            whole step under ZeRO 3.
        stage_gathers: whether a pipeline stage gathers its parameters and reduces their gradients
            at every "use" or once per "step" (ZeRO 3), with parameters and gradients unsharded in
            between.
        collected: "apart" if parameters are gathered and gradients reduced one by one. "together"
            if a combiner joins all reductions of a step, and one gather of a parameter serves
            forward and backward pass: then, under ZeRO 2 and 3, gradients are unsharded until the
            last one is computed, and under ZeRO 3 parameters are unsharded until replaced by their
            gradients.
        products: "half" if products run in half precision throughout, including gradients of logits
            and scores (`shardlib.cost.activations`).
        matmul_dtype: format of the products with layer weights, forward and backward, if not that
            of the traced program: "float8_e4m3fn", "nvfp4". The head, the router and the core of
            attention stay as traced (NVIDIA/TransformerEngine user guide, "Using FP8"; pytorch/ao
            float8).
        scaling: "current" if the largest element of an operand is found in a separate pass before
            the cast to `matmul_dtype`; "delayed" if it is known from earlier steps; "rows" as
            "current", with a scale per row along the contraction, so that each product casts its
            operands again.
        reduction: gradients are reduced after every "microbatch"; or once per "step" to the shards
            of the optimizer, if that is sharded; or, if stored replicated, once per step during the
            backward pass of the "last" microbatch (with ZeRO 2 and 3 after every microbatch).
        reduction_dtype: communication dtype of gradients; "" as traced.
        gradient_dtype: dtype of gradients accumulated over microbatches; "" that of the parameter.
        gradient_buffer: True if gradients have a separate buffer for the whole step, even with one
            microbatch.
        flat: True if ZeRO shards one flat or padded buffer, so that any number of devices divides
            it; otherwise a dim of every array must be divisible.
        state_bytes: bytes of optimizer state and master weights per parameter; None as the
            problem's optimizer says.
        unfused_loss: bytes that kernels outside of the layers, those of the loss, move over those
            of perfectly fused chains; a lower bound of `Efficiency.unfused` there.
        balance: pipeline stages have equally many "layers", or equal "work", including that of the
            head: the block that exceeds a stage's share of the work still belongs to it.
        embedding_and_head: "spread" over all pipeline stages, or on their "owners", the first and
            the last stage.
        pipeline: "lockstep" if all stages advance together (one SPMD program, 2S-1 microbatches in
            flight), "asynchronous" if a stage waits only for its neighbours (1F1B of
            arXiv:2104.04473, S in flight).
        gather_overlap: share of compute time that can hide gathers of parameters; None as
            `Efficiency.overlap`.
        reduce_overlap: the same for reductions of gradients.
        replicated_overlap: the same for gradients of an optimizer whose state is replicated
            (ZeRO 0); None as `reduce_overlap`.
        tensor_stall_s: seconds that a tensor-parallel collective stalls for every other rank of
            its group, where pipeline stages lie on several nodes.
        bucket_bytes: bytes that one gather or reduction moves; 0: every array on its own.
        tensor_overlap: share of the tensor-parallel collectives that hides under adjacent matmuls;
            None: nothing.
        expert_overlap: the same for the all-to-alls of experts.
        exchange: what a tensor rank sends to experts if the sequence is sharded over tensor.
            "whole": all rows of its group. "gathered": its own rows, which are all-gathered over
            tensor on arrival and reduce-scattered before they return. "ranks": its own rows, to
            experts of which every tensor rank has different ones, so that nothing is gathered and
            no sums are partial; sharding the experts' width over tensor then stands for whole
            experts on fewer ranks, with the same FLOPs and bytes.
        exchange_room: bytes of the dispatched tokens over those of an even routing, at least 1;
            more than 1 for messages of equal, padded size.
        send_overlap: share of the messages between stages that hides under compute.
        runtime_bytes: device memory that does not belong to arrays: the driver's context and
            communication buffers.
        fragmentation: memory that the allocator takes from the device over memory of arrays.
        sources: sources of the facts; assumptions are marked as such.

    Raises:
        PinError: a field has an illegal value; all of them are listed.
    """

    name: str
    attention: str = "traced"
    attention_block: int = 128
    saves: str = "traced"
    layers: str = "looped"
    routed_saves: str = "as others"
    products: str = "traced"
    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    attention_copies: float = 0.0
    gathered_inputs: str = "again"
    logit_bytes: float | None = None
    early_remat: bool = True
    embedding_and_head_gathered: bool = False
    stage_gathers: str = "use"
    collected: str = "apart"
    matmul_dtype: str = ""
    scaling: str = "current"
    reduction: str = "microbatch"
    reduction_dtype: str = ""
    gradient_dtype: str = ""
    gradient_buffer: bool = False
    flat: bool = False
    state_bytes: float | None = None
    unfused_loss: float = 1.0
    balance: str = "layers"
    embedding_and_head: str = "spread"
    pipeline: str = "lockstep"
    gather_overlap: float | None = None
    reduce_overlap: float | None = None
    replicated_overlap: float | None = None
    tensor_stall_s: float = 0.0
    bucket_bytes: int = 0
    tensor_overlap: float | None = None
    expert_overlap: float | None = None
    exchange: str = "whole"
    exchange_room: float = 1.0
    send_overlap: float = 0.0
    runtime_bytes: int = 0
    fragmentation: float = 1.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sources", "kept", "offloaded"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        failures = [
            f"{name} is {getattr(self, name)!r}; it is one of {', '.join(values)}"
            for name, values in FIELD_CHOICES.items()
            if getattr(self, name) not in values
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it is a share from 0 to 1"
            for name in OVERLAPS
            if not 0 <= (getattr(self, name) or 0) <= 1
        ]
        failures += [
            f"{name} is {getattr(self, name)!r}, which is not a dtype"
            for name in ("matmul_dtype", "reduction_dtype", "gradient_dtype")
            if getattr(self, name) not in ("", *(FORMATS if name == "matmul_dtype" else ITEMSIZE))
        ]
        failures += [
            f"{name} names {value!r}; results are {', '.join(RESULTS)}"
            for name in ("kept", "offloaded")
            for value in getattr(self, name)
            if value not in RESULTS
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in ("state_bytes", "runtime_bytes", "attention_copies", "logit_bytes")
            if (getattr(self, name) or 0) < 0
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it is at least 1"
            for name in ("fragmentation", "unfused_loss", "exchange_room")
            if getattr(self, name) < 1
        ]
        if failures:
            raise_all(PinError, f"framework profile {self.name!r} is not usable", failures)

    @property
    def states_overlap(self) -> bool:
        """True if the profile says how much of its communication hides."""
        return self.gather_overlap is not None or self.reduce_overlap is not None

    def gradient_bytes(self, itemsize: int) -> int:
        """Bytes per element of an accumulated gradient, for a parameter of `itemsize` bytes."""
        return ITEMSIZE[self.gradient_dtype] if self.gradient_dtype else itemsize

    @property
    def gathers(self) -> tuple[str, ...]:
        """The legal times at which a pipeline stage may gather sharded weights; lowered single
        programs support every one.
        """
        once = self.pipeline == "lockstep" and self.stage_gathers == "use"
        return ("use", "once") if once else ("use",)

    @property
    def outside_on_all_stages(self) -> bool:
        """True if all stages compute embedding and head, each for a part of the sequence, as
        pipelines in one program do; False if the first and the last stage do.
        """
        return self.pipeline == "lockstep" and self.embedding_and_head == "spread"

    def reduces_once_per_step(self, zero: int) -> bool:
        """True if unreduced gradients are accumulated over the microbatches of a step and reduced
        at its end; never with parameters stored sharded (ZeRO 3).
        """
        return self.reduction == "step" and zero < 3

    def reduces_in_last_microbatch(self, zero: int) -> bool:
        """True if gradients are stored replicated and reduced in the last microbatch of a step."""
        return self.reduction == "last" and zero < 2

    def scatters(self, zero: int) -> bool:
        """True if gradients are reduce-scattered to the shards of the optimizer: if they are stored
        sharded, or reduced once for a distributed optimizer.
        """
        return zero >= 2 or (zero == 1 and self.reduction == "step")

    def to_json(self) -> JsonObject:
        return {
            **self.__dict__,
            **{name: list(getattr(self, name)) for name in ("kept", "offloaded", "sources")},
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> FrameworkProfile:
        """Reads what `to_json` wrote; missing fields have their defaults."""
        names = {field.name for field in fields(cls)}
        unknown = [f"{name!r} is not a field" for name in data if name not in names]
        unknown += [] if "name" in data else ["'name' is missing"]
        if unknown:
            raise_all(
                PinError,
                f"framework profile {data.get('name', '')!r} is not usable",
                unknown,
                hint=f"fields are {', '.join(sorted(names))}",
            )
        return construct(cls, data, f"framework profile {shown(data.get('name', ''))}", PinError)


#: Rows that the messages of the lowered token exchange have space for, over those of an even
#: routing; the remainder takes another round.
EXCHANGE_ROOM = 1.25


#: One program of JAX, compiled by XLA: the default, exactly as traced.
XLA = FrameworkProfile(
    name="xla",
    reduction="last",
    layers="written",
    routed_saves="rows",
    exchange_room=EXCHANGE_ROOM,
    gathered_inputs="shared",
    sources=(
        "openxla/xla: what is traced is what runs",
        "exchange_room, routed_saves: shardlib.lowering.experts",
        "gathered_inputs: shardlib.lowering.contractions, of equal pins XLA makes one",
        "reduction: shardlib.lowering.accumulation",
    ),
)


def framework_profile(name: str | FrameworkProfile) -> FrameworkProfile:
    """The framework profile with this name; a `FrameworkProfile` is returned unchanged."""
    if isinstance(name, FrameworkProfile):
        return name
    if name == XLA.name:
        return XLA
    frameworks = required("shardlib.frameworks", f"framework profile {name!r}")
    return frameworks.framework_profile(name)


#: Constraints between decisions, by the name of a restriction.
RESTRICTIONS: Mapping[str, str] = {
    "equal stages": "every chunk of every stage has equally many layers, all of one kind",
    "microbatches in groups": "with stages, the number of microbatches is a multiple of theirs",
    "chunked in groups": "the same, but only with several chunks of layers per stage",
    "a microbatch a chunk": "there are at least as many microbatches as chunks on all stages",
    "ZeRO over all": "all axes that shard batch or sequence, except data, shard parameters too",
    "replicas alone": "without ZeRO, a data axis is the only axis",
    "ZeRO or replicas": "with ZeRO there is no data axis",
    "experts in sequence": "with experts, tensor shards the sequence too",
}
_ABILITY_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("never", "either", "always"),
    "tensor": ("any", "all"),
}
#: Decisions that no framework leaves to its configuration: pin -> reason.
FIXED_PINS: Mapping[str, str] = {
    "attention": "the framework decides how attention is computed",
    "pipeline": "the framework decides how stages become programs",
    "collective_matmul": "the framework decides how tensor-parallel collectives overlap",
    "accumulation": "all microbatches go through its stages in one group",
    "remat_classes": "all layers follow one remat policy",
    "rules": "the framework decides what a mesh axis shards",
    "dtypes": "its profile fixes the dtypes",
    "allow": "its profile fixes the dtypes",
    "axis_order": "it places its mesh axes on the links in the default order",
}


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The abilities of a framework.

    Attributes:
        axes: mesh axes.
        schedules: pipeline schedules, besides "none".
        chunks: True if a stage may have several chunks of layers.
        zero: ZeRO stages.
        remat: remat policies; "partly" if some layers of a stage may follow "full" and the others
            none.
        contexts: values of the decision `context` (ways of context parallelism).
        gathers: times at which a pipeline stage may gather sharded weights.
        sequence_parallel: whether tensor shards the sequence between blocks: "never", "either" (as
            the plan decides), "always".
        tensor: whether tensor shards a dim of "all" parameters (of experts if planned), or "any".
        offload: kinds of arrays that can be offloaded.
        restrictions: names of the `RESTRICTIONS` that its plans satisfy.
    """

    axes: tuple[str, ...] = INNER_AXES
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    chunks: bool = True
    zero: tuple[int, ...] = (0, 1, 2, 3)
    remat: tuple[str, ...] = ("none", "dots", "full", "partly")
    contexts: tuple[str, ...] = ("all-gather", "ring", "ulysses")
    gathers: tuple[str, ...] = ("use", "once")
    sequence_parallel: str = "either"
    tensor: str = "any"
    offload: tuple[str, ...] = ("optimizer", "activations")
    restrictions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it is one of {', '.join(values)}"
            for name, values in _ABILITY_CHOICES.items()
            if getattr(self, name) not in values
        ]
        legal: Mapping[str, tuple[Any, ...]] = {
            "axes": INNER_AXES,
            "schedules": tuple(SCHEDULES),
            "zero": (0, 1, 2, 3),
            "remat": ("none", "dots", "full", "partly"),
            "contexts": ("all-gather", "ring", "ulysses"),
            "gathers": ("use", "once"),
            "offload": ("optimizer", "activations"),
            "restrictions": tuple(RESTRICTIONS),
        }
        failures += [
            f"{name} names {value!r}; there are {', '.join(map(str, values))}"
            for name, values in legal.items()
            for value in getattr(self, name)
            if value not in values
        ]
        if failures:
            raise_all(PinError, "the abilities of the framework are not valid", failures)

    def requires(self, restriction: str) -> bool:
        """True if all its plans satisfy a restriction."""
        assert restriction in RESTRICTIONS, f"{restriction!r} is not a restriction"
        return restriction in self.restrictions

    @property
    def free(self) -> bool:
        """True if it supports every plan."""
        return self == ANY_PLAN

    def refusals(self, pins: Mapping[str, PinValue], axes: Mapping[str, int]) -> list[str]:
        """The pins that the framework cannot honour, as text."""
        if self.free:
            return []
        refused = [
            f"mesh.{axis}={size} (its axes are {', '.join(self.axes)})"
            for axis, size in axes.items()
            if size > 1 and axis not in self.axes
        ]
        refused += [
            f"{pin}={pins[pin]!r} (it supports {pin} {', '.join(map(str, supported)) or 'nothing'})"
            for pin, supported in (
                ("schedule", ("none", *self.schedules)),
                ("zero", self.zero),
                ("remat", self.remat),
                ("context", ("none", *self.contexts)),
                ("gather", (*self.gathers, "any")),
            )
            if pins.get(pin) is not None and pins[pin] not in supported
        ]
        refused += [
            f"offload of {part!r} (it supports {', '.join(self.offload) or 'none'})"
            for part in pins.get("offload") or ()
            if part not in self.offload
        ]
        if (pins.get("virtual_stages") or 1) > 1 and not self.chunks:
            refused.append(f"virtual_stages={pins['virtual_stages']} (it has one chunk per stage)")
        if pins.get("remat_layers") and "partly" not in self.remat:
            refused.append(f"remat_layers={pins['remat_layers']} (all layers follow its policy)")
        pinned = pins.get("sequence_parallel")
        if pinned is not None and self.sequence_parallel == ("never" if pinned else "always"):
            refused.append(f"sequence_parallel={pinned} (it does so {self.sequence_parallel})")
        return refused + [f"{pin} ({why})" for pin, why in FIXED_PINS.items() if pins.get(pin)]


#: The abilities of programs that shardlib lowers.
ANY_PLAN = Abilities()


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework.

    Attributes:
        name: its name in output.
        profile: name of the profile that it is priced as on the given chips.
        profiles: (vendor, profile) pairs.
        releases: profiles of other releases with the same abilities.
        emits: format of its configuration (`shardlib.frameworks.configurations`); "" if none is
            written.
        release: the release whose options are written.
        param_dtype: dtype of stored parameters; "" as in the model.
        abilities: its abilities.
        sources: sources of the facts.
    """

    name: str
    profile: str = ""
    profiles: tuple[tuple[str, str], ...] = ()
    releases: tuple[str, ...] = ()
    emits: str = ""
    release: str = ""
    param_dtype: str = ""
    abilities: Abilities = ANY_PLAN
    sources: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------
# Intervals of predicted step times. `intervals.json` is written by `benchmarks/intervals.py`,
# which also holds how many runs of each source lie in the interval that the other sources give.

#: Plans whose predicted times differ by less than this share of the faster cannot be told apart: of
#: published pairs of plans of one job that lie nearer, over a fifth were measured the other way
#: around (`benchmarks/results/intervals.json`, `pairs`).
INDISTINGUISHABLE = 0.05


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Measured over predicted step time, between which a share of unseen runs lies.

    Attributes:
        low: the least ratio, 1 for a run that takes as long as predicted.
        high: the largest ratio.
        share: the share of runs that lie between, with equal weight for every source.
        runs: number of published runs behind it.
        sources: number of their publications.
        profile: the framework profile of the runs; "" for all of the vendor's chips.
        vendor: of the chips.
    """

    low: float
    high: float
    share: float
    runs: int
    sources: int
    profile: str
    vendor: str

    def to_json(self) -> JsonObject:
        """The interval as plain data."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: JsonMapping) -> Interval:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the interval", PinError)


@lru_cache(maxsize=1)
def intervals() -> Mapping[tuple[str, str], Interval]:
    """The intervals shipped with shardlib, by framework profile and vendor."""
    text = (resources.files("shardlib.cost") / "intervals.json").read_text(encoding="utf-8")
    every = [Interval.from_json(entry) for entry in json.loads(text)["intervals"]]
    return {(entry.profile, entry.vendor): entry for entry in every}


def interval(profile: str, vendor: str) -> Interval | None:
    """The interval of plans under a framework profile: its own, or that of all profiles on the
    vendor's chips where too few sources have it; None where nothing was published.
    """
    all_intervals = intervals()
    return all_intervals.get((profile, vendor), all_intervals.get(("", vendor)))
