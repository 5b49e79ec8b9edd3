"""Earlier names of modules that the documentation showed: importing one gives the module that has
its contents now. Two more register themselves (`keep_name`): their modules have a function of that
name, which the import system would replace by the module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardlib import wings

MOVED = {
    "shardlib.booking": "shardlib.launch.booking",
    "shardlib.checkpointing.keep": "shardlib.checkpointing.store",
    "shardlib.compiler": "shardlib.api",
    "shardlib.data.batches.loader": "shardlib.data.batches",
    "shardlib.data.reading": "shardlib.data",
    "shardlib.data.reading.cache": "shardlib.data.sources",
    "shardlib.federated": "shardlib.islands.federated",
    "shardlib.hardware": "shardlib.machines",
    "shardlib.launching": "shardlib.launch",
    "shardlib.lowering.context.ring": "shardlib.lowering.context.dispatch",
    "shardlib.lowering.experts.groups": "shardlib.lowering.experts",
    "shardlib.planning": "shardlib.planner",
    "shardlib.planning.pictures": "shardlib.report",
    "shardlib.planning.pictures.timelines": "shardlib.report.timelines",
    "shardlib.serve.http.server": "shardlib.serve.http.app",
    "shardlib.servers": "shardlib.islands.servers",
    "shardlib.serving": "shardlib.serve",
    "shardlib.serving.hosting.deployment": "shardlib.serve.hosting",
    "shardlib.serving.http.server": "shardlib.serve.http.app",
    "shardlib.testing": "shardlib.diagnosis.testing",
    "shardlib.training.measures.judge": "shardlib.training.measures",
    "shardlib.training.states.average": "shardlib.training.states",
    "shardlib.training.states.rates": "shardlib.training.states",
    "shardlib.training.states.surgery": "shardlib.training.states",
    "shardlib.verification.hlo.timelines": "shardlib.verification.timelines",
}
#: Names that the package had, which `shardlib.islands` has now.
ISLANDS = "Asynchronous Compressed DiLoCo Exact Gossip IslandsProgram PowerSGD Quantised Sign TopK"


class Moved(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`, and loads what stands there now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _today(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = wings.required(_today(spec.name), spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and isinstance(spec.loader, Moved):
            module.__spec__ = spec.loader_state  # the import system has replaced it


def _today(name: str) -> str:
    """The module of today under an earlier name, or in a package that had one; "" for others."""
    head, rest = name, ""
    while head.startswith("shardlib."):
        if head in MOVED:
            today = MOVED[head] + rest
            return today if not rest or importlib.util.find_spec(today) else ""
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return ""


def install() -> None:
    """Lets the earlier names be imported, in this process."""
    if not any(type(finder).__name__ == Moved.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())


def keep_name(module: str, name: str) -> None:
    """Keeps `name` as an earlier name of a submodule that is part of `module` now."""
    sys.modules[f"{module}.{name}"] = sys.modules[module]
