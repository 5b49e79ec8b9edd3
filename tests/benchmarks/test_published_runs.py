"""Reading, pricing and summing up a file of published runs, on a small file written here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.cases import GIB, Case, case_of
from benchmarks.published.document import Document, read
from benchmarks.published.machines import compact, topology_of
from benchmarks.published.pricing import Bench, boundless
from benchmarks.published.recompute import Recompute, recompute_of
from benchmarks.published.software import memory_of, software
from benchmarks.published.summary import Result, compare, overall, pairs, summary
from shardlib.cost.framework import framework_profile
from shardlib.layout import Layout, MeshShape
from tests.processes import python

MODEL = {
    "layers": 4,
    "hidden": 512,
    "ffn_hidden": 2048,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 1000,
    "gated_mlp": False,
    "activation": "gelu",
    "tied_embeddings": True,
    "position": "learned",
    "attention": "full",
}
EXPERTS = {
    **MODEL,
    "position": "rope",
    "gated_mlp": True,
    "activation": "silu",
    "tied_embeddings": False,
    "moe": {
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn_hidden": 256,
        "shared_experts": 1,
        "shared_ffn_hidden": 512,
        "first_dense_layers": 0,
        "moe_every": 2,
    },
}
PLAN = {
    "tp": 2,
    "pp": 2,
    "vpp": 1,
    "dp": 4,
    "fsdp": 1,
    "zero_stage": 0,
    "cp": 1,
    "ep": 1,
    "sp": True,
}
ROW: dict[str, Any] = {
    "id": "one",
    "source": "paper",
    "kind": "measured",
    "quality": "A",
    "verified": True,
    "rank_group": "g",
    "model": "small",
    "seq_len": 128,
    "system": "cluster",
    "chip": "a100-80gb",
    "num_chips": 16,
    "num_devices": 16,
    "framework": "Megatron-LM",
    "precision": "fp16",
    "parallel": PLAN,
    "micro_batch_size": 2,
    "global_batch_size": 64,
    "recompute": "full",
    "optimizer": "adam",
    "measured": {"step_time_s": 0.1, "peak_mem_gib": 2.0, "mem_kind": "torch_max_reserved"},
    "derived": {},
}
CHIPS = {
    "a100-80gb": {
        "vendor": "nvidia",
        "peak_bf16_tflops": 312,
        "hbm_gb": 80,
        "hbm_gb_per_s": 2039,
        "scaleup_gb_per_s_per_dir": 300,
    },
    "v100-16gb": {
        "vendor": "nvidia",
        "peak_bf16_tflops": 125,
        "hbm_gb": 16,
        "hbm_gb_per_s": 900,
        "scaleup_gb_per_s_per_dir": 150,
    },
    "tpu-v5e": {
        "vendor": "google",
        "peak_bf16_tflops": 197,
        "hbm_gb": 16,
        "hbm_gb_per_s": 819,
        "torus": "2D",
    },
}
SYSTEMS = {
    "cluster": {
        "chip": "a100-80gb",
        "scaleup_domain_chips": 8,
        "scaleout_gb_per_s_per_chip_per_dir": 25,
    },
    "pod": {"chip": "tpu-v5e"},
}


def document(*rows: dict[str, Any]) -> Document:
    return Document(
        chips=CHIPS, systems=SYSTEMS, models={"small": MODEL, "sparse": EXPERTS}, rows=rows
    )


def row(**changes: Any) -> dict[str, Any]:
    return {**ROW, **changes}


def the_case(**changes: Any) -> Case:
    found = case_of(document(), row(**changes))
    assert isinstance(found, Case), found
    return found


def test_a_row_becomes_pins() -> None:
    case = the_case()
    assert case.pins == {
        "mesh": {"stage": 2, "data": 4, "tensor": 2},
        "zero": 0,
        "remat": "full",
        "microbatches": 8,
        "sequence_parallel": True,
        "schedule": "1f1b",
        "gather": "use",
    }
    assert case.config.vocab_size == 1000
    assert case.config.param_dtype == "float16"
    assert case.config.norm == "layer"
    assert case.peak_bytes == 2 * GIB
    interleaved = the_case(parallel={**PLAN, "vpp": 2, "zero_stage": 1})
    assert interleaved.pins["schedule"] == "interleaved" and interleaved.pins["virtual_stages"] == 2
    assert interleaved.pins["mesh"] == {"stage": 2, "fsdp": 4, "tensor": 2}
    assert interleaved.pins["zero"] == 1


def test_experts_are_folded_over_the_batch_axes() -> None:
    case = the_case(
        model="sparse", parallel={**PLAN, "tp": 1, "pp": 1, "dp": 16, "ep": 8}, precision="bf16"
    )
    assert case.pins["mesh"] == {"data": 2, "expert": 8} and case.pins["experts"] == "dropless"
    assert case.config.experts is not None
    assert (case.config.experts.first_dense, case.config.experts.shared) == (
        2,
        2,
    ), "every second layer is dense; two shared experts of 256"
    assert "of which data has" in str(
        case_of(document(), row(model="sparse", parallel={**PLAN, "ep": 16}))
    )


@pytest.mark.long
def test_alpa_heuristic_is_tensor_parallelism_of_experts_too() -> None:
    plan = {
        **PLAN,
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "fsdp": 4,
        "zero_stage": 3,
        "sp": False,
        "method": "heuristic",
    }
    case = the_case(
        framework="Alpa (intra-op only)",
        model="sparse",
        parallel=plan,
        num_devices=4,
        num_chips=4,
        micro_batch_size=16,
    )
    assert case.pins["mesh"] == {"tensor": 4}
    assert case.pins["zero"] == 0
    assert case.pins["microbatches"] == 1
    assert case.assumed == ("largest dims of weights over all ranks",)
    assert case.software.stack.collected == "apart"
    assert the_case(framework="Alpa").software.stack.collected == "together"
    rules = Bench().plan(case, case.pins, boundless(case.topology)).rules
    for name in ("expert_mlp", "mlp", "kv_heads", "vocab"):
        assert rules.resolve((name,), (512,), MeshShape(tensor=4)).layout == Layout("tensor"), name


@pytest.mark.parametrize(
    ("changes", "why"),
    (
        ({"kind": "analytic"}, "not measured"),
        ({"verified": False}, "not verified"),
        ({"parallel": {"method": "auto"}}, "plan not published"),
        ({"parallel": {**PLAN, "placeholder": True}}, "plan not"),
        ({"global_batch_size": None}, "batch not published"),
        ({"model": "other"}, "no reference model"),
        ({"task": "lora"}, "adapters"),
        ({"measured": {"mfu": 0.5}}, "nothing that is predicted"),
        ({"framework": "another"}, "no stack"),
        ({"micro_batch_size": 256}, "not a whole number"),
        ({"num_devices": 0, "num_chips": 0}, "0 devices"),
    ),
)
def test_rows_that_cannot_be_priced_say_why(changes: dict[str, Any], why: str) -> None:
    if "num_devices" in changes:
        with pytest.raises(ValueError, match="max"):
            topology_of(document(), row(**changes))
        return
    assert why in str(case_of(document(), row(**changes)))


def test_what_a_row_does_not_say_is_assumed_and_listed() -> None:
    case = the_case(micro_batch_size=None, recompute="unknown")
    assert case.assumed == ("micro-batch size", "remat none for 'unknown'")
    assert case.pins["microbatches"] == 16


def test_recomputation_as_rows_name_it() -> None:
    def found(text: str, framework: str = "Megatron-LM") -> Recompute:
        return recompute_of(row(recompute=text, framework=framework))

    assert found("full") == Recompute(remat="full") and found("selective") == Recompute(
        remat="none"
    )
    assert found("selective(op)", "torchtitan").kept == ("query", "value", "context", "gate")
    assert found("selective(layer)", "torchtitan") == Recompute(remat="full", every=2)
    assert found("minimal(save dots)", "MaxText").kept == (
        "query",
        "key",
        "value",
        "out",
        "gate",
        "wide",
        "narrow",
    )
    assert found("offload dli,q,k,v", "MaxText") == Recompute(
        remat="none", offloaded=("layer_input", "query", "key", "value")
    )
    assert found("save dli,context,qkv on device", "MaxText") == Recompute(
        remat="none", kept=("layer_input", "context", "query", "key", "value")
    )
    assert found("unknown", "MaxText") == Recompute(
        remat="full", assumed=("remat full, MaxText's default",)
    )
    assert found("save something else", "MaxText") == Recompute(
        remat="dots", assumed=("remat dots for 'save something else'",)
    )


def test_machines() -> None:
    machine = topology_of(document(), row())
    assert [(tier.kind, tier.shape, tier.bytes_per_s) for tier in machine.tiers] == [
        ("network", (2,), 25e9),
        ("switch", (8,), 300e9),
    ]
    assert machine.chip.name == "a100" and dict(machine.corrections) == dict.fromkeys(
        ("activations", "communication", "compute", "margin", "temporaries"), 1.0
    )
    old = topology_of(document(), row(chip="v100-16gb", num_devices=8, num_chips=8))
    assert old.chip.peak("float16") == 125e12 and old.chip.hbm_bytes == 16e9 and len(old.tiers) == 1
    pod = topology_of(
        document(),
        row(
            system="pod", chip="tpu-v5e", num_devices=512, num_chips=512, slices=2, topology="16x16"
        ),
    )
    assert [(tier.kind, tier.shape, tier.wrap) for tier in pod.tiers] == [
        ("network", (2,), (False,)),
        ("torus", (16, 16), (True, True)),
    ]
    assert compact(64, 3) == (4, 4, 4) and compact(32, 2) == (4, 8) and compact(7, 1) == (7,)


def test_software_of_a_row() -> None:
    plain = software(row(), "nvidia")
    assert plain is not None
    assert plain.stack.name == "megatron-2021"
    assert (plain.param_dtype, plain.state_bytes) == ("float16", 12)
    assert plain.stack.runtime_bytes == 0 and plain.runtime.runtime_bytes > 0
    eight = software(
        row(framework="torchtitan", precision="fp8", optimizer="adamw, bf16 mu"), "nvidia"
    )
    assert eight is not None
    assert eight.stack.matmul_dtype == "float8_e4m3fn"
    assert (eight.param_dtype, eight.state_bytes) == ("float32", 6.0)
    selective = software(row(recompute="selective"), "nvidia")
    assert selective is not None and selective.stack.attention == "rematerialised"
    splash = [
        software(row(framework="MaxText", source=source, model=model), "google")
        for source, model in (
            ("maxtext_v4", "small"),
            ("tpu_recipes_v5p", "small"),
            ("tpu_recipes_v5p", "gemma3-12b"),
        )
    ]
    assert [found.stack.attention_block for found in splash if found] == [512, 2048, 1024]
    narrow = [software(row(precision=p), "nvidia") for p in ("bf16", "fp8-cs", "mxfp8", "nvfp4")]
    assert [run.stack.matmul_dtype for run in narrow if run] == [
        *("", "float8_e4m3fn", "mxfp8", "nvfp4"),
    ]
    assert software(row(precision="fp8?"), "nvidia") is None
    assert software(row(framework=None), "nvidia") is None


def test_releases_and_settings_of_a_framework_have_stacks_of_their_own() -> None:
    def name(**changes: Any) -> str:
        found = software(row(**changes), "nvidia")
        assert found is not None
        return found.stack.name

    assert [
        name(framework=text)
        for text in (
            "NeMo 24.03",
            "NeMo 24.07",
            "NeMo 25.04",
            "Megatron-Bridge 26.04.01",
            "Megatron-Bridge 26.06",
            "Pax 23.10",
            "Pax 24.04",
        )
    ] == [
        "megatron-core-2403",
        "megatron-core-2024",
        "megatron-core",
        "megatron-core",
        "megatron-core-2606",
        "pax-2310",
        "maxtext-gpu",
    ]
    assert [name(framework="torchtitan", compile=compiled) for compiled in (True, None, False)] == [
        "torchtitan",
        "torchtitan",
        "torchtitan-eager",
    ]
    assert name(framework="MaxText", source="maxtext_a3") == "maxtext-gpu-2023"


def test_a_mesh_of_links_has_fewer_of_them_where_fewer_devices_run() -> None:
    systems = {
        **SYSTEMS,
        "cube": {
            "chip": "v100-16gb",
            "scaleup_domain_chips": 8,
            "scaleout_gb_per_s_per_chip_per_dir": 1,
            "note": "hybrid-cube-mesh NVLink",
        },
    }
    machines = [
        topology_of(
            replace(document(), systems=systems),
            row(system="cube", chip="v100-16gb", num_devices=n),
        )
        for n in (1, 2, 8)
    ]
    assert [(m.tiers[0].kind, m.tiers[0].bytes_per_s) for m in machines[1:]] == [
        ("mesh", pytest.approx(150e9 / 7)),
        ("mesh", 150e9),
    ]
    assert machines[0].devices == 1


def test_memory_counts_what_the_measurement_counts() -> None:
    runtime = framework_profile("megatron-core")
    assert memory_of(100.0, runtime, "torch_max_allocated") == 100
    assert memory_of(100.0, runtime, "torch_max_reserved") == 100 * runtime.fragmentation
    assert (
        memory_of(100.0, runtime, "nvidia_smi, GB")
        == 100 * runtime.fragmentation + runtime.runtime_bytes
    )


@pytest.mark.long
def test_cases_are_priced_whether_they_fit_or_not() -> None:
    bench = Bench()
    case = the_case()
    lost = the_case(
        global_batch_size=262144,
        micro_batch_size=65536,
        recompute="none",
        measured={"oom": True},
    )
    found, broken = bench.predict(case), bench.predict(lost)
    assert dict(found.plan.mesh) == {"stage": 2, "data": 4, "tensor": 2}
    assert found.plan.microbatches == 8
    assert found.plan.schedule == "1f1b"
    assert found.fits and not broken.fits and broken.step_s > 100 * found.step_s
    assert found.step_s == found.plan.estimate.step_seconds
    assert found.arrays == found.plan.estimate.device_bytes.peak
    quote = bench.quote(case)
    assert quote.seconds({}) == pytest.approx(found.step_s), "the price without memory is the same"
    assert quote.seconds({"matmul": 0.4}) > quote.seconds({"matmul": 0.8})
    result = compare(case, found)
    assert result.measured_s == 0.1 and result.time_error == pytest.approx(found.step_s / 0.1 - 1)


def result(
    name: str,
    predicted: float,
    measured: float | None,
    *,
    source: str = "s",
    group: str | None = None,
    fits: tuple[bool, bool] = (True, True),
) -> Result:
    return Result(
        id=name,
        source=source,
        group=group,
        predicted_s=predicted,
        measured_s=measured,
        predicted_bytes=1.0,
        measured_bytes=None,
        predicted_fits=fits[0],
        measured_fits=fits[1],
        parts={},
        memory={},
    )


def test_summary() -> None:
    rows = [
        result("a", 1.1, 1.0),
        result("b", 0.8, 1.0),
        result("c", 1.0, 1.0),
        result("d", 9.0, None, fits=(False, False)),
        result("e", 9.0, None, fits=(True, False)),
    ]
    found = summary(rows)
    assert found["step_time_median_error"] == pytest.approx(0.1)
    assert found["step_time_signed_median"] == pytest.approx(0)
    assert found["rows"] == 5
    assert found["step_time_p90_error"] == pytest.approx(0.18)
    assert found["oom_right"] == 0.5
    assert found["fits_right"] == 1
    assert found["memory_median_error"] is None
    other = [result("f", 1.5, 1.0, source="t")]
    both = overall({"s": found, "t": summary(other)}, [*rows, *other])
    assert both["step_time_median_error"] == pytest.approx(0.3), (
        "the mean over sources, not over rows"
    )


def test_pairs_of_competing_plans() -> None:
    rows = [
        result("a", 1.0, 1.0, group="g"),
        result("b", 2.0, 1.5, group="g"),
        result("c", 0.5, 1.505, group="g"),
        result("d", 1.0, 9.0, group="h"),
    ]
    assert pairs(rows) == (
        1,
        2,
    ), "b and c are measured alike; c is predicted faster than a and was slower"


@pytest.mark.long
@pytest.mark.processes
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    rows = [
        row(),
        row(id="two", parallel={**PLAN, "tp": 1, "dp": 8}, measured={"step_time_s": 0.2}),
        row(id="three", kind="analytic"),
    ]
    file.write_text(
        json.dumps(
            {
                "hardware": {"chips": CHIPS, "systems": SYSTEMS},
                "models": {"small": MODEL},
                "rows": rows,
            }
        )
    )
    assert len(read(file).rows) == 3
    run = python("-m", "benchmarks", "published_runs", str(file), "--json")
    found = json.loads(run.stdout)
    assert found["summary"]["rows"] == 2
    assert found["summary"]["counts"]["rank"][1] == 1
    assert found["left_out"] == {"three": "analytic, not measured"}
    assert [one["id"] for one in found["rows"]] == ["one", "two"] and all(
        one["error"] == pytest.approx(one["predicted_s"] / one["measured_s"] - 1)
        for one in found["rows"]
    )
    side_by_side = python(
        "-m", "benchmarks", "published_runs", str(file), "--json", "--processes", "2"
    )
    assert {**json.loads(side_by_side.stdout), "seconds": 0} == {**found, "seconds": 0}
    file.write_text("{}")
    broken = python("-m", "benchmarks", "published_runs", str(file), check=False)
    assert broken.returncode == 1 and "has no hardware, models, rows" in broken.stderr
