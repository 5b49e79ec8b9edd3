"""The commands of models that answer: `planning` (`plan --serve`), `generating`, `exporting`,
`serve`, `bench`, `edge`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model
from shardlib.cli.inputs import duration, inputs_of, spread
from shardlib.cli.output import echo, quiet_stdout, read_text, writable, write
from shardlib.errors import (
    ArgumentError,
    DataError,
    ModelError,
    PinError,
    PlanError,
)
from shardlib.processes.progress import Progress
from shardlib.report.elements import seconds_text
from shardlib.untrusted.data import LIMITS, JsonObject, read_regular
from shardlib.wings import Extension

if TYPE_CHECKING:
    import jax
    import numpy as np

    from shardlib.machines.topology import Device
    from shardlib.serve.edge import Workers
    from shardlib.serve.edge_plan import EdgePlan
    from shardlib.serve.engine import Engine
    from shardlib.serve.hosting import Companions, Deployment
    from shardlib.serve.http.settings import Settings
    from shardlib.serve.measuring import Job, MeasuredAnswer, Target
    from shardlib.serve.plan import ServingPlan
    from shardlib.serve.requests import Capacity, Request
    from shardlib.serve.served import Served, Text


# --------------------------------------------------------------------------------------------------
# `shardlib bench-serve`.


#: An option of commands that read a run.
Average = Annotated[
    bool,
    typer.Option("--average", help="Of a run, the moving average that `train --average` keeps."),
]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the server that is measured."""

    url: Annotated[
        str | None,
        typer.Option("--url", help="Of a server that runs, e.g. http://127.0.0.1:8000/v1."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Of that server. [the first that it has]")
    ] = None
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that it wants.")
    ] = None
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="MODEL", help="Serve this for as long as it takes."),
    ] = None
    slots: Annotated[int, typer.Option("--slots", help="--serve: requests at a time.")] = 8


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of times: of requests, and limits of their answers."""

    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=1e-6, help="Requests a second, at random, in place of the file's times."
        ),
    ] = None
    together: Annotated[
        int, typer.Option("--together", min=1, help="Requests that are open at most.")
    ] = 1024
    seed: Annotated[int, typer.Option("--seed", help="Of drawn prompts and times.")] = 0
    ttft: Annotated[
        str | None, typer.Option("--ttft", metavar="500ms", help="To the first token at most.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option("--tpot", metavar="30ms", help="From token to token at most.")
    ] = None


@spread
def bench_serve_command(
    workload: Annotated[
        Path,
        typer.Argument(metavar="WORKLOAD", help="JSON: requests with lengths and times."),
    ],
    *,
    server: ServerOptions,
    timing: BenchOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write figures and requests there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server as a stored workload says: latencies, throughput, answers in time."""
    if (server.url is None) == (server.serve is None):
        raise ArgumentError(
            "one of --url and --serve says who is asked\nTry: --url http://127.0.0.1:8000/v1"
        )
    from shardlib.serve.measuring import Target, figures, read_workload

    limits = {
        f"{name}_limit": None if text is None else duration(text, f"--{name}")
        for name, text in (("ttft", timing.ttft), ("tpot", timing.tpot))
    }
    text = read_text(workload, "workload", "a JSON list of requests", DataError)
    jobs = read_workload(text, str(workload), seed=timing.seed, rate=timing.rate)
    token = ""
    if server.token_file is not None:
        from shardlib.serve.http.settings import read_tokens

        token = read_tokens(server.token_file)[0]
    target = Target(
        url=server.url or "", model=server.model or "", token=token, together=timing.together
    )
    with quiet_stdout(as_json):
        seen = _replayed(jobs, target) if server.serve is None else _served(jobs, target, server)
    measured = figures(seen, **limits)
    if out is not None:
        write(
            out, json.dumps(measured | {"seen": [vars(answer) for answer in seen]}, indent=1) + "\n"
        )
    echo(json.dumps(measured) if as_json else told(measured))


def _replayed(jobs: list[Job], target: Target) -> list[MeasuredAnswer]:
    import asyncio

    from shardlib.serve.measuring import replay

    return asyncio.run(replay(jobs, target))


def _served(jobs: list[Job], target: Target, options: ServerOptions) -> list[MeasuredAnswer]:
    """Asks a server of this process."""
    from shardlib.serve.hosting import deploy
    from shardlib.serve.http.app import application, serving
    from shardlib.serve.loading import named
    from shardlib.serve.requests import Capacity

    served = named(options.serve or "")
    longest = max(len(job.prompt) + job.most for job in jobs)
    if longest > served.longest:
        raise ArgumentError(
            f"a request of the workload has {longest} tokens, and {served.name} looks at"
            f" {served.longest}"
        )
    capacity = Capacity(longest=max(longest, 2), slots=options.slots)
    deployed = deploy(served, capacity, waiting=len(jobs))
    with serving(application([deployed])) as url:
        return _replayed(jobs, replace(target, url=f"{url}/v1"))


