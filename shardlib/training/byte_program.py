"""The program of a byte-level transformer: its model, the available machine, its plan."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

from shardlib import _jax_compat, api, models
from shardlib.errors import ModelError, TopologyError
from shardlib.lowering.program import Program
from shardlib.lowering.step import Guards
from shardlib.machines.topology import of_size
from shardlib.machines.topology import topology as parse_topology
from shardlib.models.config import EncoderDecoderConfig, TransformerConfig
from shardlib.processes.machine import HOST_DEVICES, simulate_cpu_devices
from shardlib.training.run import RunFolder
from shardlib.training.settings import TrainConfig, optimizer

#: Non-finite steps are skipped, and gradients are clipped to a norm of 1.
GUARDS = Guards(clip=1.0)


def byte_model(config: TrainConfig) -> TransformerConfig:
    model = models.load(config.model)
    if not isinstance(model, TransformerConfig):
        what = "an encoder-decoder" if isinstance(model, EncoderDecoderConfig) else "your own code"
        raise ModelError(
            f"{config.model} is {what}; `train` trains byte-level reference transformers\nTry:"
            " shardlib.compile(init, loss, optimizer, batch), which gives a program with `init`"
            " and `step`"
        )
    model.check_seq(config.seq)
    if model.vocab_size < 256:
        raise ModelError(
            f"the model {model.name!r} has a vocabulary of {model.vocab_size}; bytes need 256"
        )
    return model


#: CPU devices that are simulated by default.
CPU_DEVICES = 8


def cpu_devices_of_job() -> int:
    """CPU devices to simulate where nobody says how many: those that the processes of the job were
    given, or else `CPU_DEVICES`, as far as processes can share them evenly.
    """
    joined = _jax_compat.coordination()
    processes = 1 if joined is None else joined[2]
    each = os.environ.get(HOST_DEVICES)
    return processes * (max(1, CPU_DEVICES // processes) if each is None else int(each))


def keep_compiled(folder: Path) -> None:
    """Makes XLA keep what it compiles in a folder, so that a process that starts again need not
    compile; a folder that is set already stays.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _machine(config: TrainConfig, console: Console) -> str:
    """The topology to plan for, or the available part of it."""
    name = config.topology or f"cpu:{cpu_devices_of_job()}"
    topology = parse_topology(name)
    if topology.name.startswith("cpu:"):
        try:
            simulate_cpu_devices(topology.devices)
        except TopologyError:
            if not config.elastic:
                raise
    available = jax.device_count()
    if not config.elastic or available >= topology.devices:
        return name
    left = of_size(topology, available)
    console.print(
        f"{available} of {topology.devices} devices are there: planning for {left.name}",
        highlight=False,
    )
    return left.name


def planned(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans a program; on "cpu:N", simulates N devices first."""
    topology = _machine(config, console)
    init, loss = models.build(model)
    batch = models.example_batch(model, config.batch, config.seq)
    with console.status(f"planning {model.name} for {topology}"):
        return api.compile(
            init,
            loss,
            optimizer(config),
            batch,
            topology=topology,
            pin=config.pin,
            name=model.name,
            guards=GUARDS,
        )


def compiled(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans and compiles a program."""
    if config.run is not None:
        keep_compiled(RunFolder(Path(config.run)).compiled)
    program = planned(config, model, console)
    plan = program.plan
    if jax.default_backend() == "cpu" and parse_topology(plan.topology).chip.vendor != "cpu":
        console.print(
            f"there is no {plan.topology} here: the plan for it is carried out on simulated devices"
            " of the CPU, and its predicted times are not theirs",
            highlight=False,
            markup=False,
        )
    console.print(
        f"[bold]{escape(model.name)}[/]: {model.parameter_count():,} parameters; plan for"
        f" {plan.topology}: [bold]{plan.mesh}[/], found in {plan.search.seconds:.2f} s",
        highlight=False,
    )
    with console.status("compiling"):
        program.prepare()
    return program
