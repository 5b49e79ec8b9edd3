"""Models beside the one that is served: one that guesses for it, and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardlib.serving.engine import Engine
    from shardlib.serving.hosting.beside import Beside

#: Tokens that are guessed ahead where nobody says how many.
DRAFTS = 4


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Tokens that are guessed ahead, which changes how fast an answer comes, and nothing of it."""

    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Smaller model with the same tokens that guesses ahead. [what followed before]",
        ),
    ] = None
    drafts: Annotated[
        int | None,
        typer.Option(
            "--drafts", min=0, help="Tokens that are guessed ahead. [4 with --draft, 0 without]"
        ),
    ] = None

    @property
    def ahead(self) -> int:
        """Tokens that are guessed ahead."""
        return (DRAFTS if self.draft else 0) if self.drafts is None else self.drafts

    def beside(self) -> Beside:
        """The model that guesses, if there is one.

        Raises:
            ModelError, MissingFileError: there is no such model.
        """
        from shardlib.serving.hosting.beside import Beside
        from shardlib.serving.words import named

        return Beside(draft=None if self.draft is None else named(self.draft))

    def join(self, engine: Engine) -> None:
        """Has an engine guess.

        Args:
            engine: with room for guesses.

        Raises:
            ArgumentError, ModelError: the model does not fit the other one.
        """
        self.beside().join(engine)
