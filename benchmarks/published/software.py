"""The software of a row as a `FrameworkProfile`: what its framework does, and what the row itself says of the
optimizer.

What is at rest follows from mixed precision as the frameworks do it: weights in half precision with
master weights in the optimizer (Megatron), or weights in float32 that are cast when they are
gathered (PyTorch FSDP, MaxText).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.environment import table
from benchmarks.published.document import Entry
from benchmarks.published.experts import over_tensor
from benchmarks.published.recompute import recompute_of
from shardlib.cost.framework import FrameworkProfile, framework_profile

_TABLE = table("published_software")
#: Start of a framework's name -> its stack; the first that fits.
STACKS: tuple[tuple[str, str], ...] = _TABLE["stacks"]
#: Sources whose runs of MaxText on GPUs are of 2023 (AI-Hypercomputer/maxtext MaxText/configs/a3,
#: first added in 2023).
OF_2023: frozenset[str] = frozenset({"maxtext_a3"})
#: The larger side of the blocks of splash attention's backward kernel in Google's recipes, and that
#: of models whose layers have windows (AI-Hypercomputer/tpu-recipes training/*/run_recipe.sh,
#: sa_block_q_dkv and sa_block_kv_dkv: 2048; Gemma's blocks forward and in local layers: 1024).
#: Under a causal mask blocks of r x c cost what squares of the larger of both do, where one divides
#: the other.
RECIPE_BLOCK, WINDOW_BLOCK = 2048, 1024
#: Stacks that keep weights in float32 and cast them when they are gathered.
FULL_PRECISION: frozenset[str] = frozenset(_TABLE["full precision"])
#: What MegaScale added to Megatron-LM, in the order of its table 3 (arXiv:2402.15627); a run has
#: everything up to its own entry.
MEGASCALE: tuple[str, ...] = _TABLE["megascale"]
#: Share of the collectives over tensor that hides under the matmuls beside them, where a matmul is
#: split into pieces for it: four fifths for Transformer Engine, whose kernels overlap (pieces of
#: eight or four devices, assumed); half for PyTorch's asynchronous tensor parallelism, which
#: decomposes them (assumed).
SPLIT_OVERLAP, ASYNC_OVERLAP = 0.8, 0.5
#: Start of a precision -> the format of its matmuls.
FORMATS: Mapping[str, str] = _TABLE["formats"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """What runs a row.

    Attributes:
        stack: what it does; memory of the runtime is left out, since rows measure it or not
            (`memory_of`).
        runtime: the stack as it comes, with the memory of its runtime.
        param_dtype: dtype of weights at rest.
        state_bytes: bytes of optimizer state and master weights of an element of a parameter.
    """

    stack: FrameworkProfile
    runtime: FrameworkProfile
    param_dtype: str
    state_bytes: float


def software(row: Entry, vendor: str) -> Software | None:
    """The software of a row; None where its framework is unknown or its precision is a guess."""
    name = _stack_name(row, vendor)
    if name is None or row["precision"].endswith("?"):
        return None
    known = framework_profile(name)
    facts: dict[str, Any] = {}
    narrow = [dtype for start, dtype in FORMATS.items() if row["precision"].startswith(start)]
    if narrow and not known.matmul_dtype:
        facts |= {"matmul_dtype": narrow[0]}
    if row.get("fp8_recipe") == "rowwise":
        facts |= {"scaling": "rows"}
    if row.get("transformer_engine") is False:
        facts |= {"attention": "traced"}
    if row.get("recompute") == "selective" and known.attention == "traced":
        facts |= {"attention": "rematerialised"}
    if row["parallel"].get("async_tp"):
        facts |= {"tensor_overlap": ASYNC_OVERLAP}
    if name.startswith("megatron-core") and not str(row["framework"]).startswith(
        ("Megatron-LM", "Meta")
    ):
        # Megatron-LM's README on H100: "--overlap-grad-reduce --overlap-param-gather",
        # "--tp-comm-overlap"; its examples and NeMo's recipes for performance reduce gradients in
        # bfloat16
        facts |= {"reduction_dtype": "bfloat16"}
        if row["parallel"].get("sp"):
            # megatron/training/arguments.py: "Tensor parallel communication/GEMM overlap can happen
            # only when sequence parallelism is enabled"
            facts |= {"tensor_overlap": SPLIT_OVERLAP}
    if name.startswith("megatron-core"):
        # megatron/core/transformer/moe/token_dispatcher.py: every rank of tensor dispatches its own
        # part of the sequence, which ranks of expert tensor parallelism gather
        facts |= {"exchange": "ranks" if over_tensor(row) else "gathered"}
    if row["framework"] == "megascale":
        facts |= _megascale(str(row.get("ablation") or MEGASCALE[-1]))
    if name == "maxtext-tpu" and str(row["source"]).startswith("tpu_recipes"):
        facts |= {
            "attention_block": (
                WINDOW_BLOCK if str(row["model"]).startswith("gemma") else RECIPE_BLOCK
            )
        }
    if name.startswith("torchtitan") and not re.search("_20(23|24)", str(row.get("locator"))):
        # Since 2025 torchtitan compiles the loss, too (torchtitan/components/loss.py: float32 lives
        # in registers, logits and their gradient are bfloat16), and embedding and head are sharded
        # on their own (parallelize_llama.py, apply_fsdp).
        facts |= {"logit_bytes": 4.0, "embedding_and_head_gathered": False}
    recompute = recompute_of(row)
    if recompute.kept or recompute.offloaded:
        facts |= {"kept": recompute.kept, "offloaded": recompute.offloaded}
    facts |= _optimizer(str(row.get("optimizer") or "adam"), str(row.get("notes") or ""))
    if name == "alpa":
        facts |= _alpa(row)
    used = replace(known, **facts)
    full = name in FULL_PRECISION
    return Software(
        stack=replace(used, runtime_bytes=0, fragmentation=1.0),
        runtime=used,
        param_dtype="float32" if full else _half(row),
        state_bytes=facts.get(
            "state_bytes", 8.0 if full or used.state_bytes is None else used.state_bytes
        ),
    )


def _half(row: Entry) -> str:
    return "float16" if row["precision"] == "fp16" else "bfloat16"


def _stack_name(row: Entry, vendor: str) -> str | None:
    word = str(row.get("framework") or "").lower()
    found = next((name for start, name in STACKS if word.startswith(start)), None)
    if found == "maxtext":
        return (
            "maxtext-tpu"
            if vendor == "google"
            else "maxtext-gpu-2023"
            if row["source"] in OF_2023
            else "maxtext-gpu"
        )
    if found == "nanotron" and row["source"] == "nanotron_old_bench":
        return "nanotron-2024"
    if found == "torchtitan" and row.get("compile") is False:
        return "torchtitan-eager"
    return (
        "megatron-2021"
        if found == "megatron-flash"
        and row.get("ablation") in MEGASCALE[: MEGASCALE.index("+efficient ops")]
        else found
    )


def _megascale(entry: str) -> Mapping[str, Any]:
    """What hides behind what with everything up to an entry of MegaScale's table 3
    (arXiv:2402.15627, sections 3.1 and 3.2).

    Parallel blocks need one all-reduce a layer and direction where others need two, and the rest of
    it is split into pieces; pieces hide as they do elsewhere.
    """
    step = MEGASCALE.index(entry)
    facts: dict[str, Any] = {}
    if step >= MEGASCALE.index("PTB"):
        facts |= {"tensor_overlap": 0.5}
    if step >= MEGASCALE.index("+TP overlap"):
        facts |= {"tensor_overlap": 1 - 0.5 * (1 - SPLIT_OVERLAP)}
    if step >= MEGASCALE.index("+PP overlap"):
        facts |= {"send_overlap": 0.9}
    if step >= MEGASCALE.index("+DP overlap"):
        facts |= {"gather_overlap": 0.9, "reduce_overlap": 0.9}
    return facts


def _alpa(row: Entry) -> Mapping[str, Any]:
    """What Alpa's own benchmarks say of a row beside its plan.

    Models with experts train with Adafactor, whose moments are vectors, and keep float32 master
    weights (alpa-projects/alpa benchmark/alpa/benchmark_2d_one_case_moe.py,
    benchmark_3d_one_case_moe.py: `optax_adafactor`, `mixed_precision`). Under the heuristic the
    backward pass of a layer is the body of a loop (`remat_using_while`), and nothing joins
    collectives of different loops.
    """
    facts: dict[str, Any] = {"state_bytes": 4.0} if "moe" in str(row["model"]) else {}
    return facts | ({"collected": "apart"} if row["parallel"].get("method") == "heuristic" else {})


def _optimizer(optimizer: str, notes: str) -> Mapping[str, Any]:
    """What a row says of its optimizer.

    Sources: Adam with float32 moments, 8 bytes an element, 12 with master weights
    (arXiv:1910.02054, section 3.1); moments of Adafactor are vectors (arXiv:1804.04235); Muon keeps
    one (kellerjordan.github.io/posts/muon).
    """
    facts: dict[str, Any] = {}
    if "fp16 gradient accumulation" in optimizer:
        facts |= {"gradient_dtype": "float16"}
    if "bf16 mu" in optimizer:
        facts |= {"state_bytes": 6.0}
    if optimizer == "adafactor":
        facts |= {"state_bytes": 0.0}
    if optimizer == "muon":
        facts |= {"state_bytes": 4.0}
    if notes.startswith("PURE"):
        facts |= {"reduction_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    return facts


def memory_of(arrays: float, runtime: FrameworkProfile, kind: str) -> float:
    """Bytes that a measurement of some kind shows where arrays take `arrays` bytes.

    PyTorch's `max_memory_allocated` and XLA's peak count arrays; `max_memory_reserved` counts
    blocks of the caching allocator; nvidia-smi the whole device (docs.pytorch.org, notes on CUDA
    memory management).
    """
    if re.match("nvidia", kind):
        return arrays * runtime.fragmentation + runtime.runtime_bytes
    return arrays * runtime.fragmentation if "reserved" in kind else arrays