def told(values: JsonObject) -> str:
    """Figures in words."""
    lines = [
        f"{values['answered']} of {values['requests']} requests answered in"
        f" {values['seconds']:.3g} s ({values['refused']} refused, {values['failed']} failed)",
        f"{values['output_tokens_per_second']:.4g} tokens/s of answers,"
        f" {values['requests_per_second']:.3g} requests/s,"
        f" {values['cached_tokens']:,} tokens of prompts cached",
    ]
    names = {
        "ttft_seconds": "first token",
        "tpot_seconds": "token to token",
        "request_seconds": "whole request",
    }
    for name, words in names.items():
        if (spread := values[name]) is not None:
            parts = (f"{key} {1000 * value:.4g} ms" for key, value in spread.items())
            lines.append(f"{words:<15} {', '.join(parts)}")
    if any(value is not None for value in values["limits"].values()):
        lines.append(f"in time         {100 * values['in_time']:.1f}% of all requests")
    return "\n".join([*lines, *(f"error: {error}" for error in values["errors"])])


# --------------------------------------------------------------------------------------------------
# Models beside the one that is served: one that guesses for it, and adapters.

#: Tokens that are guessed ahead where nobody says how many.
DRAFTS = 4


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Tokens that are guessed ahead, which changes how fast an answer comes, and nothing of it."""

    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Smaller model with the same tokens that guesses ahead. [what followed before]",
        ),
    ] = None
    drafts: Annotated[
        int | None,
        typer.Option(
            "--drafts", min=0, help="Tokens that are guessed ahead. [4 with --draft, 0 without]"
        ),
    ] = None

    @property
    def ahead(self) -> int:
        """Tokens that are guessed ahead."""
        return (DRAFTS if self.draft else 0) if self.drafts is None else self.drafts


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters of the model."""

    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=FOLDER",
            help="Folder of PEFT with an adapter, by the name that requests have for it.",
        ),
    ] = None


def beside(
    word: str, served: Served, guesses: DraftOptions, adapters: Mapping[str, str]
) -> tuple[Served, Companions]:
    """A model with what is served beside it."""
    from shardlib.serve.folders import adapted, is_folder
    from shardlib.serve.hosting import Companions
    from shardlib.serve.loading import named

    draft = None if guesses.draft is None else named(guesses.draft)
    if not adapters:
        return served, Companions(draft=draft)
    if not is_folder(Path(word)):
        raise ArgumentError(
            f"adapters are for folders of Hugging Face, and {word} is none\nTry: shardlib export"
            f" {word} --huggingface FOLDER"
        )
    served, arrays = adapted(served, word, adapters)
    return served, Companions(draft=draft, adapters=arrays)


def folders_of(words: list[str] | None) -> dict[str, str]:
    """Folders of adapters by name."""
    folders: dict[str, str] = {}
    for word in words or []:
        name, _, folder = word.partition("=")
        if not name or not folder or name in folders:
            raise ArgumentError(
                f"--adapter {word} gives no new name and folder\nTry: --adapter legal=FOLDER"
            )
        folders[name] = folder
    return folders


# --------------------------------------------------------------------------------------------------
# `shardlib edge | edge-stage`.


@dataclass(frozen=True, kw_only=True)
class EdgeRunOptions:
    """Options of running a plan."""

    run: Annotated[
        int | None,
        typer.Option("--run", min=1, metavar="N", help="Also run N batches, a process a stage."),
    ] = None
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="DEVICE=HOST:PORT",
            help="Where `shardlib edge-stage` runs on a device. [processes of this machine]",
        ),
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="--at: that all stages know.")
    ] = None
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Stages take as long as planned, at least, for a batch."),
    ] = False
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Where a stage is lost, go on with another cut.")
    ] = False

    def check(self) -> None:
        """Refuses what contradicts itself, before anything is planned."""
        if self.run is None and (self.simulated or self.elastic or self.at):
            raise ArgumentError("--simulated, --elastic and --at are of --run N")
        if bool(self.at) != (self.secret_file is not None):
            raise ArgumentError("--at and --secret-file go together: other hosts know the secret")

    def workers(self) -> Workers | None:
        """Processes on other hosts; None for some of this machine."""
        from shardlib.serve.edge import Workers, read_address, read_secret

        if not self.at or self.secret_file is None:
            return None
        named = [word.partition("=") for word in self.at]
        if wrong := [
            word for word, (_, equals, _) in zip(self.at, named, strict=True) if not equals
        ]:
            raise ArgumentError(f"--at is {wrong[0]!r}\nTry: board=192.168.1.7:7000")
        return Workers(
            addresses=[read_address(place, "--at") for _, _, place in named],
            secret=read_secret(self.secret_file),
            names=[name for name, _, _ in named],
        )


