"""The plan that is predicted best, among measured plans.

    python -m benchmarks measured_plans [--data FILE.jsonl] [--fit] [--out measured_plans.json]

Prices measured configurations of one cluster (the ultra-scale playbook: Llama-like models under
nanotron on 8 to 512 H100, data x tensor x pipeline x ZeRO x micro batch at one global batch) with
their plan pinned, and compares by group (model, GPUs): error of the step time, rank correlation,
regret (measured time of the plan predicted best over the measured best), whether plans fit.

Constants of the profile `nanotron` are fitted to the groups of `TRAIN`; the others are unseen.
`--fit` fits them again. A line of the data: id, model, gpus, dp, tp, pp, zero, mb (sequences of a
micro batch), ga (microbatches), ran, s (seconds of a step), gb, slow (a run that lost a second a
microbatch to what no plan has: left out of all figures but feasibility).
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.environment import command_line, write
from benchmarks.published.cases import case_of
from benchmarks.published.document import Document
from benchmarks.published.pricing import Bench, Quote
from shardlib.cost.framework import FrameworkProfile
from shardlib.errors import ShardlibError

DATA = Path(__file__).parent / "published" / "ultrascale.jsonl"
SEQUENCE, BATCH = 4096, 256
#: Layers, width, feed-forward width, heads, whether head and embedding are one without stages.
MODELS: Mapping[str, tuple[int, int, int, int, bool]] = {
    "1.34b": (16, 2048, 8192, 32, True),
    "3.57b": (28, 3072, 8192, 32, True),
    "8.86b": (32, 4096, 14336, 32, False),
    "80b": (80, 8192, 28672, 64, False),
}
#: NVLink and one 400 Gbit/s port a GPU (EFA, believed).
SYSTEM = {"chip": "h100-80gb", "chips_per_node": 8, "scaleup_domain_chips": 8}
NETWORK = {"scaleout_gb_per_s_per_chip_per_dir": 50}
CHIP = {"vendor": "nvidia", "peak_bf16_tflops": 989, "scaleup_gb_per_s_per_dir": 450}
#: Groups that constants are fitted to: (models, most GPUs).
TRAIN = ({"1.34b", "8.86b"}, 64)
#: Fitted figures: of the curve `h100.nanotron`, and of the profile; first guess, least, most.
CURVE = {
    "matmul": (0.7, 0.3, 1.0),
    "unfused": (3.0, 1.0, 9.0),
    "fast": (1.0, 0.2, 1.2),
    "slow": (0.6, 0.1, 1.1),
    "ring_step_s": (5e-5, 4e-6, 3e-4),
    "dispatch_s": (7e-5, 1e-5, 4e-4),
}
PROFILE = {"tensor_stall_s": (3e-4, 1e-6, 2e-3), "replicated_overlap": (0.5, 0.01, 1.0)}
#: Bytes under which a failed configuration did not fail for want of memory (an H100 has 80 GB).
SMALL = 45e9
#: Runs of a group that are ranked at the least, and those that a fit draws.
LEAST_RUNS, DRAWN = 8, 150

Row = Mapping[str, Any]


def row_of(run: Row) -> dict[str, Any]:
    """A run as a row of `benchmarks/published_runs.py`."""
    seconds = run.get("s") or 1.0
    return {
        "id": run["id"],
        "source": "ultrascale_playbook",
        "kind": "measured",
        "model": run["model"],
        "seq_len": SEQUENCE,
        "system": "cluster",
        "chip": SYSTEM["chip"],
        "num_chips": run["gpus"],
        "num_devices": run["gpus"],
        "framework": "nanotron",
        "precision": "bf16",
        "parallel": {
            "tp": run["tp"],
            "pp": run["pp"],
            "dp": run["dp"],
            "zero_stage": run["zero"],
            "sp": run["tp"] > 1,
        },
        "micro_batch_size": run["mb"],
        "global_batch_size": BATCH,
        "recompute": "none",
        "optimizer": "adamw",
        "measured": {"step_time_s": seconds},
    }


def document() -> Document:
    """Models and machine of the runs."""
    models = {
        name: {
            "layers": layers,
            "hidden": width,
            "ffn_hidden": wide,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": width // heads,
            "vocab": 131072,
            "gated_mlp": True,
            "activation": "silu",
            "tied_embeddings": tied,
            "position": "rope",
            "attention": "full",
        }
        for name, (layers, width, wide, heads, tied) in MODELS.items()
    }
    return Document(
        chips={SYSTEM["chip"]: CHIP}, systems={"cluster": SYSTEM | NETWORK}, models=models, rows=()
    )


def clean(runs: Sequence[Row]) -> list[Row]:
    """The runs that ran, and not slowly."""
    return [run for run in runs if run["ran"] and not run["slow"]]


def is_train(run: Row) -> bool:
    """Whether constants are fitted to the group of a run."""
    return run["model"] in TRAIN[0] and run["gpus"] <= TRAIN[1]


def quotes(runs: Sequence[Row]) -> list[tuple[Row, Quote]]:
    """The clean runs that ran, with their decisions made."""
    source, bench = document(), Bench()
    return [
        (run, bench.quote(case))
        for run in clean(runs)
        if not isinstance(case := case_of(source, row_of(run)), str)
    ]


def seconds_of(quoted: Sequence[tuple[Row, Quote]], figures: Mapping[str, float]) -> Any:
    """Predicted seconds of runs under figures of the curve and the profile."""
    curve = {name: figures[name] for name in CURVE}
    facts: Any = {name: figures[name] for name in PROFILE}

    def under(profile: FrameworkProfile) -> FrameworkProfile:
        return replace(profile, **facts)

    return np.array(
        [
            replace(quote, load=replace(quote.load, profile=under(quote.load.profile))).seconds(
                dict(quote.topology.efficiency) | curve
            )
            for _, quote in quoted
        ]
    )


def fitted(quoted: Sequence[tuple[Row, Quote]]) -> tuple[dict[str, float], dict[str, float]]:
    """Figures, and the factor of their 95% interval, by robust least squares of log times."""
    bounds = CURVE | PROFILE
    drawn = random.Random(0).sample([each for each in quoted if is_train(each[0])], DRAWN)
    measured = np.array([run["s"] for run, _ in drawn])
    first, least, most = np.log(np.array(list(bounds.values()))).T

    def residuals(point: Any) -> Any:
        figures = dict(zip(bounds, np.exp(point).tolist(), strict=True))
        return np.log(seconds_of(drawn, figures) / measured)

    fit = least_squares(
        residuals,
        first,
        bounds=(least - 1e-6, most + 1e-6),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=0.03,
        max_nfev=12,
    )
    variance = np.linalg.pinv(fit.jac.T @ fit.jac) * 2 * fit.cost / (len(drawn) - len(bounds))
    factors = np.exp(1.96 * np.sqrt(np.diag(variance)))
    return (
        dict(zip(bounds, np.exp(fit.x).tolist(), strict=True)),
        dict(zip(bounds, factors.tolist(), strict=True)),
    )


def figures_of(
    rows: Sequence[Row], predicted: Mapping[str, tuple[float, bool, float]]
) -> dict[str, Any]:
    """Errors, ranks and regret of clean runs."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for run in rows:
        groups[run["model"], run["gpus"]].append(run)
    errors = np.array([abs(predicted[run["id"]][0] / run["s"] - 1) for run in rows])
    table = []
    for (model, gpus), runs in sorted(groups.items()):
        if len(runs) < LEAST_RUNS:
            continue
        times = [predicted[run["id"]][0] for run in runs]
        best = min(run["s"] for run in runs)
        order = sorted(
            (run for run in runs if predicted[run["id"]][1]), key=lambda r: predicted[r["id"]][0]
        )
        table.append(
            {
                "model": model,
                "gpus": gpus,
                "runs": len(runs),
                "spearman": float(spearmanr(times, [run["s"] for run in runs])[0]),
                "regret": order[0]["s"] / best - 1,
                "first_five": min(run["s"] for run in order[:5]) / best - 1,
                "chosen": order[0]["id"],
                "best": min(runs, key=lambda run: run["s"])["id"],
            }
        )
    regrets = [group["regret"] for group in table]
    return {
        "runs": len(rows),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "spearman": float(np.median([group["spearman"] for group in table])),
        "regret": {
            "median": float(np.median(regrets)),
            "mean": float(np.mean(regrets)),
            "worst": max(regrets),
        },
        "first_five_worst": max(group["first_five"] for group in table),
        "groups": table,
    }


