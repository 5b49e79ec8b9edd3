"""MaxText's own cases beside this library: sharding dumps, and programs compiled ahead of time.

    python -m benchmarks maxtext_matrix dumps --maxtext FOLDER
    python -m benchmarks maxtext_matrix compile --maxtext FOLDER --python MAXTEXT/bin/python [--only NAME ...]

FOLDER is a checkout of MaxText; its text is read and never copied. The model of a case is described
by a `TransformerConfig` that `described` makes of MaxText's own settings, or the case is listed with
the reason why no card describes it.

`dumps` reads `tests/utils/sharding_info`, pins the mesh of each dump, and compares the stored
sharding of every parameter, dim by dim: first with the mesh alone pinned, and where a parameter is
sharded over the same axes along another dim, the row says why; then with the rules of the dump
pinned, too.

`compile` takes the options of every test in `tests/unit/train_compile_test.py`, compiles MaxText's
step for its topology in an environment that has MaxText and libtpu (`docs/peers.md` has its pip
line), and the plan of this library for the same model, batch, topology, mesh and recomputation with
the TPU compiler of this environment; what MaxText shards over `fsdp` is ZeRO 3 here. Peak memory,
collective bytes by kind and wire bytes stand side by side, read off both programs by one reader. A
case that was measured already (by its options and by the source that decides what is compiled) is
not compiled again; MaxText's half of it, by its options alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import optax

import shardlib
from benchmarks.compiling import compiled, inputs
from benchmarks.environment import RESULTS, command_line, show, source_digest, stored, table, write
from shardlib import models
from shardlib.layout import STORED_AXES, MeshShape
from shardlib.models.config import Experts, LatentAttention, RopeScaling
from shardlib.planner.layouts import TILE_LANES, TILE_ROWS
from shardlib.verification.hlo import parse
from shardlib.verification.report import totals
from shardlib.verification.traffic import read_traffic

Settings = Mapping[str, Any]
WORKER = Path(__file__).resolve().parent / "peers" / "maxtext_ahead.py"
#: Decoders of MaxText that a `TransformerConfig` describes.
DECODERS = ("llama2", "mistral", "mixtral", "qwen3", "qwen3_moe", "deepseek", "gpt3")
_TABLE = table("maxtext_matrix")
#: MaxText's mesh axes -> this library's. The others shard what no card has.
AXES = _TABLE["axes"]
#: Settings that change the computation of a layer, with the value that leaves it as a card has it.
PLAIN = _TABLE["plain"]
#: Paths of parameters, MaxText's -> this library's; `dense_layers` and `layers` stand before them.
ENDS = _TABLE["ends"]
LAYER = _TABLE["layer"]
#: MaxText splits no head: these are two parameters here, of which the first is compared.
MERGED = _TABLE["merged"]


class NotDescribedError(Exception):
    """No card describes the model; the message lists why."""


def settings_of(maxtext: Path, model: str) -> dict[str, Any]:
    """MaxText's settings of a model by name, without the prefix `base_`; sizes are unscaled."""
    configs = maxtext / "src" / "maxtext" / "configs"
    merged = yaml.safe_load((configs / "base.yml").read_text())
    if model != "default":
        merged |= yaml.safe_load((configs / "models" / f"{model}.yml").read_text())
    return {name.removeprefix("base_"): value for name, value in merged.items()}


def _fields(of: str, settings: Settings) -> dict[str, Any]:
    return {field: settings[name] for field, name in _TABLE[of].items()}


def described(settings: Settings, name: str) -> models.TransformerConfig:
    """The card of a model that MaxText's settings describe; a `NotDescribedError` has every reason
    why there is none.
    """
    block = settings["decoder_block"]
    reasons = [] if block in DECODERS else [f"the decoder block {block}"]
    reasons += [
        f"{key}={settings[key]}"
        for key, plain in PLAIN.items()
        if key in settings and settings[key] not in (plain, None, "", 0, False, 1, [])
    ]
    sparse = settings["num_experts"] > 1
    if sparse and settings.get("mlp_bias"):
        reasons.append("biases of experts")
    if reasons:
        raise NotDescribedError("no card describes " + ", ".join(reasons))
    latent = settings.get("attention_type") == "mla"
    gpt = block == "gpt3"
    return models.TransformerConfig(
        name=name,
        **_fields("card", settings),
        max_seq=max(
            settings.get("trainable_position_size") or 0, settings["max_target_length"], 2048
        ),
        norm="layer" if gpt else "rms",
        norm_epsilon=float(settings["normalization_layer_epsilon"]),
        activation="gelu_tanh" if gpt else "silu",
        gated=not gpt,
        tied=bool(settings["logits_via_embedding"]),
        learned_positions=gpt,
        qkv_bias=gpt,
        out_bias=gpt,
        mlp_bias=gpt,
        rope_theta=float(settings["rope_max_timescale"]),
        rope_scaling=_yarn(settings),
        qk_norm=bool(settings.get("use_qk_norm")),
        experts=_experts(settings) if sparse else None,
        latent=LatentAttention(**_fields("latent", settings)) if latent else None,
    )


