"""What is served beside a model: a smaller one that guesses for it, and adapters of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.annotation.model import Tree
from shardlib.serving.engine import Engine
from shardlib.serving.served import Served


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What is served beside a model.

    Attributes:
        draft: a smaller model with the same tokens, that guesses `Capacity.drafts` tokens ahead;
            None where what followed before does.
        adapters: parameters by name, as `Engine.adapt` takes them; requests have the name in place
            of that of the model.
    """

    draft: Served | None = None
    adapters: Mapping[str, Tree] = field(default_factory=dict)

    def join(self, engine: Engine) -> None:
        """Gives them to the engine of the model, before anything is compiled."""
        if self.draft is not None:
            draft = self.draft
            engine.draft_with(draft.init, draft.forward, weights=draft.weights)
        for name, params in self.adapters.items():
            engine.adapt(name, params)
