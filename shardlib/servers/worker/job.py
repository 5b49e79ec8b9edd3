"""What workers train, and how each finds it in its own process: by the file and the name of a
function. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

from shardlib.annotation.read import Init
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import Filter
from shardlib.decisions.pins import PinMapping
from shardlib.errors import ArgumentError, LaunchError
from shardlib.frontend.traced_model import Loss
from shardlib.hardware.topology import TopologyLike
from shardlib.untrusted.shown import shown

#: The name under which a script is loaded again: what stands under `if __name__ == "__main__"` does
#: not run.
MAIN = "__shardlib_job__"


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What a worker trains. All workers have the same, but for their rows.

    Attributes:
        init: see `shardlib.compile`.
        loss: see `shardlib.compile`; that of the rows of one worker.
        rows: (worker, step) -> the batch of a worker's step, always of the same shapes.
        topology: of one worker; by default all devices that its process sees.
        pin: decisions of a worker's plan, fixed by hand.
        batch_axes: logical axes of the batch; by default the convention.
        seed: of the parameters, 0 to 2**31 - 1; all workers begin alike.
        wrt: what is trained; all parameters if left out.
    """

    init: Init
    loss: Loss
    rows: Callable[[int, int], Tree]
    topology: TopologyLike | None = None
    pin: PinMapping | None = None
    batch_axes: Tree = None
    seed: int = 0
    wrt: Filter = None


#: Makes the job; called in the process of every worker.
MakeJob = Callable[[], Job]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Where a function stands.

    Attributes:
        module: its name, or that of a script as it is loaded again.
        file: of the module.
        name: of the function.
    """

    module: str
    file: str
    name: str


def reference_to(job: MakeJob) -> Reference:
    """How another process finds a function."""
    name = getattr(job, "__qualname__", "")
    module = sys.modules.get(getattr(job, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not isinstance(job, FunctionType) or "<" in name or file is None:
        raise ArgumentError(
            f"job is {shown(job)}, which other processes cannot find\nTry: a function at the top of"
            " a file: def job(): return shardlib.servers.Job(init=..., loss=..., rows=...)"
        )
    module_name = MAIN if job.__module__ == "__main__" else job.__module__
    return Reference(module=module_name, file=str(Path(file).resolve()), name=name)


def load_job(reference: Reference) -> Job:
    """The job, made by the function."""
    make = getattr(_module(reference), reference.name, None)
    if make is None:
        raise LaunchError(f"{reference.file} has no function {reference.name}")
    job = make()
    if not isinstance(job, Job):
        raise LaunchError(
            f"{reference.name} of {reference.file} gives {shown(job)}\nTry: return"
            " shardlib.servers.Job(init=..., loss=..., rows=...)"
        )
    return job


def _module(reference: Reference) -> ModuleType:
    if reference.module != MAIN and importlib.util.find_spec(reference.module) is not None:
        return importlib.import_module(reference.module)
    spec = importlib.util.spec_from_file_location(MAIN, reference.file)
    if spec is None or spec.loader is None:
        raise LaunchError(f"{reference.file} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    spec.loader.exec_module(module)
    return module
