"""Predictions of published inference runs, of sources that nothing was fitted to.

    python -m benchmarks published_serving [--fit] [--out]

Every model is traced as a user's would be (`shardlib.serve.frontend.traced_served`), and every
row of `published/inference_rows.yaml` is priced by the prices of serving plans
(`shardlib.serve.cost`). Leave one source out: the constants are fitted to the rows of the other
sources, each source with the same weight, and the rows left out are priced with those. Which terms
a price has was decided with all rows in sight; the constants were not.

Rows of a server that was loaded to its limit do not say how many requests it ran at a time: as many
as fit are assumed, with whole requests reserved, at most 2,048. `--fit` writes the constants that
come with shardlib, fitted to all sources.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import yaml
from scipy.optimize import least_squares

from benchmarks.environment import command_line, table, write
from benchmarks.published.served_models import served
from shardlib.cost.collectives import NO_COST, collective_cost
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, place, topology
from shardlib.serve import cost as learned_constants
from shardlib.serve.cost import Constants, ModelShard, Pricing, StepWork, cuts, split

ROWS = Path(__file__).parent / "published" / "inference_rows.yaml"
_TABLE = table("published_serving")
MACHINES: Mapping[str, str] = _TABLE["machines"]
V4: Mapping[int, str] = _TABLE["v4"]
STORED: Mapping[str, str] = _TABLE["stored"]
#: Where a fit begins, and towards what it is drawn; and between what it stays.
BEGIN: Mapping[str, float] = _TABLE["begin"]
SHARE, WIDE = (0.25, 0.95), (1 / 30, 30.0)
#: A roofline of two constants, for comparison: 55% of the FLOP/s, 75% of the memory's rate, and
#: nothing else.
ROOFLINE = Constants(
    matmul=0.55,
    eight_bit=0.55,
    memory=0.75,
    cache=0.75,
    attention=0.55,
    moved=1e-9,
    latency=1e-9,
    links=1.0,
    layer_s=1e-12,
    step_s=1e-12,
    row_s=1e-12,
)
#: How strongly a constant is drawn to where it began: a change by a factor e counts as a row that is
#: wrong by so much.
DRAWN = 0.15
#: Most requests at a time of a server that was loaded to its limit, and the share of the memory that
#: is left for pages.
MOST, FREE_SHARE = 2048, 0.9


@dataclass(frozen=True)
class Sample:
    """A row, ready to be priced.

    Attributes:
        row: as published.
        machine: that it ran on.
        split: of the model.
        dtype: of matmuls.
        batch: requests at a time.
    """

    row: Mapping[str, Any]
    machine: Topology
    split: ModelShard
    dtype: str
    batch: float

    def pricing(self, constants: Constants) -> Pricing:
        ways = self.split.tensor
        spans = place(MeshShape(tensor=ways), self.machine) if ways > 1 else None
        reduce = collective_cost("all-reduce", spans["tensor"], self.machine) if spans else NO_COST
        return Pricing(
            split=self.split,
            chip=self.machine.chip,
            reduce=reduce,
            constants=constants,
            dtype=self.dtype,
        )

    def seconds(self, constants: Constants) -> tuple[float, float]:
        """(predicted, published) seconds of what was measured."""
        row, found, price = self.row, self.row["measured"], self.pricing(constants)
        prompt, output, batch = row["input_len"], row["output_len"], self.batch
        first = StepWork(prompt=batch * prompt, before=prompt / 2, ended=batch)
        then = StepWork(rows=batch, context=prompt + output / 2)
        if row["phase"] == "prefill":
            known = found.get("latency_s") or found["first_token_latency_ms"] / 1e3
            return float(price.seconds(first)), known
        if "token_latency_ms" in found:
            return float(price.seconds(then)), found["token_latency_ms"] / 1e3
        if row["phase"] == "decode":
            return output * float(price.seconds(then)), found["latency_s"]
        if row["phase"] == "end_to_end":
            whole = price.seconds(first) + (output - 1) * price.seconds(then)
            rate = found.get("output_tokens_per_s_per_chip")
            known = (
                found["latency_s"] if rate is None else (batch * output / (rate * row["num_chips"]))
            )
            return float(whole), known
        mixed = StepWork(
            rows=batch,
            context=prompt + output / 2,
            prompt=batch * prompt / output,
            before=prompt / 2,
            ended=batch / output,
        )
        return float(price.seconds(mixed)), batch / found["output_tokens_per_s"]


def sample(row: Mapping[str, Any]) -> Sample:
    """A row with its machine and its model."""
    chips, word = row["num_chips"], STORED[row["precision"]]
    machine = topology(V4[chips] if row["chip"] == "v4" else MACHINES[row["chip"]])
    model = served(row["model"])
    cache = row.get("kv_cache_dtype") or ("fp8" if row["precision"] == "fp8" else "bf16")
    part = split(
        model,
        cuts(model),
        row["parallel"]["tp"],
        weights=word,
        cache="bf16" if cache == "fp16" else cache,
    )
    batch = row.get("batch") or row.get("max_concurrency")
    if batch is None and row["source"].startswith("trtllm"):
        room = FREE_SHARE * (machine.chip.usable_bytes - part.weights)
        batch = min(MOST, room / (part.kept * (row["input_len"] + row["output_len"])))
    return Sample(
        row=row,
        machine=machine,
        split=part,
        dtype="float8_e4m3fn" if word == "fp8" else "bfloat16",
        batch=float(batch or 64),
    )


def errors(samples: Sequence[Sample], constants: Constants) -> np.ndarray:
    """Logarithms of predicted over published seconds."""
    return np.array([math.log(a / b) for a, b in (one.seconds(constants) for one in samples)])


def fitted(samples: Sequence[Sample]) -> Constants:
    """The constants that fit some rows best, each source with the same weight."""
    names = [one.name for one in fields(Constants)]
    sources = [one.row["source"] for one in samples]
    weight = np.array([1 / math.sqrt(sources.count(one)) for one in sources])
    weight *= math.sqrt(len(samples) / float((weight**2).sum()))
    begin = np.log([BEGIN[name] for name in names])
    shares = {"matmul", "eight_bit", "memory", "cache", "attention", "links"}
    low, high = (
        np.array(
            [
                math.log(SHARE[end]) if name in shares else math.log(BEGIN[name] * WIDE[end])
                for name in names
            ]
        )
        for end in (0, 1)
    )

    def wrong(values: np.ndarray) -> np.ndarray:
        found = Constants(**dict(zip(names, np.exp(values).tolist(), strict=True)))
        drawn = DRAWN * math.sqrt(len(samples) / 50) * (values - begin)
        return np.concatenate([weight * errors(samples, found), drawn])

    solved = least_squares(
        wrong, begin, bounds=(low, high), loss="soft_l1", f_scale=0.2, max_nfev=60
    )
    return Constants(
        **{
            name: float(f"{value:.3g}")
            for name, value in zip(names, np.exp(solved.x).tolist(), strict=True)
        }
    )


def summary(found: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile of how far off predictions are, and the median with its sign."""
    off = np.expm1(np.abs(found))
    return {
        "rows": len(found),
        "median": round(float(np.median(off)), 4),
        "p90": round(float(np.quantile(off, 0.9)), 4),
        "bias": round(float(np.median(found)), 4),
    }