def _yarn(settings: Settings) -> RopeScaling | None:
    if settings.get("rope_type") != "yarn" or settings["rope_factor"] == 1:
        return None
    return RopeScaling(
        kind="yarn",
        factor=float(settings["rope_factor"]),
        original_seq=settings["original_max_position_embeddings"],
        low_frequency=float(settings.get("beta_slow", 1)),
        high_frequency=float(settings["beta_fast"]),
        scores_factor=float(settings["mscale"]),
    )


def _experts(settings: Settings) -> Experts:
    groups = settings.get("n_routing_groups", -1)
    return Experts(
        count=settings["num_experts"],
        per_token=settings["num_experts_per_tok"],
        mlp=settings["moe_mlp_dim"],
        shared=settings.get("shared_experts") or 0,
        first_dense=settings.get("first_num_dense_layers") or 0,
        router="sigmoid" if settings.get("routed_score_func") == "sigmoid" else "softmax",
        scaling=float(settings.get("routed_scaling_factor", 1.0)),
        groups=max(groups, 1),
        groups_per_token=max(settings.get("topk_routing_group", -1), 1),
        group_score=2 if groups > 1 else 1,
        bias=bool(settings.get("routed_bias")),
        capacity=0.0 if settings.get("sparse_matmul") else max(settings["capacity_factor"], 0.0),
    )


def mesh_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """MaxText's mesh in this library's axes; sizes of axes that mean the same are multiplied."""
    mesh: dict[str, int] = {}
    for axis, size in sizes.items():
        if size > 1:
            if axis not in AXES:
                raise NotDescribedError(f"the mesh axis {axis}")
            mesh[AXES[axis]] = mesh.get(AXES[axis], 1) * size
    return mesh


@dataclass(frozen=True, kw_only=True)
class Dumped:
    """A parameter of a dump, without its dim of layers.

    Attributes:
        shape: elements per dim.
        names: MaxText's logical axis per dim.
        axes: mesh axes of more than one device that shard each dim, in this library's words.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    axes: tuple[frozenset[str], ...]


def read_dump(folder: Path) -> tuple[dict[str, int], dict[str, Dumped]]:
    """Mesh and parameters, by dotted path, of a dump."""
    named = json.loads((folder / "named_shardings.json").read_text())
    logical = json.loads((folder / "logical_shardings.json").read_text())
    sizes: dict[str, int] = {}
    parameters: dict[str, Dumped] = {}
    for path, entry in named.items():
        if not path.startswith(".params/['params']/"):
            continue
        sizes = entry["mesh"]["shape"]
        names = logical[path]["partition_spec"]
        shape, spec = entry["shape"], entry["partition_spec"]
        kept = [
            dim for dim in range(len(shape)) if dim >= len(names) or "layers" not in str(names[dim])
        ]
        parameters[path.removeprefix(".params/['params']/").replace("']/['", ".").strip("[]'")] = (
            Dumped(
                shape=tuple(shape[dim] for dim in kept),
                names=tuple(names[dim] if dim < len(names) else None for dim in kept),
                axes=tuple(_effective(spec, dim, sizes) for dim in kept),
            )
        )
    return mesh_of(sizes), parameters


def _effective(spec: list[Any], dim: int, sizes: Mapping[str, int]) -> frozenset[str]:
    entry = spec[dim] if dim < len(spec) else None
    axes = [] if entry is None else [entry] if isinstance(entry, str) else entry
    return frozenset(AXES[axis] for axis in axes if sizes[axis] > 1)


def our_path(theirs: str, paths: Mapping[str, Any]) -> str | None:
    """The path of the parameter that plays the role of one of MaxText's."""
    if theirs in ENDS:
        return ENDS[theirs]
    for end, ours in LAYER.items():
        if theirs.endswith("." + end):
            stack = "dense_layers" if ".dense_layers." in theirs else "layers"
            path = f"{stack}.{ours}"
            if path not in paths:  # a norm is named after what follows it
                path = path.replace(".mlp_norm.", ".experts_norm.")
            return path if path in paths else None
    return None


