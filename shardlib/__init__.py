"""shardlib: a sharding compiler front end for JAX. Annotate once, plan in a second, run anywhere.

    program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
    print(program.plan.explain())
    state = program.init(seed=0)
    state, metrics = program.step(state, batch)

The packages, from the ground up; a file imports only from its own layer or from lower ones, and
there is no JAX below the doors (`tool.importlinter` in pyproject.toml):

    errors, untrusted, compact   what can go wrong; data from elsewhere; short reprs
    formats                      formats of numbers: their bytes, and what multiplies them
    wings                        what the core uses of packages that may be missing
    layout, rules, collective, findings
                                 the small values that everything else speaks
    machines                     chips, link tiers, the spelling of topologies
    schedules                    who does what when in a pipeline
    exchanges                    how islands exchange
    graph                        what a program computes
    decisions                    the table of what a plan decides
    propagation, cost            names flow through the graph; seconds and bytes
    planner, report              the Plan and the search for it; its text and pictures
    annotation, tracing          JAX's door in: the user's names, jaxpr -> Graph
    functions, processes         custom calls; processes that agree and end together
    lowering, calibration        JAX's door out: Plan -> one `jax.jit` program; rates of a machine
    verification                 the real compilers as judges
    models, checkpointing        reference models; states on disk
    api, frontend                the whole story on one page, and its steps
    data, training               batches, the training loop
    cli                          the command line
    launch, serve, islands, frameworks, diagnosis
                                 wings, which the core does not know: jobs on many hosts and what to
                                 book, models that answer, islands and servers over TCP, plans for
                                 other training frameworks, why a function communicates

Names are imported when they are first used: `import shardlib` loads neither JAX nor NumPy, and
nothing here touches a device.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardlib import _moved, wings

__version__ = "0.1.0"

#: Public name -> the module that defines it: as `__init__.pyi` imports them.
_HOME = wings.names_of(__file__)
__all__ = ["__version__"]
# without the names of a wing whose package is missing, so that a star import works
__all__ += sorted(  # noqa: PLE0605  # pyright: ignore
    name for name, module in _HOME.items() if not wings.is_missing(module)
)

_moved.install()


def __getattr__(name: str) -> Any:
    if f"shardlib.{name}" in _moved.MOVED:
        return importlib.import_module(f"shardlib.{name}")
    if name in ("islands", *_moved.ISLANDS.split()):
        package = wings.required("shardlib.islands", f"shardlib.{name}")
        return package if name == "islands" else getattr(package, name)
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib' has no attribute {name!r}")
    return getattr(wings.required(_HOME[name], f"shardlib.{name}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
