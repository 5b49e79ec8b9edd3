"""What a training framework can do of what a plan may decide, as a table of facts.

>>> able = Abilities(axes=("data", "tensor"), zero=(0, 1), remat=("none", "full"))
>>> able.refusals({"zero": 3, "mesh": {"data": 8}}, {"data": 8})
['zero=3 (it has zero 0, 1)']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardlib.axes import INNER_AXES
from shardlib.decisions.readers import PinValue
from shardlib.errors import PinError, raise_all
from shardlib.schedules.table import SCHEDULES

#: What must hold of decisions together, by the word of a rule.
RULES: Mapping[str, str] = {
    "equal stages": "every chunk of every stage has equally many layers, all of one kind",
    "microbatches in groups": "the microbatches of stages are a multiple of the stages",
    "chunked in groups": "with several chunks on a stage, so they are there",
    "a microbatch a chunk": "stages have at least as many microbatches as chunks in all",
    "ZeRO over all": "what shards batch or sequence and is no data axis shards parameters too",
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
    """What a framework can do.

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
        """Whether plans keep a rule."""
        assert rule in RULES, f"{rule!r} is no rule"
        return rule in self.rules

    @property
    def free(self) -> bool:
        """Whether it can do whatever a plan may decide."""
        return self == ANYTHING

    def refusals(self, pins: Mapping[str, PinValue], axes: Mapping[str, int]) -> list[str]:
        """What is pinned that the framework cannot do, in words."""
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