def edge_stage_command(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where; loopback by default.")
    ] = "127.0.0.1:7000",
    *,
    secret_file: Annotated[
        Path,
        typer.Option(
            "--secret-file", help="File with what all stages know, 16 characters or more."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Be a stage of `shardlib edge --run --at`: compute a part of a model for whoever knows the
    secret, until SIGTERM or Ctrl-C.
    """
    from shardlib.serve.edge import listener, read_address, read_secret, serve

    secret = read_secret(secret_file)
    with listener(read_address(listen, "--listen")) as server:
        host, port = server.getsockname()[:2]
        if as_json:
            echo(json.dumps({"host": host, "port": port}))
        else:
            echo(f"a stage listens at {host}:{port}")
        serve(server, secret)


@spread
def edge_command(
    model: Model,
    devices: Annotated[
        Path,
        typer.Option(
            "--devices",
            "-d",
            metavar="FILE.toml",
            help="What there is: [[devices]] with chip, count, memory and link.",
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", "-b", min=1, help="Sequences in a batch that goes through the devices."
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")
    ] = None,
    *,
    running: EdgeRunOptions,
    as_json: AsJson = False,
) -> None:
    """Spread a model's forward pass over a chain of unlike devices, for inference."""
    from shardlib.machines.topology import cluster

    running.check()
    listed = cluster(devices)
    with quiet_stdout(as_json), Progress(f"planning {model} for {devices}"):
        inputs = inputs_of(model, batch, seq)
        import shardlib

        def planned(devices: Sequence[Device]) -> EdgePlan:
            return shardlib.plan_edge(
                inputs["init"],
                inputs["loss"],
                inputs["batch"],
                devices=devices,
                batch_axes=inputs["batch_axes"],
                name=inputs["name"],
            )

        plan = planned(listed)
    if not as_json:
        echo(plan.explain(), nl=False)
    ran = None
    if running.run is not None:
        again = _fewer(listed, planned) if running.elastic else None
        with quiet_stdout(as_json), Progress(f"running {running.run} batches"):
            ran = _ran(plan, inputs, running, again)
    if as_json:
        echo(json.dumps(plan.to_json() | ({"run": ran} if ran else {})))
    elif ran:
        rate = ran["examples_per_s"]
        text = f"{rate:.3g} examples/s" if isinstance(rate, float) else "too few to time"
        echo(f"Ran {ran['batches']} batches: {text}.")
        for device in ran["lost"]:
            echo(f"{device} was lost; the others went on with another cut.")


def _ran(
    plan: EdgePlan,
    inputs: Mapping[str, Any],
    running: EdgeRunOptions,
    again: Callable[[str], EdgePlan] | None,
) -> JsonObject:
    """Runs batches of tokens, all different."""
    import jax
    import numpy as np

    from shardlib.serve.edge import run_edge

    random = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        integral = np.issubdtype(leaf.dtype, np.integer)
        values = random.integers(0, 128, leaf.shape) if integral else random.normal(size=leaf.shape)
        return values.astype(leaf.dtype)

    batches = [jax.tree.map(drawn, inputs["batch"]) for _ in range(running.run or 0)]
    result = run_edge(
        plan,
        inputs["init"],
        inputs["loss"],
        batches,
        workers=running.workers(),
        again=again,
        simulated=running.simulated,
    )
    rate = result.batches_per_s
    return {
        "batches": len(result.results),
        "examples_per_s": None if rate is None else rate * plan.examples,
        "lost": list(result.lost),
    }


def _fewer(
    listed: Sequence[Device], planned: Callable[[Sequence[Device]], EdgePlan]
) -> Callable[[str], EdgePlan]:
    """Plans again without a device that was lost, and without those lost before."""
    left = list(listed)

    def again(lost: str) -> EdgePlan:
        index = next(k for k, device in enumerate(left) if device.name == lost)
        device = left.pop(index)
        if device.count > 1:
            left.insert(index, replace(device, count=device.count - 1))
        return planned(left)

    return again


# --------------------------------------------------------------------------------------------------
# `shardlib export`.


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """Options of the folder that is written."""

    huggingface: Annotated[
        Path | None,
        typer.Option("--huggingface", help="Folder to make, as `transformers` reads them."),
    ] = None
    jax: Annotated[
        Path | None,
        typer.Option("--jax", help="Folder to make, with a program that needs JAX alone."),
    ] = None
    triton: Annotated[
        Path | None, typer.Option("--triton", help="Repository of NVIDIA Triton to add it to.")
    ] = None
    python_path: Annotated[
        list[Path] | None,
        typer.Option("--python-path", help="Folder that Triton's Python finds packages in."),
    ] = None


@spread
def export_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run, or of Hugging Face; a preset or model card; or"
            " package.module:function, whose `outputs` are written.",
        ),
    ],
    into: ExportTarget,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of --huggingface: float32, bfloat16, float16."),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq", min=1, help="Tokens of a row of a language model; 128, or as many as it takes."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Rows that a program takes; any number by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs."""
    from shardlib.processes.machine import cpu_without_accelerators

    cpu_without_accelerators()
    targets = [target for target in (into.huggingface, into.jax, into.triton) if target is not None]
    if len(targets) != 1:
        raise ArgumentError(
            "one folder is made\nTry: --huggingface FOLDER, --jax FOLDER or --triton FOLDER"
        )
    with quiet_stdout(as_json), Progress(f"exporting {model}"):
        if into.huggingface is not None:
            report = _huggingface(model, into.huggingface, dtype)
        elif into.jax is not None:
            report = _jax(model, into.jax, seq, batch)
        else:
            report = _triton(model, into, seq, batch)
    if as_json:
        echo(json.dumps(report))
    else:
        echo(f"wrote {report['model']} to {report['folder']}")


def _loaded(model: str) -> tuple[Served, Path | None]:
    """A model, and the folder that its tokenizer is copied from; None where tokens are bytes."""
    from shardlib.serve.folders import is_folder
    from shardlib.serve.loading import named
    from shardlib.serve.served import ByteText

    served = named(model)
    if served.warning:
        echo(f"warning: {served.warning}", err=True)
    copied = is_folder(Path(model)) and not isinstance(served.text, ByteText)
    return served, Path(model) if copied else None


def _huggingface(model: str, folder: Path, dtype: str | None) -> JsonObject:
    from shardlib.serve.folders import write_folder

    served, source = _loaded(model)
    files = write_folder(served, folder, source=source, dtype=dtype)
    return {"model": served.name, "folder": str(folder), "files": list(files)}


def _jax(model: str, folder: Path, seq: int | None, batch: int | None) -> JsonObject:
    from shardlib.serve.artefacts import named_pass, write_artefact

    artefact = write_artefact(named_pass(model, seq), folder, batch=batch)
    return {
        "model": artefact.name,
        "folder": str(folder),
        "inputs": list(artefact.inputs),
        "outputs": list(artefact.outputs),
    }


def _triton(model: str, into: ExportTarget, seq: int | None, batch: int | None) -> JsonObject:
    from shardlib import models
    from shardlib.models.presets import UserModel
    from shardlib.serve.artefacts import row_length, user_pass
    from shardlib.serve.triton.repository import Repository

    assert into.triton is not None
    repository = Repository(
        folder=into.triton,
        rows=batch or 16,
        python_path=tuple(str(path.resolve()) for path in into.python_path or ()),
    )
    loaded = models.load(model) if ":" in model else None
    if isinstance(loaded, UserModel):
        names = [repository.write_pass(user_pass(loaded, model, seq))]
    else:
        served, source = _loaded(model)
        fixed = served.config is not None and served.config.experts is not None
        names = replace(repository, fixed=fixed).write_language_model(
            served,
            source=source,
            capacity={"longest": min(4096, served.longest)},
            seq=row_length(served, seq),
        )
    return {"model": names[0], "folder": str(into.triton), "models": names}


# --------------------------------------------------------------------------------------------------
# `shardlib generate`.

#: What the adapter is called.
ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of sampling, and of the time that the answer may take."""

    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="0 takes the likeliest; by default what the folder says, 0.8 of a run.",
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Likeliest tokens to choose from; 0: all.")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Probability that the tokens to choose from have."),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="That the answer may take; it ends with what it has then."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of the choices.")] = 0


