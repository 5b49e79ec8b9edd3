"""Recomputation of a row as a remat policy and the results of a layer that are kept.

Names of MaxText's tensors (AI-Hypercomputer/maxtext MaxText/configs/base.yml,
MaxText/layers/decoders.py) and its policies; torchtitan's selective checkpointing of ops saves
every second matmul and attention (pytorch/torchtitan torchtitan/models/llama/parallelize_llama.py,
`_save_list` and `selective_ac_option: 'op'`): of seven matmuls of a Llama layer those of queries,
values, gate, and the last, which nothing backwards reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.environment import table
from benchmarks.published.document import Entry


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What a run keeps of a layer.

    Attributes:
        remat: remat policy of the program.
        every: one in so many layers follows `remat`, the others recompute nothing.
        kept, offloaded: see `shardlib.cost.framework.FrameworkProfile`.
        assumed: what the row does not say.
    """

    remat: str
    every: int = 1
    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


_TABLE = table("published_recompute")
#: MaxText's names of tensors -> results of a layer.
TENSORS: Mapping[str, tuple[str, ...]] = {
    word: tuple(names) for word, names in _TABLE["tensors"].items()
}
#: MaxText's policies -> results that they keep.
POLICIES: Mapping[str, tuple[str, ...]] = {
    word: tuple(names) for word, names in _TABLE["policies"].items()
}
#: What MaxText does where nothing is said (MaxText/configs/base.yml, remat_policy: 'full'; results
#: that the policy 'custom' does not name are computed again as well).
UNSAID = "full"
#: torchtitan's selective checkpointing of ops.
ALTERNATE: tuple[str, ...] = ("query", "value", "context", "gate")
#: torchtitan's selective checkpointing of layers recomputes one layer in so many
#: (torchtitan/config_manager.py, selective_ac_option: default '2').
SELECTIVE_LAYERS = 2
#: Word in the recomputation of a row -> remat policy, the first that fits. Megatron's "selective"
#: recomputes the core of attention, which a fused kernel does anyway.
WORDS: tuple[tuple[str, str], ...] = _TABLE["words"]


def recompute_of(row: Entry) -> Recompute:
    """The recomputation of a row."""
    text = str(row.get("recompute") or "unknown")
    if row.get("framework") == "torchtitan" and text in ("selective", "selective(op)"):
        return Recompute(remat="none", kept=ALTERNATE)
    if row.get("framework") == "torchtitan" and text == "selective(layer)":
        return Recompute(remat="full", every=SELECTIVE_LAYERS)
    if str(row.get("framework")).startswith("MaxText"):
        found = _maxtext(text)
        if found is not None:
            return found
        if text == "unknown":
            return Recompute(remat=UNSAID, assumed=(f"remat {UNSAID}, MaxText's default",))
    policy = next((policy for start, policy in WORDS if text.startswith(start)), "none")
    return Recompute(
        remat=policy,
        assumed=() if text in ("none", "full", "selective") else (f"remat {policy} for {text!r}",),
    )


def _maxtext(text: str) -> Recompute | None:
    """A policy of MaxText, or a list of tensors that are kept on the device or in host memory; None
    where the text is neither.
    """
    policy = POLICIES.get(re.sub(r"\(.*", "", text))
    if policy is not None:
        return Recompute(remat="none", kept=policy)
    listed = re.fullmatch(r"(save|offload) ([\w,]+)( on device)?", text)
    if listed is None or any(word not in TENSORS for word in listed[2].split(",")):
        return None
    results = tuple(
        dict.fromkeys(result for word in listed[2].split(",") for result in TENSORS[word])
    )
    return (
        Recompute(remat="none", kept=results)
        if listed[1] == "save"
        else Recompute(remat="none", offloaded=results)
    )
