"""The words of a path, the same for what libraries name differently.

>>> words("model.layers.#.self_attn.q_proj.weight") == words("blocks.#.attention.query.kernel")
True
"""

from __future__ import annotations

import re
from collections import Counter

#: Words that say nothing.
_EMPTY = frozenset(
    {"proj", "projection", "model", "transformer", "params", "self", "net", "module"}
)
#: Words in the place of others.
_SAME = {
    **dict.fromkeys(("kernel", "scale", "embedding", "w"), "weight"),
    "b": "bias",
    **dict.fromkeys(("q",), "query"),
    **dict.fromkeys(("k",), "key"),
    **dict.fromkeys(("v",), "value"),
    **dict.fromkeys(("o", "output"), "out"),
    **dict.fromkeys(("attn", "attn1", "mha"), "attention"),
    **dict.fromkeys(("ffn", "feedforward", "ff", "feed", "forward"), "mlp"),
    **dict.fromkeys(("ln", "layernorm", "rmsnorm", "rms", "norms"), "norm"),
    **dict.fromkeys(("wte", "embeddings", "embedder", "tok", "token", "tokens"), "embed"),
    **dict.fromkeys(("wpe", "pos", "positions", "positional"), "position"),
    **dict.fromkeys(("wi", "fc1", "intermediate", "w1", "fcin"), "up"),
    **dict.fromkeys(("wo", "fc2", "w2", "fcout"), "down"),
    **dict.fromkeys(("lm", "classifier", "unembed", "logits"), "head"),
    **dict.fromkeys(("layers", "h", "blocks", "block"), "layer"),
    **dict.fromkeys(("convolution", "conv1", "conv2"), "conv"),
}


def words(path: str) -> Counter[str]:
    """The words of a path, with how often each is there."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower()
    found = [_SAME.get(part, part) for part in re.split(r"[._/]", parts) if part not in ("", "#")]
    return Counter(word for word in found if word not in _EMPTY)


def likeness(one: Counter[str], other: Counter[str]) -> float:
    """How much two paths have in common, 0 to 1 (the coefficient of Dice)."""
    total = sum(one.values()) + sum(other.values())
    return 2 * sum((one & other).values()) / total if total else 0.0