@spread
def generate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="Folder of a run, as `shardlib train --run` made, or of Hugging Face.",
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that is continued.")],
    most: Annotated[
        int, typer.Option("--most", "-n", min=1, help="Tokens of the answer; bytes, of a run.")
    ] = 200,
    *,
    choosing: SamplingOptions,
    guesses: DraftOptions,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="Folder of PEFT with an adapter of the model.")
    ] = None,
    average: Average = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text with what a run has learned, or with a model of Hugging Face, as it is
    written. A run may still be training; its newest whole checkpoint counts.
    """
    from shardlib.processes.machine import cpu_without_accelerators
    from shardlib.serve.requests import GenerationRequest, Sampling

    options = {name: value for name, value in vars(choosing).items() if value is not None}
    seconds = options.pop("seconds", None)
    sampling = replace(Sampling(temperature=0.8), **options)  # before anything is read
    if not prompt:
        raise ArgumentError("the prompt is empty\nTry: --prompt 'def '")
    cpu_without_accelerators()
    with quiet_stdout(as_json), Progress(f"reading {model}"):
        from shardlib.serve.loading import named
        from shardlib.serve.requests import Capacity

        served = named(model, average=average)
        if served.warning:
            echo(f"warning: {served.warning}", err=True)
        tokens = tuple(served.text.encode(prompt))
        if len(tokens) + most > served.longest:
            raise ArgumentError(
                f"{len(tokens)} tokens of the prompt and {most} of the answer are more than the"
                f" {served.longest} that {served.name} looks at\nTry: a shorter prompt, or a"
                " smaller --most"
            )
        served, others = beside(model, served, guesses, {ADAPTER: adapter} if adapter else {})
        # no more than is needed, but whole blocks of tokens, since a model may want these
        longest = min(served.longest, -(-(len(tokens) + most) // 1024) * 1024)
        sizes = Capacity(
            longest=longest, slots=1, drafts=guesses.ahead, adapters=len(others.adapters)
        )
        engine = served.engine(sizes)
        others.join(engine)
        if seconds is not None:
            engine.warm_up()  # compilation is not part of them
    if served.sampling is not None:
        sampling = replace(served.sampling, **options)
    request = engine.add(
        GenerationRequest(
            prompt=tokens,
            most=most,
            sampling=sampling,
            stop=served.text.ends,
            seconds=seconds,
            adapter=ADAPTER if adapter else "",
        )
    )
    if not as_json:
        _show(engine, request, prompt, served.text)
        return
    while request.ended is None:
        engine.step()
    report = {"model": served.name, "version": served.version, "prompt": prompt}
    echo(
        json.dumps({**report, "text": served.text.decode(request.answer), "tokens": request.answer})
    )


def _show(engine: Engine, request: Request, prompt: str, text: Text) -> None:
    """Prints a prompt, and the answer as it is written."""
    from shardlib.serve.served import Pieces

    pieces = Pieces(text)
    echo(prompt, nl=False)
    while request.ended is None:
        for event in engine.step():
            if event.token is not None:
                echo(pieces.add(event.token), nl=False)
    echo(pieces.end())


# --------------------------------------------------------------------------------------------------
# `shardlib plan MODEL --serve`.


@dataclass(frozen=True, kw_only=True)
class ServingPlanOptions:
    """Options of a plan of a server."""

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
        """Returns whether a server is planned."""
        options = [f"--{name}" for name, value in training.items() if value]
        if self.serve and options:
            raise PlanError(
                f"--serve plans a server, and {', '.join(options)} belong to training\nTry: leave"
                " them out; --prompt and --output say how long requests are"
            )
        if not self.serve:
            serving_options = [
                f"--{name}"
                for name, default in vars(ServingPlanOptions()).items()
                if getattr(self, name) != default
            ]
            if serving_options:
                raise PlanError(
                    f"{', '.join(serving_options)} belong to a server\nTry: --serve beside them"
                )
        return self.serve


#: Options that `shardlib.plan_serving` has by the same names.
WORKLOAD = ("prompt", "output", "rate", "objective", "weights", "cache")


def plan_to_serve(
    spec: str,
    topology: str,
    serving: ServingPlanOptions,
    pins: list[str],
    out: Path | None,
    as_json: bool,
    *,
    training: Mapping[str, object],
) -> bool:
    """Plans a server and prints it; False where a training is planned, of which `training` are
    options.
    """
    if not serving.asked(**training):
        return False
    from shardlib.machines.topology import topology as find_topology

    machine, pin = find_topology(topology), _pins(pins)
    load: dict[str, Any] = {word: getattr(serving, word) for word in WORKLOAD}
    for word in ("ttft", "tpot"):
        text = getattr(serving, word)
        load[word] = None if text is None else duration(text, f"--{word}")
    with quiet_stdout(as_json), Progress(f"planning a server of {spec} for {topology}"):
        init, forward, name = _model(spec, serving.prompt + serving.output)
        import shardlib

        plan = shardlib.plan_serving(init, forward, topology=machine, **load, pin=pin, name=name)
    if out is not None:
        write(out, plan.to_json() + "\n")
    from shardlib.serve.plan import curve, meshes, to_data

    data: dict[str, Any] = dict(to_data(plan))
    text = plan.explain()
    if serving.curve:
        points, two = plan.pareto(), plan.two_meshes()
        data["pareto"] = [point.to_json() for point in points]
        data["two_meshes"] = None if two is None else two.to_json()
        text += f"\n{curve(points)}\n\n{meshes(two)}\n"
    echo(json.dumps(data) if as_json else text, nl=as_json)
    return True


def explain_serving(file: Path, as_json: bool, *, others: bool) -> bool:
    """Prints a plan of a server; False where the file is none."""
    try:
        text = read_regular(file, LIMITS.bytes).decode(errors="replace")
    except OSError:
        return False  # the reader of plans says what is wrong
    if '"format": "serving-' not in text[:200]:
        return False
    from shardlib.serve.plan import ServingPlan, to_data

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
    from shardlib.models import build
    from shardlib.models.config import TransformerConfig
    from shardlib.models.presets import UserModel, load

    loaded = load(spec)
    if isinstance(loaded, UserModel):
        if loaded.forward is None:
            raise ModelError(
                f"{spec} says nothing of its forward pass\nTry: 'forward': lambda model, tokens:"
                " ... beside 'init' and 'loss'"
            )
        return loaded.init, loaded.forward, loaded.name
    if not isinstance(loaded, TransformerConfig):
        raise ModelError(f"{spec} is not a decoder, which answers token by token")
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
            raise PinError(f"{word!r} is not KEY=NUMBER\nTry: --pin mesh.tensor=8")
        key = {"mesh.tensor": "tensor", "mesh.data": "replicas", "data": "replicas"}.get(key, key)
        if key in pins:
            raise PinError(f"{key!r} is given twice")
        pins[key] = int(value)
    return pins


# --------------------------------------------------------------------------------------------------
# How much room a served model has: from options, or from a plan.

#: Tokens of a request at most, unless somebody asks for more.
LONGEST = 4096
#: Options that a plan takes the place of.
BY_PLAN = ("groups", "slots", "page", "pages", "budget", "prefixes")


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """Options of the capacity of each model."""

    topology: Annotated[
        str | None,
        typer.Option(
            "--topology", "-t", help="Devices that share each model; cpu:N simulates N. [one]"
        ),
    ] = None
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of devices, each with its own requests.")
    ] = 1
    longest: Annotated[
        int | None,
        typer.Option("--longest", help="Tokens of prompt and answer. [the model's, at most 4096]"),
    ] = None
    slots: Annotated[int, typer.Option("--slots", help="Requests served at a time.")] = 8
    page: Annotated[int, typer.Option("--page", help="Tokens of a page of the cache.")] = 16
    pages: Annotated[
        int | None, typer.Option("--pages", help="Of the cache. [half of what slots could fill]")
    ] = None
    budget: Annotated[
        int | None, typer.Option("--budget", help="Tokens of a step at most. [64, or --slots]")
    ] = None
    prefixes: Annotated[
        bool, typer.Option("--prefixes/--no-prefixes", help="Share what prompts begin with.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A plan that says how much room there is, in place of such options."""

    plan: Annotated[
        Path | None, typer.Option("--plan", help="As `shardlib plan MODEL --serve --out` wrote it.")
    ] = None
    ttft: Annotated[
        str | None,
        typer.Option("--ttft", metavar="500ms", help="Plan for a first token in this time."),
    ] = None
    tpot: Annotated[
        str | None,
        typer.Option("--tpot", metavar="30ms", help="Plan for a next token in this time."),
    ] = None
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of a usual prompt, for the plan.")
    ] = None
    output: Annotated[
        int | None, typer.Option("--output", min=1, help="Tokens of a usual answer, for the plan.")
    ] = None

    @property
    def wanted(self) -> bool:
        """True if any of these options is set."""
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class ServerSizes:
    """Capacity and devices of a served model.

    Attributes:
        capacity: requests and tokens, of a group.
        tensor: devices that share every layer.
        groups: of so many devices.
        says: the plan behind it, in words; empty where there is none.
    """

    capacity: Capacity
    tensor: int
    groups: int
    says: str = ""


