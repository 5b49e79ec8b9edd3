"""Stand-ins for packages that a parser of options imports and does not need, such as `torch`: every
name of such a module is a class that can be called, subclassed and indexed.

Used by `benchmarks/framework_configs.py` to run other frameworks' own parsers where only their
sources are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Protocol


class _Meta(type(Protocol)):  # so that protocols can be mixed in
    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("__", "_is_", "_abc", "_non", "_Proto")):
            raise AttributeError(name)
        made = _Meta(name, (StandIn,), {"__module__": cls.__module__})
        setattr(cls, name, made)
        return made

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __lt__(cls, other: Any) -> bool:
        return False

    def __gt__(cls, other: Any) -> bool:
        return True

    __ge__, __le__ = __gt__, __lt__

    def __bool__(cls) -> bool:
        return False


class StandIn(metaclass=_Meta):
    """What every call of a stand-in gives; as a decorator it changes nothing."""

    _is_protocol = _is_runtime_protocol = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, key: Any) -> Any:
        return StandIn()

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return self

    def __lt__(self, other: Any) -> bool:
        return False

    def __gt__(self, other: Any) -> bool:
        return True

    __ge__ = __gt__

    def __bool__(self) -> bool:
        return False


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.9.0"
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (StandIn,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def install(*roots: str) -> None:
    """Puts stand-ins in the place of packages, and gives `torch`, where it is one, its dtypes."""
    sys.meta_path.insert(0, _Finder(frozenset(roots)))
    if "torch" in roots:
        import torch

        torch.dtype = dtype = type("dtype", (StandIn,), {})
        for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "int8"):
            setattr(torch, name, dtype())
        torch.half, torch.float = torch.float16, torch.float32
