"""Configurations that `Plan.emit` writes, as the frameworks' own parsers read them.

Plans of two models are made for every framework that has an emitter, and each configuration is
given to the parser of the framework's own package, of the release that the emitter is for:
Megatron-Core's `argparse` parser, torchtitan's `ConfigManager`, MaxText's `MaxTextConfig` fields,
DeepSpeed's `DeepSpeedConfig`, Levanter's `TrainerConfig` by draccus. The packages are unpacked into
`--peers` (`pip download --no-deps megatron-core==0.19.2 torchtitan==0.2.2 maxtext==0.2.5
deepspeed==0.19.8`, `--pre levanter==1.2.dev1644`), a folder for each; `--python` has what they read
options with (PyYAML, pydantic, tyro, draccus, jmp, numpy, ...), and PyTorch and the like are stand-ins
(`benchmarks/stand_ins.py`): nothing of a framework runs but its parser.

    python -m benchmarks framework_configs --peers PEERS --python PYTHON --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import stand_ins
from benchmarks.environment import command_line, table

_TABLE = table("framework_configs")
#: Packages that parsers import and do not need.
ABSENT = _TABLE["absent"]
#: Jobs: a model, its batch and sequence, and pins by framework beside none.
JOBS: tuple[tuple[str, int, int, str], ...] = _TABLE["jobs"]
PINS: Mapping[str, tuple[Mapping[str, Any], ...]] = _TABLE["pins"]


def megatron_core(source: Path) -> tuple[Callable[[str], Any], list[str]]:
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)

    def read(text: str) -> Any:
        words = [word for line in text.splitlines() if line[0] != "#" for word in line.split()]
        found = vars(parser.parse_args(words))
        return {word[2:]: found[word[2:].replace("-", "_")] for word in words if word[:2] == "--"}

    return read, sorted(word[2:] for word in parser._option_string_actions if word[:2] == "--")


def torchtitan(source: Path) -> tuple[Callable[[str], Any], list[str]]:
    import dataclasses
    import tomllib

    from torchtitan.config.job_config import JobConfig
    from torchtitan.config.manager import ConfigManager

    def read(text: str) -> Any:
        file = Path(os.environ["FRAMEWORK_CONFIG"])
        found = ConfigManager().parse_args([f"--job.config_file={file}"])
        return {
            section: {word: getattr(getattr(found, section), word) for word in words}
            for section, words in tomllib.loads(text).items()
        }

    sections = {
        one.name: type(getattr(JobConfig(), one.name)) for one in dataclasses.fields(JobConfig)
    }
    return read, sorted(
        f"{name}.{one.name}"
        for name, kind in sections.items()
        if dataclasses.is_dataclass(kind)
        for one in dataclasses.fields(kind)
    )


def maxtext(source: Path) -> tuple[Callable[[str], Any], list[str]]:
    import yaml
    from maxtext.configs.types import MaxTextConfig
    from pydantic import TypeAdapter

    fields = MaxTextConfig.model_fields
    base = yaml.safe_load((source / "maxtext/configs/base.yml").read_text())

    def read(text: str) -> Any:
        found = yaml.safe_load(text)
        unknown = [name for name in found if name not in base or name not in fields]
        if [name for name in unknown if name != "base_config"]:
            raise ValueError(f"no options: {unknown}")
        checked = {
            name: TypeAdapter(fields[name].annotation).validate_python(value)
            for name, value in found.items()
            if name in fields
        }
        return {name: getattr(value, "value", value) for name, value in checked.items()}

    return read, sorted(name for name in fields if name in base)


def deepspeed(source: Path) -> tuple[Callable[[str], Any], list[str]]:
    from deepspeed.runtime import config
    from deepspeed.runtime.activation_checkpointing import config as checkpointing
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def read(text: str) -> Any:
        given = json.loads(text)
        ranks = given["train_batch_size"] // (
            given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
        )
        config.dist.get_world_size = lambda: ranks * given.get("sequence_parallel_size", 1)
        config.dist.is_initialized, config.dist.get_rank = (lambda: True), (lambda: 0)
        found = config.DeepSpeedConfig(given)
        checkpoints = checkpointing.DeepSpeedActivationCheckpointingConfig(given)
        return {
            "train_batch_size": found.train_batch_size,
            "train_micro_batch_size_per_gpu": found.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": found.gradient_accumulation_steps,
            "stage": int(found.zero_config.stage),
            "offload_optimizer": str(found.zero_config.offload_optimizer is not None),
            "checkpoints": checkpoints.number_checkpoints,
        }

    return read, sorted(
        [f"zero_optimization.{name}" for name in DeepSpeedZeroConfig.model_fields]
        + [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "sequence_parallel_size",
            *(f"{half}.enabled" for half in ("bf16", "fp16")),
            *(f"activation_checkpointing.{word}" for word in checkpointing.ACT_CHKPT_DEFAULT),
        ]
    )


def levanter(source: Path) -> tuple[Callable[[str], Any], list[str]]:
    import dataclasses

    import draccus
    import yaml
    from levanter.models.llama import LlamaConfig
    from levanter.trainer import TrainerConfig

    fields = {
        **{f"trainer.{one.name}": one for one in dataclasses.fields(TrainerConfig)},
        **{f"model.{one.name}": one for one in dataclasses.fields(LlamaConfig)},
    }

    def read(text: str) -> Any:
        given = yaml.safe_load(text)
        found = draccus.decode(TrainerConfig, given["trainer"])
        unknown = [f"model.{word}" for word in given["model"] if f"model.{word}" not in fields]
        if unknown:
            raise ValueError(f"no options: {unknown}")
        values = {word: getattr(found, word) for word in given["trainer"]}
        return {word: str(value) if word == "mp" else value for word, value in values.items()}

    return read, sorted(fields)


PEERS = {
    peer.__name__.replace("_", "-"): peer
    for peer in (megatron_core, torchtitan, maxtext, deepspeed, levanter)
}


def checked(name: str, source: Path, files: list[Path]) -> dict[str, Any]:
    """What the parser of a framework reads of files, and all words that it knows."""

    sys.path.insert(0, str(source))
    stand_ins.install(*ABSENT)
    read, words = PEERS[name](source)
    found: dict[str, Any] = {"words": words, "read": {}}
    for file in files:
        os.environ["FRAMEWORK_CONFIG"] = str(file)
        try:
            found["read"][file.stem] = read(file.read_text())
        except (Exception, SystemExit) as error:
            found["read"][file.stem] = f"{type(error).__name__}: {error}"
    return found


def written(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Writes the configurations, and says of which plans."""
    from shardlib.cli.inputs import inputs_of
    from shardlib.errors import PinError
    from shardlib.frontend.model import read_and_trace
    from shardlib.machines.topology import topology
    from shardlib.planner.search import search, workload_for_framework

    plans: dict[str, list[dict[str, Any]]] = {}
    for model, batch, seq, where in JOBS:
        given = inputs_of(model, batch, seq)
        problem = read_and_trace(
            *(given[word] for word in ("init", "loss", "optimizer", "batch", "batch_axes", "name"))
        ).traced.problem
        for name, pinned in PINS.items():
            load = workload_for_framework(name, problem, topology(where))
            for number, pins in enumerate(pinned):
                try:
                    plan = search(load.problem, where, pins, workload=load)
                except (PinError, ValueError) as error:  # pins of the other model
                    print(f"{model} {name} {pins}: {str(error).splitlines()[0]}")
                    continue
                stem = f"{name}-{model}-{number}"
                (folder / f"{stem}.txt").write_text(plan.emit())
                plans.setdefault(name, []).append(
                    {"file": stem, "mesh": dict(plan.mesh), "pins": dict(pins), "text": plan.emit()}
                )
    return plans


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="a folder for each package")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="NAME=PYTHON or one")
    parser.add_argument("--out", type=Path, help="store what was read")
    parser.add_argument("--check", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        name, folder = options.check
        files = sorted(Path(folder).glob(f"{name}-*.txt"))
        print("FOUND " + json.dumps(checked(name, options.peers / name, files), default=str))
        return
    import tempfile

    from shardlib.frameworks import frameworks

    pythons = dict(one.rsplit("=", 1) if "=" in one else ("", one) for one in options.python)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        plans = written(Path(place))
        for name, made in plans.items():
            python = pythons.get(name, pythons.get("", sys.executable))
            words = ["--peers", options.peers, "--check", name, place]
            run = subprocess.run(
                [python, "-m", "benchmarks", "framework_configs", *words],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
            if not lines:
                sys.exit(f"{name}: {run.stderr[-2000:]}")
            found = json.loads(lines[-1].removeprefix("FOUND "))
            for one in made:
                one["read"] = found["read"][one.pop("file")]
            failed = [one for one in made if isinstance(one["read"], str)]
            print(f"{name}: {len(made) - len(failed)} of {len(made)} configurations read")
            for one in failed:
                print(f"  {one['pins']}: {one['read'][:300]}")
            result[name] = {
                "release": frameworks()[name].release,
                "words": found["words"],
                "configurations": made,
            }
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
