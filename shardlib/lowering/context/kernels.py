"""Kernels of the vendors for attention of arrays that one device has, in the order of the sequence.

On TPUs splash attention, which comes with JAX (blocks of the mask that nobody sees are left out; documents are told in the kernel), on NVIDIA GPUs that of cuDNN. Neither holds scores (FlashAttention,
arXiv:2205.14135). Which one is for the caller to say: a program may be made for machines that the process does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardlib.errors import LayoutError, MissingPackageError
from shardlib.lowering.context.block import Scores

#: Lanes of a TPU's vector unit: splash attention wants blocks of a multiple.
LANES = 128
#: The most positions of a block of splash attention; what it holds in a core's own memory grows with it.
BLOCKS = (512, 256, LANES)
#: The widest head of cuDNN's kernel on all GPUs that have it, and what widths are multiples of.
CUDNN_WIDTH, CUDNN_STEP = 128, 8


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes attention on one device.

    Attributes:
        kind: "xla" for programs of XLA in blocks, which do all that can be asked for; "pallas" for splash attention on TPUs, "cudnn" for the kernel of cuDNN.
        interpret: kernels of "pallas" run as programs of any machine, slowly, for tests.
    """

    kind: Literal["xla", "pallas", "cudnn"] = "xla"
    interpret: bool = False

    def why_not(self, query: Any, key: Any, value: Any, *, scores: Scores, window: Any = None, causal: bool = True, documents: bool = False) -> str:
        """Why a kernel cannot be used for arrays of these shapes and dtypes; empty where it can.

        Args:
            query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V] of one device, with a shape and a dtype; as many queries as keys, or all keys are seen.
            scores: how scores are made.
            window, causal: as in `Sight`.
            documents: whether there are several.
        """
        if self.kind == "xla":
            return ""
        if not (window is None or isinstance(window, int)):
            return "the window is known only when the program runs"
        if query.shape[1] != key.shape[1] and (causal or window):
            return f"{query.shape[1]} queries do not stand where {key.shape[1]} keys do"
        if self.kind == "pallas":
            odd = [length for length in (query.shape[1], key.shape[1]) if length % LANES]
            return f"a sequence of {odd[0]} is no multiple of {LANES}" if odd else ""
        return self._why_not_cudnn(query, value, scores, bool(window) and not causal, documents)

    def _why_not_cudnn(self, query: Any, value: Any, scores: Scores, both_sides: bool, documents: bool) -> str:
        wrong = {
            f"the kernel is for bfloat16 and float16, not for {jnp.dtype(query.dtype)}": jnp.dtype(query.dtype) not in (jnp.bfloat16, jnp.float16),
            f"heads of queries are {query.shape[3]} wide, those of values {value.shape[3]}": query.shape[3] != value.shape[3],
            f"heads are {query.shape[3]} wide: more than {CUDNN_WIDTH}, or no multiple of {CUDNN_STEP}": query.shape[3] > CUDNN_WIDTH or query.shape[3] % CUDNN_STEP != 0,
            "scores are capped": bool(scores.softcap), "there are several documents": documents, "the window is to both sides": both_sides,
        }
        return next((why for why, is_so in wrong.items() if is_so), "")

    def attention(self, query: Any, key: Any, value: Any, documents: tuple[Any, Any] | None = None, *, scores: Scores, window: Any = None, causal: bool = True) -> Any:
        """Attention, with gradients, where position i is the i-th; arguments as for `why_not`, and documents of queries and keys, [B, Q] and [B, K].

        Returns:
            [B, S, H, V], of the dtype of the values.

        Raises:
            LayoutError: the kernel cannot be used.
            MissingPackageError: the process that traces has no cuDNN; JAX asks it for its version, with a GPU or without.
        """
        why = self.why_not(query, key, value, scores=scores, window=window, causal=causal, documents=documents is not None)
        if why:
            raise LayoutError(f"attention cannot be computed by a kernel of kind {self.kind!r}: {why}\nTry: Kernels(kind=\"xla\")")
        if self.kind == "cudnn":
            return _cudnn(query, key, value, scores.scale, window or 0, causal)
        return _splash(query, key, value, documents, scores, _mask(query.shape[1], key.shape[1], window or 0, causal), self.interpret)


def _cudnn(query: Any, key: Any, value: Any, scale: float, window: int, causal: bool) -> Any:
    try:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=causal, local_window_size=(window - 1, 0) if window else None, implementation="cudnn")
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise MissingPackageError(f"attention cannot be computed by cuDNN: {error}\nTry: pip install nvidia-cudnn-cu13 jax-cuda13-plugin, with libcudnn.so.9 on LD_LIBRARY_PATH") from error


def _mask(queries: int, keys: int, window: int, causal: bool) -> Any:
    # Imported where it is used: Pallas takes long to load, and few programs are for TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = queries, keys
    if window:
        return splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    return splash.CausalMask(shape) if causal else splash.FullMask(shape)


def _splash(query: Any, key: Any, value: Any, documents: tuple[Any, Any] | None, scores: Scores, mask: Any, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, columns = (next(size for size in BLOCKS if length % size == 0) for length in mask.shape)
    sizes = splash.BlockSizes(block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns)
    masks = splash.MultiHeadMask([mask] * query.shape[2])
    kernel: Any = splash.make_splash_mha(masks, head_shards=1, q_seq_shards=1, block_sizes=sizes, attn_logits_soft_cap=scores.softcap or None, interpret=interpret)
    scaled = (query.astype(jnp.float32) * scores.scale).astype(query.dtype)  # the kernel does not scale
    arrays = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    segments = None if documents is None else splash.SegmentIds(*documents)
    found: Any = jax.vmap(kernel)(*arrays, segments)
    return jnp.swapaxes(found, 1, 2).astype(value.dtype)