def compare_dump(maxtext: Path, folder: Path) -> dict[str, Any]:
    """A dump beside the plans with its mesh, and with its mesh and rules, pinned."""
    model, machine = folder.parts[-4], folder.parts[-3]
    row: dict[str, Any] = {"model": model, "machine": machine, "rule": folder.name}
    try:
        card = described(settings_of(maxtext, model), model)
        mesh, dumped = read_dump(folder)
    except NotDescribedError as error:
        return row | {"reason": str(error)}
    devices = MeshShape(**mesh).devices
    topology = {"tpu7x-8": "tpu7x:2x2x1", "tpu7x-16": "tpu7x:2x2x2", "v6e-16": "v6e:4x4"}[machine]
    row |= {"mesh": mesh, "topology": topology}
    fixed = {"mesh": mesh, "zero": 3}
    pins = {
        "mesh pinned": fixed,
        "mesh and rules pinned": fixed | {"rules": rules_of(mesh, dumped)},
    }
    for what, pin in pins.items():
        try:
            plan = shardlib.plan(**inputs(card, 12 * devices, 2048), topology=topology, pin=pin)
        except shardlib.ShardlibError as error:
            row[what] = {"error": str(error)}
            continue
        layouts = {layout.path: layout for layout in plan.parameters}
        row[what] = dict(_compared(dumped, layouts, plan.mesh))
        row[what + ": paths of ours that no parameter of MaxText is"] = sorted(
            layouts.keys()
            - {our_path(path, layouts) for path in dumped}
            - {path for path in layouts if path.endswith(("key_rope", "query_rope", ".value"))}
        )
    return row


def rules_of(mesh: Mapping[str, int], dumped: Mapping[str, Dumped]) -> list[list[Any]]:
    """The rules of a dump in this library's logical axes, from what they do to its parameters."""
    batch = [axis for axis in ("data", "fsdp", "expert") if axis in mesh]
    rules: list[list[Any]] = [["batch", batch]]
    dense = next(value for path, value in dumped.items() if path.endswith("mlp.wi_0.kernel"))
    rules.append(["embed", [axis for axis in STORED_AXES if axis in dense.axes[0]]])
    for path, value in dumped.items():
        if path.endswith("MoeBlock_0.wi_0"):
            rules.insert(1, ["expert", [axis for axis in STORED_AXES if axis in value.axes[0]]])
            rules.append(["embed", [axis for axis in STORED_AXES if axis in value.axes[1]]])
        if path.endswith("wkv_b.kernel") and "moe_layers" in path:
            rules.append(["kv_lora", [axis for axis in STORED_AXES if axis in value.axes[0]]])
    return [rule for number, rule in enumerate(rules) if rule[1] and rule not in rules[:number]]


def _compared(
    dumped: Mapping[str, Dumped], layouts: Mapping[str, Any], mesh: MeshShape
) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, theirs in dumped.items():
        ours = our_path(path, layouts)
        if ours is None:
            yield path, {"same": False, "reason": "no parameter here has its role"}
            continue
        layout = layouts[ours]
        stacked = len(layout.shape) - len(theirs.shape)
        axes = tuple(
            frozenset(a for a in layout.rest[dim] if mesh.ways((a,)) > 1)
            for dim in range(stacked, len(layout.shape))
        )
        shape = layout.shape[stacked:]
        row: dict[str, Any] = {
            "path": ours,
            "theirs": [sorted(one) for one in theirs.axes],
            "ours": [sorted(one) for one in axes],
            "same": axes == theirs.axes,
        }
        merged = next((why for end, why in MERGED.items() if path.endswith(end)), None)
        if shape != theirs.shape and merged is None:
            row |= {"same": False, "reason": f"shapes differ: {theirs.shape} and {shape}"}
        elif not row["same"]:
            row["reason"] = _reason(theirs, axes, layout.colours[stacked:], shape, mesh)
        yield path, row


def _reason(
    theirs: Dumped,
    ours: tuple[frozenset[str], ...],
    colours: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: MeshShape,
) -> str:
    """Why a parameter is stored in another way than in the dump."""
    all_theirs, all_ours = frozenset().union(*theirs.axes), frozenset().union(*ours)
    dim = next(dim for dim, axes in enumerate(ours) if axes != theirs.axes[dim])
    if all_theirs != all_ours:
        return (
            f"1/{mesh.ways(tuple(all_ours))} of its bytes per device here, over"
            f" {'·'.join(sorted(all_ours)) or 'nothing'}, and 1/{mesh.ways(tuple(all_theirs))}"
            f" there; dim {dim} is {theirs.names[dim]!r} in MaxText's rules and {colours[dim]!r} here"
        )
    dim = next(dim for dim, axes in enumerate(ours) if axes - theirs.axes[dim])
    other = next(dim for dim, axes in enumerate(theirs.axes) if axes - ours[dim])
    why = "its shards are contiguous"
    if dim > other:
        why = f"dim {other} is sharded in compute already, and a second cut of it would come after"
    elif not _whole(shape, other, mesh.ways(tuple(theirs.axes[other]))):
        why = f"its shards are whole tiles, those of dim {other} are not"
    return f"same axes and bytes, along dim {dim} in place of {other}: {why}"


