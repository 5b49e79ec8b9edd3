"""Models by the names that requests have for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.faults import Fault
from shardlib.untrusted import shown


class Catalog:
    """The models of a server. A name is a key, and never a path.

    Args:
        models: by name, at least one.
    """

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        self.models = dict(models)

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def find(self, name: str | None) -> Deployment:
        """The model of a name; the only one where none is given.

        Args:
            name: as a request has it.

        Raises:
            Fault: 404; there is none of that name. 400; there are several, and none is named.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise Fault(400, f"model is missing; there are {', '.join(self)}", param="model")
        if name not in self.models:
            raise Fault(
                404,
                f"there is no model {shown(name)}; there is {', '.join(self)}",
                code="model_not_found",
                param="model",
            )
        return self.models[name]
