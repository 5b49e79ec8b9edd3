"""A framework profile: what the software between a model and its chips does.

A traced program says what is computed. How often gradients are reduced, whether the scores of
attention are ever written to memory, what an optimizer keeps and what hides behind what is decided
by the software that runs it. `shardlib.cost.terms.framework_profiles` has those of published
training runs.

>>> FrameworkProfile(name="ours").reduction, FrameworkProfile(name="ours", scaling="rows").scaling
('microbatch', 'rows')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardlib.errors import PinError, raise_all
from shardlib.graph.graph import ITEMSIZE
from shardlib.untrusted import construct, shown
from shardlib.untrusted.json_types import JsonMapping, JsonObject

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
#: Names of results of a layer (`shardlib.cost.step.layer_results`).
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
    """What a training framework does, a table of facts. None, "" and "traced" leave what the traced
    program and the vendor's constants say.

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
            (`shardlib.cost.step.layer_results`), beside its input; all else is rematerialised. ()
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
            scores too (`shardlib.cost.profiles.half_precision`).
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
        runtime_bytes: memory of a device that is no array: the driver's context and buffers of
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
            f"{name} is {getattr(self, name)!r}, which is no dtype"
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
        unknown = [f"{name!r} is no field" for name in data if name not in names]
        unknown += [] if "name" in data else ["'name' is missing"]
        if unknown:
            raise_all(
                PinError,
                f"framework profile {data.get('name', '')!r} is not usable",
                unknown,
                hint=f"fields are {', '.join(sorted(names))}",
            )
        return construct(cls, data, f"framework profile {shown(data.get('name', ''))}", PinError)