def priced(runs: Sequence[Row]) -> dict[str, tuple[float, bool, float]]:
    """Seconds of every configuration, whether it fits, and bytes of its arrays; those that the
    planner refuses do not fit.
    """
    source, bench = document(), Bench()
    prices: dict[str, tuple[float, bool, float]] = {}
    for run in runs:
        case = case_of(source, row_of(run))
        try:
            if isinstance(case, str):
                raise ShardlibError(case)
            prediction = bench.predict(case)
        except ShardlibError:
            prices[run["id"]] = (1e3, False, math.inf)
        else:
            prices[run["id"]] = (prediction.step_s, prediction.fits, prediction.arrays)
    return prices


def feasibility(
    runs: Sequence[Row], prices: Mapping[str, tuple[float, bool, float]]
) -> dict[str, Any]:
    """Of the configurations that are said to fit those that ran, and of those that ran those that
    are said to fit; the former also without failures that need so little that memory was not why.
    """
    fits = [run for run in runs if prices[run["id"]][1]]
    both = sum(run["ran"] for run in fits)
    small = sum(not run["ran"] and prices[run["id"]][2] < SMALL for run in fits)
    ran = sum(run["ran"] for run in runs)
    return {
        "configurations": len(runs),
        "ran": ran,
        "precision": both / len(fits),
        "precision_of_memory": both / (len(fits) - small),
        "recall": both / ran,
    }