def _whole(shape: tuple[int, ...], dim: int, ways: int) -> bool:
    """Whether shards of a dim are whole tiles of a TPU's memory."""
    last = len(shape) - 1
    return dim < last - 1 or shape[dim] // ways % (TILE_LANES if dim == last else TILE_ROWS) == 0


def test_cases(maxtext: Path) -> dict[str, dict[str, str]]:
    """Options of MaxText's own ahead-of-time tests, by the name of the test."""
    source = (maxtext / "tests" / "unit" / "train_compile_test.py").read_text()
    cases: dict[str, dict[str, str]] = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        for suffix, values in _parameters(function):
            options = [
                _text(node, values)
                for call in ast.walk(function)
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "train_compile_main"
                for node in getattr(call.args[0], "elts", ())
            ]
            pairs = dict(one.split("=", 1) for one in options if "=" in one)
            pairs.pop("compiled_trainstep_file", None)
            if pairs:
                cases[function.name.removeprefix("test_") + suffix] = pairs
    return cases


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, dict[str, Any]]]:
    defaults = dict(
        zip(
            [argument.arg for argument in function.args.args[::-1]],
            [ast.literal_eval(value) for value in function.args.defaults[::-1]],
            strict=False,
        )
    )
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
            "named_parameters"
        ):
            for node in decorator.args:
                values = ast.literal_eval(node)
                yield "_" + values["testcase_name"], defaults | values
            return
    yield "", defaults


def _text(node: ast.AST, values: Mapping[str, Any]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value or "")
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, values) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return str(values.get(node.value.id, f"{{{node.value.id}}}"))
    return ""


#: MaxText's policies -> ours. Others keep a choice of the projections, which is nearest to `dots`.
POLICIES = {"full": "full", "minimal": "dots", "minimal_with_context": "none", "custom": None}


