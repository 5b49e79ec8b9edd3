"""A row of the file as a case: what to plan, on what, with which decisions fixed, and what was
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published.document import Document, Entry
from benchmarks.published.experts import spread_of
from benchmarks.published.machines import topology_of
from benchmarks.published.models import configuration
from benchmarks.published.recompute import recompute_of
from benchmarks.published.software import Software, software
from shardlib.errors import ShardlibError
from shardlib.machines.topology import Topology
from shardlib.models.config import TransformerConfig

GIB = 2**30
#: Starts of the names of frameworks that take the batch of a rank at once unless they are told
#: otherwise; all others accumulate over micro-batches, of one sequence if a row does not say: those
#: are runs of models that fill the memory.
WHOLE_BATCH: tuple[str, ...] = (
    "maxtext",
    "levanter",
    "pathways",
    "internal jax",
    "pax",
    "alpa",
    "torchtitan",
)
#: Sequences of a rank that are taken for one micro-batch by those.
MOST_ASSUMED = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        id, source, group: of the row; runs of one `group` differ in their plan alone.
        config: the model.
        batch, seq: sequences of a step, and their length in tokens.
        topology: the machine.
        pins: the published plan.
        software: what runs it.
        step_s: measured seconds of a step; None where they are not known.
        peak_bytes, peak_kind: measured memory and how; None and "" where it is not known.
        out_of_memory: whether the run did not fit.
        assumed: what the row does not say.
    """

    id: str
    source: str
    group: str | None
    config: TransformerConfig
    batch: int
    seq: int
    topology: Topology
    pins: Mapping[str, Any]
    software: Software
    step_s: float | None
    peak_bytes: float | None
    peak_kind: str
    out_of_memory: bool
    assumed: tuple[str, ...] = ()


def case_of(document: Document, row: Entry) -> Case | str:
    """Reads a row; where it cannot be priced, says why."""
    why = _unusable(document, row)
    if why:
        return why
    row, likened = as_known(row)
    name = str(row.get("chip") or document.systems[row["system"]]["chip"])
    how = software(row, document.chips[name]["vendor"])
    if how is None:
        return f"no stack for {row.get('framework')} in {row['precision']}"
    found = _pins(row, document.models[row["model"]])
    if isinstance(found, str):
        return found
    pins, assumed = found
    measured = row["measured"]
    try:
        config, machine = (
            configuration(row["model"], document.models[row["model"]], row, how.param_dtype),
            topology_of(document, row),
        )
    except (ShardlibError, ValueError) as error:
        return str(error).splitlines()[0]
    step = measured.get("step_time_s") or row.get("derived", {}).get("step_time_s")
    noisy = "anomalous" in str(row.get("notes"))
    peak = measured.get("peak_mem_gib")
    return Case(
        id=row["id"],
        source=row["source"],
        group=row.get("rank_group"),
        config=config,
        batch=row["global_batch_size"],
        seq=row["seq_len"],
        topology=machine,
        pins=pins,
        software=how,
        step_s=None if noisy else step,
        peak_bytes=peak and peak * GIB,
        peak_kind=measured.get("mem_kind") or "",
        out_of_memory=bool(measured.get("oom")),
        assumed=likened + assumed,
    )


def as_known(row: Entry) -> tuple[Entry, tuple[str, ...]]:
    """The row as one of `framework_like`, the nearest framework that has a profile, where it names
    one; and what is assumed by that.
    """
    like = row.get("framework_like")
    if not like or like == row.get("framework"):
        return row, ()
    return {**row, "framework": like}, (f"{row.get('framework')} as {like}",)


def _unusable(document: Document, row: Entry) -> str:
    """Why a row is not a measured run of a known plan; empty where it is."""
    plan, measured = row["parallel"], row["measured"]
    if row["kind"] != "measured":
        return f"{row['kind']}, not measured"
    if not row.get("verified", True):
        return "not verified"
    if plan.get("placeholder") or "tp" not in plan:
        return "plan not published"
    if row.get("global_batch_size") is None:
        return "batch not published"
    if (
        row["model"] not in document.models
        or document.models[row["model"]].get("exotic")
        or document.models[row["model"]].get("parallel_layers")
    ):
        return "no reference model of this kind"
    if row.get("task") == "lora" or "LoRA" in str(row.get("notes")):
        return "trains adapters alone"
    if not (
        measured.get("step_time_s")
        or row.get("derived", {}).get("step_time_s")
        or measured.get("peak_mem_gib")
        or measured.get("oom")
    ):
        return "nothing that is predicted was measured"
    return ""