def roofline(runs: Sequence[Row]) -> dict[str, float]:
    """Seconds by a roofline of six constants, fitted like the figures above: shares of the peak, of
    HBM, of NVLink and of a NIC, the share of compute behind which gradients hide, fixed seconds.
    """

    def terms(run: Row) -> list[float]:
        layers, width, wide, _, _ = MODELS[run["model"]]
        weights = layers * (4 * width**2 + 3 * width * wide) + 2 * 131072 * width
        tokens = SEQUENCE * BATCH / run["dp"]
        bubble = 1 + (run["pp"] - 1) / run["ga"]
        shards = run["tp"] * run["pp"]
        gradients = 8 * weights / shards * (1 - 1 / run["dp"])
        messages = 16 * layers / run["pp"] * tokens * width * (1 - 1 / run["tp"]) * bubble
        attention = 6 * layers * SEQUENCE * width
        return [
            (6 * weights + attention)
            * tokens
            / shards
            * bubble
            / (CHIP["peak_bf16_tflops"] * 1e12),
            (34 * layers * tokens * width * bubble / shards + 28 * weights / shards) / 3.35e12,
            messages / 450e9 if run["tp"] <= 8 else 0.0,
            messages / 50e9 if run["tp"] > 8 else 0.0,
            gradients / (450e9 if run["gpus"] <= 8 else 50e9 * min(8, run["dp"])),
        ]

    def seconds(rows: Sequence[Row], point: Any) -> Any:
        compute, memory, inside, outside, network = np.array([terms(run) for run in rows]).T
        flops, hbm, fast, slow, hidden, fixed = np.exp(point)
        kernels = compute / flops + memory / hbm
        gradients = np.maximum(network / slow - hidden * kernels, 0.0)
        return kernels + inside / fast + outside / slow + gradients + fixed

    train = clean([run for run in runs if is_train(run)])
    measured = np.array([run["s"] for run in train])
    fit = least_squares(
        lambda point: np.log(seconds(train, point) / measured),
        np.log([0.5, 0.5, 0.7, 0.7, 0.3, 0.1]),
        loss="soft_l1",
        f_scale=0.1,
    )
    return dict(zip([run["id"] for run in runs], seconds(runs, fit.x).tolist(), strict=True))


def main() -> None:
    parser = command_line(__doc__, "measured_plans.json", optional=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    runs = [json.loads(line) for line in args.data.read_text().splitlines()]
    if args.fit:
        figures, factors = fitted(quotes(runs))
        print({name: f"{value:.3g} (x/ {factors[name]:.2f})" for name, value in figures.items()})
        return
    prices = priced(runs)
    train, unseen = ([run for run in runs if is_train(run) is seen] for seen in (True, False))
    simple = {name: (s, prices[name][1], 0.0) for name, s in roofline(runs).items()}
    result = {
        "command": "python -m benchmarks measured_plans --out",
        "fitted": figures_of(clean(train), prices),
        "unseen": figures_of(clean(unseen), prices),
        "roofline": figures_of(clean(unseen), simple),
        "feasibility": {
            "fitted": feasibility(train, prices),
            "unseen": feasibility(unseen, prices),
        },
    }
    print(json.dumps(result, indent=1))
    if args.out:
        write(args.out, result)
