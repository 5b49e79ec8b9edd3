"""Ranks of the experts of a published plan, and whether ranks of tensor cut their width.

`ep` counts the ranks that experts are spread over, and `etp` those of tensor that cut the width of
every expert. Megatron-Core's default is etp = tp (NVIDIA/Megatron-LM megatron/training/arguments.py,
`--expert-tensor-parallel-size`: "Default is to use the same as tensor-model-parallel-size"); MaxText
cuts the same dims of experts as of dense layers (MaxText/configs/base.yml, logical_axis_rules:
mlp over tensor). With etp = 1, ep counts ranks of tensor as well, each of which has a part of the
tokens and all of the width of fewer experts: in pins that is width cut over tensor, of the
same FLOPs and bytes, and `FrameworkProfile.exchange` says what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.published.document import Entry


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Ranks of experts, in mesh axes.

    Attributes:
        data, fsdp, expert: sizes of those axes; expert re-uses ranks of the other two.
        cut: whether tensor cuts the width of every expert.
        assumed: what the row does not say, or what is priced in another way than it was run.
    """

    data: int
    fsdp: int
    expert: int
    cut: bool = False
    assumed: tuple[str, ...] = ()


def spread_of(row: Entry, routed: bool, plan: Mapping[str, int], data: int, fsdp: int) -> Spread:
    """The ranks of the experts of a row."""
    tensor, expert, etp = plan["tp"], plan["ep"], row["parallel"].get("etp")
    assumed: list[str] = []
    if routed and expert == 1 and _shards_experts(row):
        expert = data * fsdp
        assumed.append("experts over all ranks")
    elif routed and tensor > 1:
        if etp not in (None, 1, tensor):
            raise ValueError(f"experts over {etp} of {tensor} ranks of tensor")
        if etp == 1 and expert % tensor:
            raise ValueError(f"experts over {expert} ranks, {tensor} of them of tensor")
        if over_tensor(row):
            expert //= tensor
            assumed += [] if etp else ["experts over ranks of tensor"]
        elif etp is None and row["parallel"].get("method") != "heuristic":
            assumed.append("width of experts over tensor")
    placed = _placed(data, fsdp, expert)
    if placed is None:
        raise ValueError(f"experts over {expert} ranks, of which data has {data * fsdp}")
    return Spread(
        data=placed[0],
        fsdp=placed[1],
        expert=expert,
        cut=routed and tensor > 1,
        assumed=tuple(assumed),
    )


def over_tensor(row: Entry) -> bool:
    """Whether ranks of tensor have different experts: the row says that none of them cuts their
    width, or spreads experts over more ranks than data has.
    """
    plan = row["parallel"]
    tensor, data = int(plan.get("tp") or 1), int(plan.get("dp") or 1) * int(plan.get("fsdp") or 1)
    etp, expert = plan.get("etp"), int(plan.get("ep") or 1)
    return tensor > 1 and (etp == 1 or (etp is None and expert > data and expert % tensor == 0))


def _placed(data: int, fsdp: int, expert: int) -> tuple[int, int] | None:
    """Data and fsdp less the ranks of experts; None where neither has them, nor both together."""
    if data % expert == 0:
        return data // expert, fsdp
    if fsdp % expert == 0:
        return data, fsdp // expert
    if expert % fsdp == 0 and data % (expert // fsdp) == 0:
        return data // (expert // fsdp), 1
    return None


def _shards_experts(row: Entry) -> bool:
    """Whether a plan that says nothing of experts has them over all ranks.

    Alpa's solver shards experts (arXiv:2201.12023, section 8.2); NeMo AutoModel's experts are
    parallel over the ranks of FSDP (NVIDIA-NeMo/Automodel
    nemo_automodel/components/moe/parallelizer.py).
    """
    return (
        row["parallel"].get("method") == "auto_sharding"
        or str(row.get("framework")) == "NeMo AutoModel"
    )