def devices_of(space: CapacityOptions) -> int:
    """Devices that each model has; simulated ones are there afterwards."""
    if space.topology is None:
        if space.groups > 1:
            raise ArgumentError(
                f"--groups {space.groups} shares devices out\nTry: --topology cpu:{space.groups}"
            )
        return 1
    from shardlib.machines.topology import topology as find_topology

    topology = find_topology(space.topology)
    if topology.devices % space.groups:
        raise ArgumentError(
            f"{space.groups} groups do not divide the {topology.devices} devices of {topology.name}"
        )
    if topology.name.startswith("cpu:"):
        from shardlib.processes.machine import simulate_cpu_devices

        simulate_cpu_devices(topology.devices)
    return topology.devices


def sizes_of(
    served: Served, space: CapacityOptions, planned: PlanOptions, devices: int
) -> ServerSizes:
    """Capacity and devices of a model, from options or from a plan."""
    from shardlib.serve.requests import Capacity

    longest = space.longest or min(served.longest, LONGEST)
    if longest > served.longest:
        raise ArgumentError(
            f"--longest {longest} is more than the {served.longest} tokens that {served.name}"
            " looks at"
        )
    if planned.wanted:
        options = [
            f"--{name}"
            for name in BY_PLAN
            if getattr(space, name) != getattr(CapacityOptions(), name)
        ]
        if options:
            raise PlanError(
                f"a plan says what {', '.join(options)} would\nTry: leave {', '.join(options)} out"
            )
        plan = _plan(served, space, planned, longest)
        _require_fit(plan, served)
        return _planned(plan, devices, longest)
    capacity = Capacity(
        longest=longest,
        slots=space.slots,
        page=space.page,
        pages=space.pages,
        budget=space.budget,
        prefixes=space.prefixes,
    )
    return ServerSizes(capacity=capacity, tensor=devices // space.groups, groups=space.groups)


def _require_fit(plan: ServingPlan, served: Served) -> None:
    """Refuses a plan for another model, for longer requests, or for smaller weights than it has."""
    import jax

    from shardlib.annotation.model import read

    model = read(served.init)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((model.params, model.state)))
    if plan.parameters != count:
        raise PlanError(
            f"the plan is for {plan.model}, which has {plan.parameters:,} parameters, and"
            f" {served.name} has {count:,}\nTry: shardlib plan MODEL --serve for the model that is"
            " served, or --ttft and --tpot in place of --plan"
        )
    if plan.workload.tokens > served.longest:
        raise PlanError(
            f"the plan is for requests of {plan.workload.tokens:,} tokens, and {served.name} looks"
            f" at {served.longest:,}\nTry: shardlib plan MODEL --serve with a smaller --prompt and"
            " --output"
        )
    wide = {str(leaf.dtype) for leaf in jax.tree.leaves(model.params) if leaf.dtype.itemsize > 2}
    if wide and "bf16" in (plan.workload.weights, plan.workload.cache):
        raise PlanError(
            f"the plan stores bf16, and {served.name} is {'/'.join(sorted(wide))}, which is served"
            " as it is\nTry: shardlib plan MODEL --serve --weights model --cache model"
        )


