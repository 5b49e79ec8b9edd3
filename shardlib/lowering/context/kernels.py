"""Kernels of the vendors for attention of arrays that one device has, in the order of the sequence.

Which one (`shardlib.graph.kernels`) is for the caller to say: a program may be made for machines
that the process does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import LayoutError, MissingPackageError
from shardlib.functions.kernels import LANES, Wanted
from shardlib.graph.kernels import Kind
from shardlib.jax_types import Value
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.mask import ALL_BEFORE, Sight, Tokens
from shardlib.lowering.context.rematerialised import attention

#: The most positions of a block of splash attention; what it holds in a core's own memory grows
#: with it.
BLOCKS = (512, 256, LANES)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes attention on one device.

    Attributes:
        kind: one of `shardlib.graph.kernels`.
        interpret: those of "splash" run as programs of any machine, slowly, for tests.
    """

    kind: Kind = "blocks"
    interpret: bool = False

    def why_not(
        self,
        query: Value,
        key: Value,
        value: Value,
        *,
        scores: Scores,
        sight: Sight = ALL_BEFORE,
        documents: bool = False,
    ) -> str:
        """Why a kernel cannot be used for arrays of these shapes and dtypes; empty where it can.

        Args:
            query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V] of one device, with a
                shape and a dtype; as many queries as keys, or all keys are seen.
        """
        window = sight.window
        return Wanted(
            queries=query.shape[1],
            keys=key.shape[1],
            width=query.shape[3],
            value_width=value.shape[3],
            dtype=query.dtype,
            causal=sight.causal,
            window=(window or 0) if window is None or isinstance(window, int) else None,
            capped=bool(scores.softcap),
            documents=documents,
            biased=sight.offsets is not None,
        ).why_not(self.kind)

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        documents: tuple[Value, ...] | None = None,
        *,
        scores: Scores,
        sight: Sight = ALL_BEFORE,
    ) -> Value:
        """Attention, with gradients, where position i is the i-th; arguments as for `why_not`, and
        documents of queries and keys, [B, Q] and [B, K].

        Returns:
            [B, S, H, V], of the dtype of the values.
        """
        why = self.why_not(
            query,
            key,
            value,
            scores=scores,
            sight=sight,
            documents=documents is not None,
        )
        if why:
            raise LayoutError(
                f"attention cannot be computed by a kernel of kind {self.kind!r}: {why}\nTry:"
                ' Kernels(kind="blocks")'
            )
        if self.kind == "blocks":
            return _blocks(query, key, value, documents, scores, sight)
        window, causal = sight.window, sight.causal
        assert window is None or isinstance(window, int), "kernels know their window"
        if self.kind == "cudnn":
            return _cudnn(query, key, value, scores.scale, window or 0, causal)
        return _splash(
            query,
            key,
            value,
            documents,
            scores,
            _mask(query.shape[1], key.shape[1], window or 0, causal),
            self.interpret,
        )


def _blocks(
    query: Value,
    key: Value,
    value: Value,
    documents: tuple[Value, ...] | None,
    scores: Scores,
    sight: Sight,
) -> Value:
    rows, columns = (
        Tokens(
            position=jnp.arange(array.shape[1], dtype=jnp.int32),
            document=None if documents is None else documents[which],
        )
        for which, array in enumerate((query, key))
    )
    return attention(scores, query, key, value, rows, columns, sight)


def _cudnn(
    query: Value, key: Value, value: Value, scale: float, window: int, causal: bool
) -> Value:
    wide = max(query.shape[3], value.shape[3])
    try:
        result = jax.nn.dot_product_attention(
            *(_widened(array, wide) for array in (query, key, value)),
            scale=scale,
            is_causal=causal,
            local_window_size=(window - 1, 0) if window else None,
            implementation="cudnn",
        )
        return result[..., : value.shape[3]]
    except NotImplementedError as error:
        raise LayoutError(
            f"attention cannot be computed by cuDNN on this GPU: {error}\nTry: pin"
            " attention='blocks'"
        ) from error
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise MissingPackageError(
            f"attention cannot be computed by cuDNN: {error}\nTry: pip install nvidia-cudnn-cu13"
            " jax-cuda13-plugin, with libcudnn.so.9 on LD_LIBRARY_PATH"
        ) from error


def _widened(array: Value, width: int) -> Value:
    """An array [..., width] whose heads are padded with zeros, which add nothing to scores, and
    columns to the result that are cut off.
    """
    more = width - array.shape[3]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, more))) if more else array


def _mask(queries: int, keys: int, window: int, causal: bool) -> Any:
    # Imported where it is used: Pallas takes long to load, and few programs are for TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = queries, keys
    if window:
        return splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    return splash.CausalMask(shape) if causal else splash.FullMask(shape)


def _splash(
    query: Value,
    key: Value,
    value: Value,
    documents: tuple[Value, ...] | None,
    scores: Scores,
    mask: Any,
    interpret: bool,
) -> Value:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, columns = (next(size for size in BLOCKS if length % size == 0) for length in mask.shape)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    masks = splash.MultiHeadMask([mask] * query.shape[2])
    kernel: Any = splash.make_splash_mha(
        masks,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=scores.softcap or None,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * scores.scale).astype(
        query.dtype
    )  # the kernel does not scale
    arrays = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    segments = None if documents is None else splash.SegmentIds(*documents)
    result: Any = jax.vmap(kernel)(*arrays, segments)
    return jnp.swapaxes(result, 1, 2).astype(value.dtype)
