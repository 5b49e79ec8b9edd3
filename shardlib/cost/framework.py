"""Framework profiles and training frameworks: the effects of the software between a model and its
chips, as tables of facts with their sources.

A traced program says what is computed. How often gradients are reduced, whether the scores of
attention are ever written to memory, what an optimizer keeps and what hides behind what is decided
by the software that runs it: a `FrameworkProfile`.

>>> FrameworkProfile(name="ours").reduction, FrameworkProfile(name="ours", scaling="rows").scaling
('microbatch', 'rows')

The profiles that shardlib knows are XLA's, and those of published training runs. `XLA` is the
default and changes nothing; the others are data, `framework_profiles/NAME.json`.

>>> XLA.attention, framework_profile("megatron-core").attention
('traced', 'fused')
>>> megatron = framework_profile("megatron-core")
>>> FrameworkProfile.from_json(megatron.to_json()) == megatron
True

`Abilities` of a training framework are the decisions that it can honour:

>>> able = Abilities(axes=("data", "tensor"), zero=(0, 1), remat=("none", "full"))
>>> able.refusals({"zero": 3, "mesh": {"data": 8}}, {"data": 8})
['zero=3 (it has zero 0, 1)']

A `Framework`, `shardlib/cost/frameworks/NAME.json`, has its abilities and the profile that it is
priced as. Profiles of older releases, and of frameworks that have no such file, can be named too.

>>> framework("torchtitan", "nvidia").able.zero
(0, 3)
>>> framework("maxtext", "google").profile, framework("maxtext", "nvidia").profile
('maxtext-tpu', 'maxtext-gpu')
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar, Protocol

from shardlib.decisions.table import PinValue
from shardlib.errors import PinError, raise_all
from shardlib.graph import ITEMSIZE
from shardlib.layout import INNER_AXES
from shardlib.schedules import SCHEDULES
from shardlib.untrusted.data import JsonMapping, JsonObject, construct, shown

#: Words that a field may have.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": ("traced", "fused", "blocks", "rematerialised"),
    "saves": ("traced", "operands", "eager"),
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
#: Names of results of a layer (`shardlib.cost.facts`).
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
#: Fields between 0 and 1, where they are given.
SHARES: tuple[str, ...] = (
    "gather_overlap",
    "reduce_overlap",
    "tensor_overlap",
    "expert_overlap",
    "send_overlap",
)


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """A training framework as a table of facts. None, "" and "traced" leave what the traced program
    and the vendor's constants say.

    Attributes:
        name: what people call it.
        attention: "fused" where the core of attention is one kernel that writes no scores
            (arXiv:2205.14135); "blocks" where it is a program of XLA in blocks, whose scores are
            written and not kept; "traced" as the model is written; "rematerialised" where its
            scores and softmax are not saved but rematerialised (selective recomputation,
            arXiv:2205.05198, section 5).
        attention_block: queries and keys that a kernel of fused attention works on at once; a
            causal mask saves whole blocks.
        saves: what the forward pass keeps for the backward pass: "traced" what JAX's autodiff
            keeps; "operands" what layers written by hand keep, operands of matmuls and inputs of
            non-linear functions, while the rest of an element-wise chain is rematerialised inside
            the backward kernels (arXiv:2205.05198, section 4.1); "eager" those and both factors of
            a product of two branches, where every op is a kernel of its own.
        routed_saves: what experts that tokens are routed to keep: "as others" what `saves` says;
            "rows" the rows and products that their matmuls and activations read, as
            `shardlib.lowering.experts` does it.
        kept: results of a layer that the forward pass keeps, by name
            (`shardlib.cost.facts`), beside its input; all else is rematerialised. ()
            as `saves` says.
        offloaded: results of a layer that wait in host memory for the backward pass; two layers'
            worth is on its way.
        attention_copies: bytes that stay beside what the kernel of attention keeps, over those of
            its result: buffers of which it reads a part, transposed copies.
        gathered_inputs: with sequence parallelism, whether what was gathered along the sequence for
            a matmul is kept, or gathered "again" (arXiv:2205.05198, section 4.2.2); "shared" where
            one gather in the backward pass serves what is rematerialised and the gradient of the
            weight.
        logit_bytes: bytes of memory for every logit when the loss is computed and its gradient
            made; None: as traced and fused.
        early_remat: whether rematerialising the last layer starts beside the head's backward pass,
            as in loops that XLA pipelines.
        embedding_and_head_gathered: whether parameters outside of all layers stay gathered for the
            whole step where parameters are stored sharded (ZeRO 3).
        stage_gathers: whether a pipeline's stage gathers its parameters and reduces their gradients
            at every "use" or once a "step" (ZeRO 3): then both are whole.
        collected: whether gathers of parameters and reductions of gradients come one by one
            ("apart"), or a combiner joins all reductions of a step into one, and one gather of a
            parameter serves forward and backward pass ("together"): then, under ZeRO 2 and 3,
            gradients are whole until the last is made, and under ZeRO 3 parameters are whole until
            they make room for their gradients.
        products: "half" where products run in half precision throughout, gradients of logits and
            scores too (`shardlib.cost.activations`).
        matmul_dtype: dtype of the products of layers' weights, forward and backward, if it is not
            that of the traced program: "float8_e4m3fn". The head, the router and the core of
            attention stay as traced (NVIDIA/TransformerEngine user guide, "Using FP8"; pytorch/ao
            float8).
        scaling: whether the largest element of an operand is found in a pass of its own before it
            is cast to `matmul_dtype` ("current") or known from the steps before ("delayed"); "rows"
            as "current", with a scale for each row along the contraction, so that each product
            casts its operands anew.
        reduction: whether gradients are reduced after every microbatch ("microbatch"), once a step
            to the shards of the optimizer where that is sharded ("step"), or, where they are stored
            replicated, once a step in whole, beside the backward pass of the last microbatch
            ("last"; with ZeRO 2 and 3 after every microbatch).
        reduction_dtype: communication dtype of gradients; "" as traced.
        gradient_dtype: dtype in which gradients are kept over the microbatches of a step; "" that
            of the parameter.
        gradient_buffer: whether gradients have a buffer of their own for the whole step, with one
            microbatch too.
        flat: whether what ZeRO shards is one flat buffer, or padded, so that any number of devices
            divides it; otherwise a dim of every array must be divisible.
        state_bytes: bytes of optimizer state and master weights for every parameter; None as the
            optimizer of the problem says.
        unfused_loss: bytes that kernels outside of the layers, those of the loss, move over those
            of perfectly fused chains; the least that `Efficiency.unfused` is there.
        balance: whether stages of a pipeline have equally many "layers", or are cut where an equal
            part of the "work" is passed, the head's included: the block that passes it belongs to
            the stage before.
        embedding_and_head: whether embedding and head are "spread" over the stages of a pipeline or
            lie with their "owners", the first and the last.
        pipeline: "lockstep" where all stages move at once (one SPMD program, 2S-1 microbatches in
            flight), "asynchronous" where a stage waits for its neighbours alone (1F1B of
            arXiv:2104.04473, S in flight).
        gather_overlap: share of compute time under which gathers of parameters hide; None as
            `Efficiency.overlap`.
        reduce_overlap: the same for reductions of gradients.
        tensor_overlap: share of the collectives over tensor that hides under the matmuls beside
            them; None: nothing does.
        expert_overlap: the same for all-to-all of experts.
        exchange: what a rank of tensor sends to experts where the sequence is sharded over tensor:
            the "whole" rows of its group; its own part, which is "gathered" over tensor where it
            arrives, and scattered before it goes home; or its own part to experts of which
            the "ranks" of tensor have different ones, so that nothing is gathered and no sums are
            partial - the sharding of experts' width over tensor then stands for whole experts on
            fewer ranks, whose FLOPs and bytes are the same.
        exchange_room: bytes that tokens take on their way to experts over those of an even routing,
            at least 1: more than 1 where messages have equal sizes and room to spare.
        send_overlap: share of the messages between stages that hides under compute.
        runtime_bytes: memory of a device that is not an array: the driver's context and buffers of
            communication.
        fragmentation: memory that the allocator takes from the device over memory of arrays.
        sources: where the facts come from; what is assumed says so.

    Raises:
        PinError: a field has a word or number that it cannot have; all of them are listed.
    """

    name: str
    attention: str = "traced"
    attention_block: int = 128
    saves: str = "traced"
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
            f"{name} is {getattr(self, name)!r}; it is one of {', '.join(words)}"
            for name, words in CHOICES.items()
            if getattr(self, name) not in words
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it is a share from 0 to 1"
            for name in SHARES
            if not 0 <= (getattr(self, name) or 0) <= 1
        ]
        failures += [
            f"{name} is {getattr(self, name)!r}, which is not a dtype"
            for name in ("matmul_dtype", "reduction_dtype", "gradient_dtype")
            if getattr(self, name) not in ("", *ITEMSIZE)
        ]
        failures += [
            f"{name} names {word!r}; results are {', '.join(RESULTS)}"
            for name in ("kept", "offloaded")
            for word in getattr(self, name)
            if word not in RESULTS
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

    def gradient_bytes(self, itemsize: int) -> int:
        """Bytes of a gradient's element where it is kept, for a parameter of `itemsize` bytes."""
        return ITEMSIZE[self.gradient_dtype] if self.gradient_dtype else itemsize

    def to_json(self) -> JsonObject:
        """The profile as plain data; `from_json` gives an equal one."""
        return {
            **self.__dict__,
            **{name: list(getattr(self, name)) for name in ("kept", "offloaded", "sources")},
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> FrameworkProfile:
        """Reads what `to_json` wrote; fields that are left out have their defaults."""
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


#: Rows that messages of the lowered exchange of tokens have room for, over those of an even
#: routing; what does not fit takes another round.
EXCHANGE_ROOM = 1.25


def gathers(profile: FrameworkProfile) -> tuple[str, ...]:
    """Returns the times at which a stage of a pipeline may gather weights that are stored sharded:
    the single programs that plans are lowered to leave that open.
    """
    return (
        ("use", "once")
        if profile.pipeline == "lockstep" and profile.stage_gathers == "use"
        else ("use",)
    )


def ends_on_all_stages(profile: FrameworkProfile) -> bool:
    """Returns whether the devices of all stages compute embedding and head, each for a part of the
    sequence: pipelines in one program do. Otherwise the first and the last stage do.
    """
    return profile.pipeline == "lockstep" and profile.embedding_and_head == "spread"


#: One program of JAX, compiled by XLA: the default, with nothing beside what is traced.
XLA = FrameworkProfile(
    name="xla",
    reduction="last",
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


@lru_cache(maxsize=1)
def framework_profiles() -> Mapping[str, FrameworkProfile]:
    """The framework profiles that come with shardlib, by name."""
    folder = resources.files("shardlib.cost") / "framework_profiles"
    loaded = [
        FrameworkProfile.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {
        XLA.name: XLA,
        **{profile.name: profile for profile in sorted(loaded, key=lambda profile: profile.name)},
    }


def framework_profile(name: str | FrameworkProfile) -> FrameworkProfile:
    """The framework profile of a name; a `FrameworkProfile` is returned as it is."""
    if isinstance(name, FrameworkProfile):
        return name
    profiles = framework_profiles()
    if name not in profiles:
        raise PinError(
            f"framework profile {name!r} is unknown; framework profiles are {', '.join(profiles)}"
        )
    return profiles[name]


#: What must hold of decisions together, by the word of a rule.
RULES: Mapping[str, str] = {
    "equal stages": "every chunk of every stage has equally many layers, all of one kind",
    "microbatches in groups": "the microbatches of stages are a multiple of the stages",
    "chunked in groups": "with several chunks on a stage, so they are there",
    "a microbatch a chunk": "stages have at least as many microbatches as chunks in all",
    "ZeRO over all": "what shards batch or sequence and is not a data axis shards parameters too",
    "replicas alone": "without ZeRO, a data axis is the only axis",
    "ZeRO or replicas": "with ZeRO there is no data axis beside it",
    "experts in sequence": "with experts, tensor shards the sequence too",
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("never", "either", "always"),
    "tensor": ("any", "all"),
}
#: Decisions that no framework leaves to its configuration, in the words of pins.
OWN: Mapping[str, str] = {
    "attention": "how attention is computed is the framework's own",
    "pipeline": "how stages are made programs is the framework's own",
    "collective_matmul": "how matmuls over tensor wait for collectives is the framework's own",
    "accumulation": "microbatches go through its stages in one group",
    "remat_classes": "all layers follow one remat policy",
    "rules": "what a mesh axis shards is the framework's own",
    "dtypes": "its dtypes are facts of its profile",
    "allow": "its dtypes are facts of its profile",
    "axis_order": "its axes lie in the usual order on the links",
}


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The abilities of a framework.

    Attributes:
        axes: mesh axes that it has.
        schedules: pipeline schedules, beside "none".
        chunks: whether a stage may have several chunks of layers.
        zero: ZeRO stages.
        remat: remat policies; "partly" where some layers of a stage may follow "full" and the
            others none.
        contexts: how keys and values meet queries along a context axis.
        gathers: when a stage of a pipeline gathers weights that are stored sharded.
        sequence_parallel: whether tensor shards the sequence between blocks: "never", "either" (as
            the plan decides), "always".
        tensor: whether tensor shards "all" colours of matmuls, but for those of experts, or "any".
        offload: what can wait in host memory.
        rules: words of `RULES` that its plans keep.
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
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it is one of {', '.join(words)}"
            for name, words in _CHOICES.items()
            if getattr(self, name) not in words
        ]
        vocabulary: Mapping[str, tuple[Any, ...]] = {
            "axes": INNER_AXES,
            "schedules": tuple(SCHEDULES),
            "zero": (0, 1, 2, 3),
            "remat": ("none", "dots", "full", "partly"),
            "contexts": ("all-gather", "ring", "ulysses"),
            "gathers": ("use", "once"),
            "offload": ("optimizer", "activations"),
            "rules": tuple(RULES),
        }
        failures += [
            f"{name} names {word!r}; there are {', '.join(map(str, words))}"
            for name, words in vocabulary.items()
            for word in getattr(self, name)
            if word not in words
        ]
        if failures:
            raise_all(PinError, "what the framework can do is not usable", failures)

    def has(self, rule: str) -> bool:
        """Returns whether plans keep a rule."""
        assert rule in RULES, f"{rule!r} is not a rule"
        return rule in self.rules

    @property
    def free(self) -> bool:
        """True if it can do whatever a plan may decide."""
        return self == ANYTHING

    def refusals(self, pins: Mapping[str, PinValue], axes: Mapping[str, int]) -> list[str]:
        """Lists the pins that the framework cannot honour, in words."""
        if self.free:
            return []
        refused = [
            f"mesh.{axis}={size} (its axes are {', '.join(self.axes)})"
            for axis, size in axes.items()
            if size > 1 and axis not in self.axes
        ]
        refused += [
            f"{word}={pins[word]!r} (it has {word} {', '.join(map(str, able)) or 'nothing'})"
            for word, able in (
                ("schedule", ("none", *self.schedules)),
                ("zero", self.zero),
                ("remat", self.remat),
                ("context", ("none", *self.contexts)),
                ("gather", (*self.gathers, "any")),
            )
            if pins.get(word) is not None and pins[word] not in able
        ]
        refused += [
            f"offload of {part!r} (it has {', '.join(self.offload) or 'none'})"
            for part in pins.get("offload") or ()
            if part not in self.offload
        ]
        if (pins.get("virtual_stages") or 1) > 1 and not self.chunks:
            refused.append(f"virtual_stages={pins['virtual_stages']} (its stages are whole)")
        if pins.get("remat_layers") and "partly" not in self.remat:
            refused.append(f"remat_layers={pins['remat_layers']} (all layers follow its policy)")
        pinned = pins.get("sequence_parallel")
        if pinned is not None and self.sequence_parallel == ("never" if pinned else "always"):
            refused.append(f"sequence_parallel={pinned} (it does so {self.sequence_parallel})")
        return refused + [f"{word} ({why})" for word, why in OWN.items() if pins.get(word)]


#: What programs of shardlib can do.
ANYTHING = Abilities()


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework.

    Attributes:
        name: what people call it.
        profile: name of the profile that it is priced as, on the chips that were asked for.
        profiles: (vendor, profile) pairs.
        releases: other profiles of the same framework, which can do the same.
        emits: form of its configuration (`shardlib.report`); "" where none is written.
        release: the release whose options are written.
        param_dtype: dtype of stored parameters; "" as the model has them.
        able: what it can do.
        sources: where the facts come from.
    """

    name: str
    profile: str = ""
    profiles: tuple[tuple[str, str], ...] = ()
    releases: tuple[str, ...] = ()
    emits: str = ""
    release: str = ""
    param_dtype: str = ""
    able: Abilities = ANYTHING
    sources: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def frameworks() -> Mapping[str, Framework]:
    """The frameworks that have files, by name."""
    folder = resources.files("shardlib.cost") / "frameworks"
    loaded = [
        construct(Framework, json.loads(file.read_text(encoding="utf-8")), file.name, PinError)
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {entry.name: entry for entry in sorted(loaded, key=lambda entry: entry.name)}


def framework(name: str, vendor: str) -> Framework:
    """The framework of a name, on the chips of a vendor."""
    known_frameworks = frameworks()
    if name in known_frameworks:
        entry = known_frameworks[name]
        profile = dict(entry.profiles).get(vendor)
        if profile is None:
            raise PinError(
                f"framework {name!r} runs on chips of {' and '.join(dict(entry.profiles))}, and"
                f" these are of {vendor}\nTry: {_others(vendor)}"
            )
        return replace(entry, profile=profile)
    if name in framework_profiles() and name != XLA.name:
        family = next(
            (entry for entry in known_frameworks.values() if name in entry.releases),
            Framework(name=name),
        )
        vendors = dict(family.profiles)
        if vendors and vendor not in vendors:
            raise PinError(
                f"framework {name!r} runs on chips of {' and '.join(vendors)}, and these are of"
                f" {vendor}\nTry: {_others(vendor)}"
            )
        return replace(family, name=name, profile=name)
    names = [
        *known_frameworks,
        *(
            profile_name
            for profile_name in framework_profiles()
            if profile_name not in known_frameworks
        ),
    ]
    names.remove(XLA.name)
    near = difflib.get_close_matches(name.lower(), names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise PinError(f"framework {name!r} is unknown{meant} (frameworks are {', '.join(names)})")


def _others(vendor: str) -> str:
    """Suggests what to try for a framework that does not run on the chips of a vendor."""
    able = [entry.name for entry in frameworks().values() if vendor in dict(entry.profiles)]
    if able:
        return " or ".join(able)
    return "a machine with chips that it runs on, or no framework for programs of shardlib"


# --------------------------------------------------------------------------------------------------
# The decisions that pricing reads, beside the mesh and the colours.


class Knobs(Protocol):
    """Decisions of one value for all candidates of an array; `shardlib.decisions.table.Decisions`
    has them, and so does a plan.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def zero(self) -> int:
        """ZeRO stage, 0 to 3."""
        ...

    @property
    def schedule(self) -> str:
        """Pipeline schedule; "none" without stages."""
        ...

    @property
    def virtual(self) -> int:
        """Chunks of layers on each stage."""
        ...

    @property
    def context(self) -> str:
        """The way that keys and values meet queries along the context axis: all of them are
        gathered before ("all-gather"), go around beside the attention ("ring", arXiv:2310.01889),
        or devices exchange parts of the sequence for heads ("ulysses", arXiv:2309.14509). Without a
        context axis, one of them.
        """
        ...

    @property
    def gather(self) -> str:
        """The time at which a pipeline's stage gathers sharded weights: at every "use", or "once"
        for all microbatches of a group.
        """
        ...

    @property
    def accumulation(self) -> int:
        """Groups of microbatches that go through the pipeline one after the other; 1 without
        stages.
        """
        ...

    @property
    def ring(self) -> bool:
        """True if keys and values go around the context axis."""
        ...