def _planned(plan: ServingPlan, devices: int, longest: int) -> ServerSizes:
    from shardlib.serve.requests import Capacity

    choice = plan.choice
    if choice.tensor * choice.replicas > devices:
        raise PlanError(
            f"the plan has {choice.replicas} replicas of {choice.tensor} devices, and there are"
            f" {devices}\nTry: --topology {plan.topology}"
        )
    return ServerSizes(
        capacity=Capacity.of(plan, longest=max(longest, plan.workload.tokens)),
        tensor=choice.tensor,
        groups=choice.replicas,
        says=(
            f"planned: {choice.replicas} x tensor {choice.tensor}, {choice.batch} requests at a"
            f" time on each; first token in {seconds_text(plan.estimate.ttft_seconds)}, next in"
            f" {seconds_text(plan.estimate.tpot_seconds)}"
        ),
    )


def _plan(
    served: Served, space: CapacityOptions, planned: PlanOptions, longest: int
) -> ServingPlan:
    if planned.plan is not None:
        if planned.ttft or planned.tpot:
            raise PlanError("--plan is a plan already\nTry: leave --ttft and --tpot out")
        from shardlib.cli.output import read_text
        from shardlib.serve.plan import ServingPlan

        hint = "shardlib plan MODEL --serve --topology T --out plan.json"
        return ServingPlan.from_json(read_text(planned.plan, "plan", hint, PlanError).decode())
    import shardlib

    output = planned.output or max(1, longest // 4)
    return shardlib.plan_serving(
        served.init,
        served.forward,
        topology=space.topology or "cpu:1",
        prompt=planned.prompt or max(1, longest - output),
        output=output,
        ttft=None if planned.ttft is None else duration(planned.ttft, "--ttft"),
        tpot=None if planned.tpot is None else duration(planned.tpot, "--tpot"),
        weights="model",
        cache="model",
        name=served.name,
    )


# --------------------------------------------------------------------------------------------------
# `shardlib serve`.

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class AddressOptions:
    """Options of the address of the server, and of its clients."""

    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = (
        8000
    )
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File of bearer tokens, one a line; one is asked for."),
    ] = None
    waiting: Annotated[
        int, typer.Option("--waiting", min=0, help="Requests of a model that wait at most.")
    ] = 64
    drain: Annotated[
        str,
        typer.Option(
            "--drain", metavar="60s", help="Time that answers have to end in after SIGTERM."
        ),
    ] = "60s"
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="That an answer may take; it ends with what it has then."),
    ] = None
    refresh: Annotated[
        str,
        typer.Option("--refresh", metavar="10s", help="Time between looks for newer checkpoints."),
    ] = "10s"