def theirs(
    python: str, maxtext: Path, options: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """MaxText's program of a case: settings, memory, traffic; or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "program.txt"
        command = [python, str(WORKER), "--source", str(maxtext / "src"), "--text", str(text)]
        command += [f"{name}={value}" for name, value in options.items()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"not compiled after {seconds:.0f} s"}
        facts = [line for line in done.stdout.splitlines() if line.startswith("READY ")]
        if done.returncode or not facts:
            return {"error": (done.stderr.strip().splitlines() or ["no reason"])[-1][:400]}
        printed = program_facts(text.read_text()) if text.exists() else {}
        return json.loads(facts[-1].removeprefix("READY ")) | printed


def program_facts(text: str) -> dict[str, Any]:
    """Collective bytes by kind, and wire bytes, of a compiled program."""
    traffic = read_traffic(text, MeshShape(data=parse(text).partitions))
    return {
        "wire_bytes": sum(part.wire_bytes for part in traffic.found),
        "collective_bytes": _by_kind(totals(traffic.collectives)),
        "unread": list(traffic.problems)[:5],
    }


def _by_kind(sums: Mapping[Any, int]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for key, size in sums.items():
        kinds[key[0]] = kinds.get(key[0], 0) + size
    return dict(sorted(kinds.items()))


def ours(settings: Settings, name: str, seconds: float) -> dict[str, Any]:
    """This library's program of a case, or the reason why there is none."""
    try:
        card = described(settings, name)
        mesh = mesh_of(settings["mesh"])
    except NotDescribedError as error:
        return {"reason": str(error)}
    pin: dict[str, Any] = {"mesh": mesh} | ({"zero": 3} if "fsdp" in mesh else {})
    if settings["shard_optimizer_over_data"]:
        pin = {
            "mesh": {"fsdp" if axis == "data" else axis: n for axis, n in mesh.items()},
            "zero": 1,
        }
    if (policy := POLICIES.get(settings["remat_policy"], "dots")) is not None:
        pin["remat"] = policy
    slices = settings["compile_topology_num_slices"]
    machine = settings["topology"].replace("v5:", "v5p:")  # libtpu has no letter there
    topology = f"{slices}*{machine}" if slices > 1 else machine
    optimizer = (
        optax.contrib.muon(3e-5)
        if settings["opt_type"] == "muon"
        else optax.adamw(3e-5, b2=0.95, weight_decay=0.1)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    started = time.monotonic()
    try:
        sizes = settings["global_batch"], settings["max_target_length"]
        arguments = inputs(card, *sizes, optimizer)
        plan = shardlib.plan(**arguments, topology=topology, pin=pin)
        planning = time.monotonic() - started
    except shardlib.ShardlibError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    made = compiled(arguments, topology, seconds=seconds, plan=plan)
    facts = {
        "topology": topology,
        "pin": pin,
        "decisions": {
            key: plan.decisions[key]
            for key in ("mesh", "zero", "remat", "microbatches", "attention", "experts")
        },
        "plan_seconds": round(planning, 2),
        "predicted_peak_bytes": plan.estimate.device_bytes.peak,
    }
    if isinstance(made, str):
        return facts | {"error": made}
    return facts | {
        "compile_seconds": round(made.compile_seconds, 1),
        "peak_bytes": made.compiled.device_bytes["peak"],
        "wire_bytes": made.compiled.wire_bytes,
        "collective_bytes": _by_kind(totals(made.compiled.collectives)),
        "findings": [str(finding) for finding in made.findings if finding.severity != "info"],
    }


def compile_case(
    name: str, options: Mapping[str, str], made: Settings | None, choices: argparse.Namespace
) -> dict[str, Any]:
    """A case: MaxText's program, which may be `made` already, and ours."""
    seconds = choices.seconds
    row: dict[str, Any] = {"name": name, "options": dict(options), "source": compiled_source()}
    row["maxtext"] = made or theirs(choices.python, choices.maxtext, options, seconds)
    if "settings" in row["maxtext"]:
        row["shardlib"] = ours(row["maxtext"]["settings"], name, seconds)
        if "peak_bytes" in row["shardlib"] and "peak_bytes" in row["maxtext"]:
            row["memory_ratio"] = row["shardlib"]["peak_bytes"] / row["maxtext"]["peak_bytes"]
            if row["maxtext"].get("wire_bytes"):
                row["wire_ratio"] = row["shardlib"]["wire_bytes"] / row["maxtext"]["wire_bytes"]
    return row


def compiled_source() -> str:
    """Digest of the code that decides what is compiled."""
    return source_digest("lowering", "tracing", "models", "annotation", "planner", "cost")


def dumps(options: argparse.Namespace) -> dict[str, Any]:
    """All dumps; the summary counts parameters."""
    root = options.maxtext / "tests" / "utils" / "sharding_info"
    folders = sorted(path.parent for path in root.rglob("named_shardings.json"))
    rows = []
    for folder in folders:
        row = compare_dump(options.maxtext, folder)
        rows.append(row)
        same = {
            what: sum(parameter["same"] for parameter in row[what].values())
            for what in ("mesh pinned", "mesh and rules pinned")
            if "error" not in row.get(what, {"error": ""})
        }
        show(f"{row['model']} {row['machine']} {row['rule']}", row | same, "reason", *same)
    return {"benchmark": "maxtext_dumps", "dumps": rows}


def compile_all(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, or those that are named; the result is written after each."""
    out = RESULTS / "maxtext_matrix.json"
    rows = stored(out, "cases", [])
    by_name = {row["name"]: row for row in rows}
    cases = test_cases(options.maxtext)
    for name in options.only or cases:
        earlier = by_name.get(name, {})
        if earlier.get("options") != cases[name]:
            earlier = {}
        if earlier.get("source") == compiled_source() and not options.again:
            continue
        made = earlier.get("maxtext", {})
        row = compile_case(name, cases[name], made if "peak_bytes" in made else None, options)
        by_name[name] = row
        write(out, {"benchmark": "maxtext_matrix", "cases": list(by_name.values())}, quiet=True)
        show(name, row, "memory_ratio", "wire_ratio")
    return {"benchmark": "maxtext_matrix", "cases": list(by_name.values())}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("dumps", "compile"))
    parser.add_argument("--maxtext", type=Path, required=True, help="a checkout of MaxText")
    parser.add_argument("--python", help="Python of an environment with MaxText and libtpu")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument(
        "--again", action="store_true", help="compile our half of what was compiled before"
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="most for one compilation")
    options = parser.parse_args()
    if options.what == "compile" and not options.python:
        parser.error("compile needs --python")
    result = dumps(options) if options.what == "dumps" else compile_all(options)
    write(RESULTS / f"{result['benchmark']}.json", result)