def _pins(row: Entry, model: Entry) -> tuple[Mapping[str, Any], tuple[str, ...]] | str:
    """The published plan in the words of pins, with what is assumed; or why it has none.

    Alpa's heuristic cuts the largest dim of every weight (alpa-projects/alpa
    benchmark/alpa/exp_intra_ablation.py, "shard-largest"), which are those of heads, the hidden
    width of feed-forward layers, that of every expert too, and the vocabulary: tensor parallelism
    over all ranks.
    """
    plan = {
        word: int(row["parallel"].get(word) or 1)
        for word in ("tp", "pp", "vpp", "dp", "fsdp", "cp", "ep")
    }
    zero = int(row["parallel"].get("zero_stage") or 0)
    if "ZeRO-1" in str(row.get("optimizer")) or "distributed optimizer" in str(
        row.get("optimizer")
    ):
        zero = max(zero, 1)
    assumed: list[str] = []
    batch, ranks = int(row["global_batch_size"]), plan["dp"] * plan["fsdp"]
    micro = row.get("micro_batch_size") or (
        batch / ranks / row["num_microbatches"] if row.get("num_microbatches") else None
    )
    if micro is None:
        micro = (
            batch / ranks
            if plan["pp"] == 1 and str(row.get("framework")).lower().startswith(WHOLE_BATCH)
            else 1
        )
        assumed.append("micro-batch size")
        if micro > MOST_ASSUMED:
            return "micro-batch size not published"
    count = round(batch / (micro * ranks))
    if count < 1:
        return (
            f"a batch of {batch} is not a whole number of micro-batches of {micro} on {ranks} ranks"
        )
    data, fsdp = plan["dp"], plan["fsdp"]
    if zero in (1, 2) and fsdp == 1:
        group = int(row.get("zero_group") or data)
        if data % group:
            return f"optimizer state over {group} ranks, of which data has {data}"
        data, fsdp = data // group, group
    heuristic = row["parallel"].get("method") == "heuristic"
    if heuristic:
        data, fsdp, plan["tp"], zero = 1, 1, plan["tp"] * ranks, 0
        assumed.append("largest dims of weights over all ranks")
    try:
        where = spread_of(row, bool(model.get("moe")), plan, data, fsdp)
    except ValueError as error:
        return str(error)
    data, fsdp, expert = where.data, where.fsdp, where.expert
    assumed += where.assumed
    mesh = {
        axis: size
        for axis, size in (
            ("stage", plan["pp"]),
            ("data", data),
            ("fsdp", fsdp),
            ("expert", expert),
            ("context", plan["cp"]),
            ("tensor", plan["tp"]),
        )
        if size > 1
    }
    spread = fsdp * expert * plan["cp"] > 1  # what ZeRO cuts, it cuts over all of these
    recompute = recompute_of(row)
    assumed += recompute.assumed
    pins: dict[str, Any] = {
        "mesh": mesh or {"data": 1},
        "zero": zero if spread else 0,
        "remat": recompute.remat,
        "microbatches": count,
    }
    if plan["tp"] > 1:
        pins["sequence_parallel"] = bool(row["parallel"].get("sp"))
    if model.get("moe"):
        pins["experts"] = "dropless"
        if where.cut:
            pins["rules"] = {"expert_mlp": "tensor"}
    if recompute.every > 1:
        pins["remat_layers"] = int(model["layers"]) // recompute.every
    if plan["pp"] > 1:
        pins |= {
            "gather": "use",
            **(
                {"schedule": "interleaved", "virtual_stages": plan["vpp"]}
                if plan["vpp"] > 1
                else {"schedule": "1f1b"}
            ),
        }
    return pins, tuple(assumed)
