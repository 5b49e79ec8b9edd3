"""Two processes of two devices that do what a job does beside its steps, on the devices of process
1 alone. Arguments: two, a free port, the folder.

Every process writes what it has come to into `found-NUMBER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib
from shardlib.checkpointing import huggingface
from shardlib.checkpointing.foreign import read_adapter, write_adapter
from shardlib.errors import ShardlibError
from shardlib.lowering.training_program import TrainingProgram
from shardlib.processes.values import whole
from shardlib.serve.engine import Engine
from shardlib.training.callbacks import BestCheckpoint, Samples
from shardlib.training.fit import fit
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation
from tests.checkpointing.test_huggingface import CONFIGS, drawn, program_of
from tests.processes import forked
from tests.training.small import WIDTH, batch_of

NAMES = {"up": "mlp.up_proj"}


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x)


def loss(model: Adapted, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def stack(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (4, WIDTH, WIDTH)) / 4}


def stack_loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
    return jnp.mean((out - batch["y"]) ** 2)


def compiled(devices: Sequence[jax.Device], folder: Path, **pins: Any) -> Any:
    mesh = pins.pop("mesh", {"fsdp": len(devices)})
    staged = "stage" in mesh
    return shardlib.compile(
        shardlib.tree(stack) if staged else Adapted,
        stack_loss if staged else loss,
        optax.adam(1e-2),
        batch_of(0),
        topology=f"cpu:{len(devices)}",
        devices=devices,
        pin={"mesh": mesh, **pins},
        disk=folder / f"disk-{jax.process_index()}",
    )


def paths(devices: Sequence[jax.Device], folder: Path) -> dict[str, Any]:
    """State on disk, a profile, samples and the best checkpoint, a run that goes on, adapters."""
    program = compiled(devices, folder, offload=["disk"])
    texts: list[str] = []

    def sample(program: TrainingProgram, state: Any) -> str:
        texts.append(f"{float(whole(program.module(state).up.kernel[...]).sum()):.4f}")
        return texts[-1]

    for steps in (4, 6):
        run = fit(
            program,
            batch_of,
            steps=steps,
            settings=Settings(
                run=str(folder / "run"),
                save_every=2,
                profile=(2, 1),
                validation=Validation(data=lambda: [batch_of(100), batch_of(101, 5)], every=2),
                callbacks=(Samples(sample), BestCheckpoint()),
            ),
        )
    adapter = folder / f"adapter-{jax.process_index()}"
    write_adapter(adapter, program.module(run.state), NAMES)
    return {
        "resumed": run.resumed,
        "losses": run.losses,
        "validations": [one["validation/loss"] for _, one in sorted(run.validations.items())],
        "samples": [float(text) for text in texts],
        "adapter": {path: one.tolist() for path, one in read_adapter(adapter, NAMES).items()},
    }


def refused(folder: Path) -> list[str]:
    """What several processes cannot do, as each of them is told."""
    weights = compiled(jax.devices(), folder).init(0).params
    tries: list[Callable[[], Any]] = [
        lambda: Engine(Adapted, lambda model, tokens: model, devices=jax.devices()[1:3]),
        lambda: Engine(Adapted, lambda model, tokens: model, weights=weights),
        lambda: compiled(jax.devices()[:2], folder, mesh={"stage": 2}, pipeline="programs"),
        lambda: compiled(jax.devices(), folder, mesh={}, exchange="diloco:2:2"),
    ]
    said: list[str] = []
    for one in tries:
        try:
            one()
            said.append("")
        except ShardlibError as error:
            said.append(str(error))
    return said


def work(number: int, count: int, port: str, where: str) -> None:
    folder = Path(where)
    jax.distributed.initialize(f"localhost:{port}", count, number)
    found = paths(jax.devices()[2:], folder)
    model = program_of(CONFIGS["llama-2-7b"], folder / f"config-{number}", (1, 2))
    config = folder / f"config-{number}" / "config.json"
    huggingface.save(model, drawn(model), folder / "model", config=config)
    found["refused"] = refused(folder)
    Path(folder, f"found-{number}").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(forked(work))
