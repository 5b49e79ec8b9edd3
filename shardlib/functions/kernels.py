"""Kernels of the vendors that compute a call of attention.

On TPUs splash attention, which comes with JAX (blocks of the mask that nobody sees are left out;
documents are told in the kernel), on NVIDIA GPUs that of cuDNN. Neither holds scores
(FlashAttention, arXiv:2205.14135). "blocks" is a program of XLA that does all that can be asked
for, on any machine, and holds the scores of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from shardlib.functions.attention import Attention, Operand, Operands
from shardlib.graph.kernels import Kind

#: Lanes of a TPU's vector unit: splash attention wants blocks of a multiple.
LANES = 128
#: What widths of heads of cuDNN's kernel are multiples of; how wide they may be is a figure of the
#: chip (`shardlib.hardware.chip.Chip.attention_width`).
CUDNN_STEP = 8


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a kernel is asked for.

    Attributes:
        queries, keys: positions of both.
        width: of the heads of queries and keys, elements.
        value_width: of the heads of values; where the two differ the narrower ones are padded with
            zeros for cuDNN's kernel, as `jax.nn.dot_product_attention` has one width for all.
        dtype: of queries.
        causal: whether a query sees no later key.
        window: keys that a query sees; 0 for all, None where that is known only when the program
            runs.
        capped: whether scores are capped.
        documents: whether there are several.
        biased: whether distances add to scores.
    """

    queries: int
    keys: int
    width: int
    value_width: int
    dtype: Any
    causal: bool
    window: int | None
    capped: bool
    documents: bool
    biased: bool = False

    @staticmethod
    def by(form: Attention, arrays: Sequence[Operand]) -> Wanted:
        """What a call asks for, by its operands or their abstract values. Whether a window counts
        may be known only later: there are two kernels then.
        """
        operands = Operands.of(form, arrays)
        return Wanted(
            queries=operands.queries[0].shape[1],
            keys=operands.value.shape[1],
            width=sum(query.shape[3] for query in operands.queries),
            value_width=operands.value.shape[3],
            dtype=operands.queries[0].dtype,
            causal=form.causal,
            window=form.window,
            capped=bool(form.softcap),
            documents=form.packed,
            biased=form.bias is not None,
        )

    @property
    def widest(self) -> int:
        """The wider of both widths."""
        return max(self.width, self.value_width)

    def why_not(self, kind: Kind) -> str:
        """Why a kernel cannot compute it; empty where it can, on chips that take heads of the
        width.
        """
        if kind == "blocks":
            return ""
        if self.biased:
            return "distances add to scores, for which the kernel has no form"
        if self.window is None:
            return "the window is known only when the program runs"
        if self.queries != self.keys and (self.causal or self.window):
            return f"{self.queries} queries do not stand where {self.keys} keys do"
        if kind == "splash":
            odd = [length for length in (self.queries, self.keys) if length % LANES]
            return f"a sequence of {odd[0]} is no multiple of {LANES}" if odd else ""
        wrong = {
            f"the kernel is for bfloat16 and float16, not for {jnp.dtype(self.dtype)}": (
                jnp.dtype(self.dtype) not in (jnp.bfloat16, jnp.float16)
            ),
            f"heads are {self.widest} wide: no multiple of {CUDNN_STEP}": (
                self.widest % CUDNN_STEP != 0
            ),
            "scores are capped": self.capped,
            "there are several documents": self.documents,
            "the window is to both sides": bool(self.window) and not self.causal,
        }
        return next((why for why, is_so in wrong.items() if is_so), "")
