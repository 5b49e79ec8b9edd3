"""Models, and adapters of them, by the names that requests have for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.faults import Fault
from shardlib.untrusted import shown


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a name of a request means.

    Attributes:
        name: by which it is asked for.
        deployed: the model.
        adapter: of it; "" for the model itself.
    """

    name: str
    deployed: Deployment
    adapter: str = ""


class Catalog:
    """What a server has, by name. A name is a key, and never a path.

    Args:
        models: by name, at least one.

    Raises:
        ArgumentError: two of one name.
    """

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        entries = [Named(name=name, deployed=deployment) for name, deployment in models.items()]
        entries += [
            Named(name=adapter, deployed=deployment, adapter=adapter)
            for deployment in models.values()
            for adapter in deployment.adapters
        ]
        self._named = {entry.name: entry for entry in entries}
        if len(self._named) < len(entries):
            names = ", ".join(entry.name for entry in entries)
            raise ArgumentError(f"models and adapters are {names}; each has a name of its own")
        self._models = len(models)

    def __iter__(self) -> Iterator[Named]:
        return iter(self._named.values())

    def find(self, name: str | None) -> Named:
        """What a name means; the only model where none is given."""
        if name is None and self._models == 1:
            return next(iter(self))
        names = ", ".join(self._named)
        if name is None:
            raise Fault(400, f"model is missing; there are {names}", param="model")
        if name not in self._named:
            raise Fault(
                404,
                f"there is no model {shown(name)}; there is {names}",
                code="model_not_found",
                param="model",
            )
        return self._named[name]
