"""`shardlib plan MODEL --serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.numbers import duration
from shardlib.cli.output import echo, quiet_stdout, status, write
from shardlib.errors import ArgumentError, ModelError, PinError, PlanError
from shardlib.untrusted.documents import LIMITS, read_regular


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a server is asked for."""

    serve: Annotated[
        bool, typer.Option("--serve", help="Plan a server of the model, and no training.")
    ] = False
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, help="--serve: tokens of a prompt, on average.")
    ] = 2048
    output: Annotated[
        int, typer.Option("--output", min=1, help="--serve: tokens of an answer, on average.")
    ] = 256
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="--serve: requests a second. [as many as there is room for]"),
    ] = None
    ttft: Annotated[
        str | None,
        typer.Option("--ttft", metavar="500ms", help="--serve: to the first token at most."),
    ] = None
    tpot: Annotated[
        str | None,
        typer.Option("--tpot", metavar="30ms", help="--serve: from token to token at most."),
    ] = None
    objective: Annotated[
        str, typer.Option("--objective", help="--serve: throughput or latency.")
    ] = "throughput"
    weights: Annotated[
        str, typer.Option("--weights", help="--serve: bf16, int8, fp8, or model.")
    ] = "bf16"
    cache: Annotated[
        str, typer.Option("--cache", help="--serve: keys and values, the same words.")
    ] = "bf16"
    curve: Annotated[
        bool,
        typer.Option(
            "--curve", help="--serve: tokens a second against seconds a token, and two meshes."
        ),
    ] = False

    def asked(self, **training: object) -> bool:
        """Whether a server is planned."""
        options = [f"--{name}" for name, value in training.items() if value]
        if self.serve and options:
            raise PlanError(
                f"--serve plans a server, and {', '.join(options)} belong to training\nTry: leave"
                " them out; --prompt and --output say how long requests are"
            )
        if not self.serve:
            serving_options = [
                f"--{name}"
                for name, default in vars(Serving()).items()
                if getattr(self, name) != default
            ]
            if serving_options:
                raise PlanError(
                    f"{', '.join(serving_options)} belong to a server\nTry: --serve beside them"
                )
        return self.serve


def plan_to_serve(
    spec: str,
    topology: str,
    serving: Serving,
    pins: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Plans a server and prints it."""
    from shardlib.hardware import topology as find_topology

    machine, pin = find_topology(topology), _pins(pins)
    limits = {
        name: duration(text, f"--{name}") if text is not None else None
        for name, text in (("ttft", serving.ttft), ("tpot", serving.tpot))
    }
    with quiet_stdout(as_json), status(f"planning a server of {spec} for {topology}"):
        init, forward, name = _model(spec, serving.prompt + serving.output)
        import shardlib

        plan = shardlib.plan_serving(
            init,
            forward,
            topology=machine,
            prompt=serving.prompt,
            output=serving.output,
            rate=serving.rate,
            **limits,
            objective=serving.objective,
            weights=serving.weights,
            cache=serving.cache,
            pin=pin,
            name=name,
        )
    if out is not None:
        write(out, plan.to_json() + "\n")
    from shardlib.planning.serving.serving_plan import to_data
    from shardlib.planning.serving.text import curve, meshes

    data: dict[str, Any] = dict(to_data(plan))
    text = plan.explain()
    if serving.curve:
        points, two = plan.pareto(), plan.two_meshes()
        data["pareto"] = [point.to_json() for point in points]
        data["two_meshes"] = None if two is None else two.to_json()
        text += f"\n{curve(points)}\n\n{meshes(two)}\n"
    echo(json.dumps(data) if as_json else text, nl=as_json)


def explain_serving(file: Path, as_json: bool, *, others: bool) -> bool:
    """Prints a plan of a server; False where the file is none."""
    try:
        text = read_regular(file, LIMITS.bytes).decode(errors="replace")
    except OSError:
        return False  # the reader of plans says what is wrong
    if '"format": "serving-' not in text[:200]:
        return False
    from shardlib.planning.serving.serving_plan import ServingPlan, to_data

    plan = ServingPlan.from_json(text)
    if others:
        raise PlanError(
            f"{file} plans a server, and carries no model\nTry: shardlib plan MODEL --serve --curve"
            " --pin KEY=VALUE"
        )
    echo(json.dumps(to_data(plan)) if as_json else plan.explain(), nl=as_json)
    return True


def _model(spec: str, longest: int) -> tuple[Any, Any, str]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardlib.models import UserModel, build, load
    from shardlib.models.config import TransformerConfig

    loaded = load(spec)
    if isinstance(loaded, UserModel):
        if loaded.forward is None:
            raise ModelError(
                f"{spec} says nothing of its forward pass\nTry: 'forward': lambda model, tokens:"
                " ... beside 'init' and 'loss'"
            )
        return loaded.init, loaded.forward, loaded.name
    if not isinstance(loaded, TransformerConfig):
        raise ModelError(f"{spec} is no decoder, which answers token by token")
    limit = loaded.max_seq
    if longest > limit:
        raise ArgumentError(
            f"prompt and answer have {longest:,} tokens, and {loaded.name} looks at"
            f" {limit:,}\nTry: --prompt {limit - limit // 4} --output {limit // 4}"
        )
    return build(loaded)[0], lambda model, tokens: model(tokens), loaded.name


def _pins(words: list[str]) -> Mapping[str, Any]:
    """KEY=VALUE with whole numbers; "mesh.tensor" is an axis of the mesh."""
    pins: dict[str, Any] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value.lstrip("-").isdigit():
            raise PinError(f"{word!r} is no KEY=NUMBER\nTry: --pin mesh.tensor=8")
        key = {"mesh.tensor": "tensor", "mesh.data": "replicas", "data": "replicas"}.get(key, key)
        if key in pins:
            raise PinError(f"{key!r} is given twice")
        pins[key] = int(value)
    return pins