def orders(samples: Sequence[Sample], found: Mapping[str, float]) -> tuple[int, int]:
    """(right, all) pairs of runs that differ in tensor alone, and by more than 10% in tokens a
    second and chip.
    """
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for one in samples:
        if "output_tokens_per_s" in one.row["measured"]:
            same = tuple(one.row[key] for key in ("source", "model", "chip", "input_len"))
            groups.setdefault((*same, one.row["output_len"]), []).append(one)
    right = pairs = 0
    for group in groups.values():
        for a, b in itertools.combinations(group, 2):
            if a.split.tensor == b.split.tensor:
                continue
            known = [
                one.row["measured"]["output_tokens_per_s"] / one.row["num_chips"] for one in (a, b)
            ]
            if abs(math.log(known[0] / known[1])) < math.log(1.1):
                continue
            said = [
                rate * math.exp(-found[one.row["id"]])
                for rate, one in zip(known, (a, b), strict=True)
            ]
            pairs += 1
            right += (known[0] > known[1]) == (said[0] > said[1])
    return right, pairs


def main() -> None:
    parser = command_line(__doc__, "published_serving.json", optional=True)
    parser.add_argument("--fit", action="store_true", help="write the constants of shardlib")
    args = parser.parse_args()
    samples = [sample(row) for row in yaml.safe_load(ROWS.read_text())["rows"]]
    sources = sorted({one.row["source"] for one in samples})
    of = {name: [one for one in samples if one.row["source"] == name] for name in sources}
    begin = Constants(**BEGIN)
    table: dict[str, Any] = {
        "roofline": {name: summary(errors(of[name], ROOFLINE)) for name in sources},
        "roofline_all": summary(errors(samples, ROOFLINE)),
        "unfitted": {name: summary(errors(of[name], begin)) for name in sources},
        "unseen": {},
        "constants_without": {},
    }
    unseen: dict[str, float] = {}
    for name in sources:
        constants = fitted([one for one in samples if one.row["source"] != name])
        found = errors(of[name], constants)
        unseen |= {one.row["id"]: float(e) for one, e in zip(of[name], found, strict=True)}
        table["unseen"][name] = summary(found)
        table["constants_without"][name] = asdict(constants)
    table["unseen_all"] = summary(np.array(list(unseen.values())))
    right, pairs = orders(samples, unseen)
    table["unseen_order_of_tensor"] = {"right": right, "pairs": pairs}
    constants = fitted(samples)
    table["constants"] = asdict(constants)
    table["fitted"] = {name: summary(errors(of[name], constants)) for name in sources}
    table["fitted_all"] = summary(errors(samples, constants))
    print(json.dumps(table, indent=1))
    table["rows"] = [
        {"id": one.row["id"], "unseen_log_error": round(unseen[one.row["id"]], 4)}
        for one in samples
    ]
    if args.fit:
        where = Path(learned_constants.__file__).with_name(learned_constants.FILE)
        source = "python -m benchmarks published_serving --fit"
        where.write_text(
            json.dumps({"source": source, "constants": asdict(constants)}, indent=2) + "\n"
        )
    if args.out:
        write(args.out, {"benchmark": "published_serving", **table})