@spread
def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help=(
                "Folder of a run of `shardlib train` or of Hugging Face, or a preset or model card"
                " with random weights. [a demonstration, trained for a minute the first time]"
            ),
        ),
    ] = None,
    *,
    place: AddressOptions,
    room: CapacityOptions,
    planned: PlanOptions,
    guesses: DraftOptions,
    adapted: AdapterOptions,
    average: Average = False,
    as_json: AsJson = False,
) -> None:
    """Serve models to any client of OpenAI's interface. A run may still be training: its newest
    checkpoint is served, without dropping a request.
    """
    from shardlib.serve.http import app, settings

    tokens = () if place.token_file is None else settings.read_tokens(place.token_file)
    limits = settings.Settings(
        tokens=tokens,
        waiting=place.waiting,
        drain_seconds=duration(place.drain, "--drain"),
        refresh_seconds=duration(place.refresh, "--refresh"),
        answer_seconds=place.seconds,
    )
    if place.host not in LOOPBACK and not tokens:
        echo(
            f"WARNING: whoever reaches {place.host} may ask; --token-file keeps others out",
            err=True,
        )
    # What is taken is said before anything is made.
    with app.listen(place.host, place.port) as listening:
        with quiet_stdout(as_json), Progress("starting the server"):
            deployed = _deployed(
                models or [], room, planned, (guesses, adapted), limits, average=average
            )
        names = [deployment.name for deployment in deployed]

        def ready() -> None:
            host, port = listening.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if as_json:
                echo(json.dumps({"url": f"{url}/v1", "models": names}))
            else:
                echo(f"{', '.join(names)} at {url}/v1 for clients, at {url} for people")

        app.run(app.application(deployed, limits), limits, listening, ready=ready)


