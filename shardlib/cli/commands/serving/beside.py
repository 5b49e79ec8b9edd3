"""Models beside the one that is served: one that guesses for it, and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.errors import ArgumentError

if TYPE_CHECKING:
    from shardlib.serving.hosting.beside import Beside
    from shardlib.serving.served import Served

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


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Adapters of the model."""

    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=FOLDER",
            help="Folder of PEFT with an adapter, by the name that requests have for it.",
        ),
    ] = None


def beside(
    word: str, served: Served, guesses: Guesses, adapters: Mapping[str, str]
) -> tuple[Served, Beside]:
    """A model with what is served beside it."""
    from shardlib.serving.folders.adapter import adapted
    from shardlib.serving.folders.folder import is_folder
    from shardlib.serving.hosting.beside import Beside
    from shardlib.serving.words import named

    draft = None if guesses.draft is None else named(guesses.draft)
    if not adapters:
        return served, Beside(draft=draft)
    if not is_folder(Path(word)):
        raise ArgumentError(
            f"adapters are for folders of Hugging Face, and {word} is none\nTry: shardlib export"
            f" {word} --huggingface FOLDER"
        )
    served, arrays = adapted(served, word, adapters)
    return served, Beside(draft=draft, adapters=arrays)


def folders_of(words: list[str] | None) -> dict[str, str]:
    """Folders of adapters by name."""
    folders: dict[str, str] = {}
    for word in words or []:
        name, _, folder = word.partition("=")
        if not name or not folder or name in folders:
            raise ArgumentError(
                f"--adapter {word} gives no new name and folder\nTry: --adapter legal=FOLDER"
            )
        folders[name] = folder
    return folders
