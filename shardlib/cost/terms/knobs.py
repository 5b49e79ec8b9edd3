"""Decisions of a plan that pricing reads as they are: one value for all candidates of an array."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Decisions that neither the mesh nor the colours say.

    Attributes:
        zero: ZeRO stage, 0 to 3.
        schedule: pipeline schedule; "none" without stages.
        virtual: chunks of layers on each stage.
        context: how keys and values meet queries along the context axis: all of them are gathered
            before ("all-gather"), go around beside the attention ("ring", arXiv:2310.01889), or
            devices exchange parts of the sequence for heads ("ulysses", arXiv:2309.14509).
        attention: how its core is computed: as the model is written ("traced"), or by one of
            `shardlib.graph.kernels`.
        gather: when a pipeline's stage gathers weights that are stored sharded: at every "use", or
            "once" for all microbatches of a group.
        accumulation: groups of microbatches that go through the pipeline one after the other; 1
            without stages.
        offload: what is stored in host memory: "optimizer" (its state), "activations" (what the
            forward pass saves of every layer); "disk": the optimizer's state on disk; see
            `offloaded`.
    """

    zero: int = 0
    schedule: str = "none"
    virtual: int = 1
    context: str = "all-gather"
    attention: str = "traced"
    gather: str = "use"
    accumulation: int = 1
    offload: tuple[str, ...] = ()

    @property
    def ring(self) -> bool:
        """Whether keys and values go around the context axis."""
        return self.context == "ring"

    @property
    def fused(self) -> str:
        """How the core of attention is priced: where devices have parts of the sequence to
        themselves, as a kernel that writes no scores.
        """
        return (
            "blocks"
            if self.context in ("ring", "ulysses") and self.attention == "traced"
            else self.attention
        )