def _deployed(
    models: list[str],
    space: CapacityOptions,
    planned: PlanOptions,
    extra: tuple[DraftOptions, AdapterOptions],
    settings: Settings,
    *,
    average: bool,
) -> list[Deployment]:
    """The models of the command line, each with an engine of its own."""
    from shardlib.processes.machine import cpu_without_accelerators

    cpu_without_accelerators()
    devices = devices_of(space)
    from shardlib.serve.hosting import deploy
    from shardlib.serve.loading import demonstration, named

    def say(text: str) -> None:
        echo(text, err=True)

    guesses, adapters = extra[0], folders_of(extra[1].adapters)
    if adapters and len(models) != 1:
        raise ArgumentError("--adapter is for one model\nTry: shardlib serve FOLDER --adapter ...")
    words = [_split(word) for word in models or [str(demonstration(say))]]
    deployed: list[Deployment] = []
    for name, word in words:
        served = named(word, average=average)
        if any(deployment.name == (name or served.name) for deployment in deployed):
            raise ArgumentError(
                f"two models are called {name or served.name}\nTry: NAME={word}, for another name"
            )
        if served.warning:
            say(f"WARNING: {served.warning}")
        served, others = beside(word, served, guesses, adapters)
        sizes = sizes_of(served, space, planned, devices)
        if sizes.says:
            say(sizes.says)
        say(f"{name or served.name}: compiling" + (f" ({served.version})" * bool(served.version)))
        deployed.append(
            deploy(
                served,
                replace(sizes.capacity, drafts=guesses.ahead),
                name=name,
                tensor=sizes.tensor,
                groups=sizes.groups,
                waiting=settings.waiting,
                buffer=settings.buffer,
                beside=others,
            )
        )
    return deployed


def _split(word: str) -> tuple[str, str]:
    """Name and model of a word; the name is empty where none is given."""
    name, equals, model = word.partition("=")
    if not equals or Path(word).exists() or "/" in name or not name:
        return "", word
    return name, model


COMMANDS: Mapping[str, Callable[..., None]] = {
    "edge": edge_command,
    "edge-stage": edge_stage_command,
    "generate": generate_command,
    "export": export_command,
    "serve": serve_command,
    "bench-serve": bench_serve_command,
}
#: `plan` and `explain` go on with their own work where these return False.
EXTENSIONS: Mapping[str, Extension] = {
    "plan": Extension(
        options=ServingPlanOptions,
        run=plan_to_serve,
        help="Find the best way to spread a model over a topology, or with --serve to answer"
        " requests there.",
    ),
    "explain": Extension(run=explain_serving),
}
