"""A model that is served, with all that requests of it need."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from shardlib.errors import ShardlibError
from shardlib.serving.engine import Engine
from shardlib.serving.hosting.beside import Beside
from shardlib.serving.hosting.embedding import Embedder
from shardlib.serving.hosting.stream import StreamError
from shardlib.serving.hosting.templates import Renderer
from shardlib.serving.hosting.worker import Worker
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.served import Served
from shardlib.serving.text import Text

#: Tokens that end an answer that has a form, where a tokenizer has none that does.
NO_END = frozenset({0})
LOG = logging.getLogger("shardlib.serving")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model that is served.

    Attributes:
        name: by which requests ask for it.
        served: what it is.
        worker: its engine.
        renderer: of conversations.
        embedder: of texts; None where the model gives no hidden states.
        formless: why answers can have no form; empty where they can.
        adapters: names of them, by which requests ask for the model with one.
    """

    name: str
    served: Served
    worker: Worker
    renderer: Renderer = field(repr=False)
    embedder: Embedder | None = None
    formless: str = ""
    adapters: tuple[str, ...] = ()

    async def follow(self, seconds: float) -> None:
        """Serves newer weights as they come, for ever. What goes wrong with them is logged, and
        those that are there serve on.

        Args:
            seconds: between two looks.
        """
        newer = self.served.newer
        while newer is not None:
            await asyncio.sleep(seconds)
            try:
                update = await asyncio.to_thread(newer, self.worker.version)
                if update is None:
                    continue
                weights, version = update
                change = self.worker.call(
                    lambda weights=weights, version=version: self.worker.replace(weights, version)
                )
                await asyncio.wrap_future(change)
                LOG.info("%s: %s is served from now on", self.name, version)
                while self.worker.engine.replacing and not self.worker.error:
                    await asyncio.sleep(0.1)
            except StreamError:
                return
            except (ShardlibError, OSError) as error:
                LOG.warning("%s: newer weights cannot be served: %s", self.name, error)


def deploy(
    served: Served,
    capacity: Capacity,
    *,
    name: str = "",
    tensor: int = 1,
    groups: int = 1,
    waiting: int = 64,
    buffer: int = 1024,
    beside: Beside | None = None,
) -> Deployment:
    """Makes the engine of a model, and compiles everything that it will run.

    Args:
        name: by which requests ask for it; by default its own.
    """
    renderer = Renderer(served.text)
    others = beside or Beside()
    capacity = replace(capacity, adapters=len(others.adapters))
    engine = served.engine(capacity, tensor=tensor, data=groups)
    others.join(engine)
    formless = spell(engine, served.text)
    engine.warm_up()
    embedder = None if served.hidden is None else Embedder(engine, served.hidden)
    if embedder is not None:
        embedder.warm_up()
    return Deployment(
        name=name or served.name,
        served=served,
        worker=Worker(engine, waiting=waiting, buffer=buffer, version=served.version),
        renderer=renderer,
        embedder=embedder,
        formless=formless,
        adapters=tuple(others.adapters),
    )


def spell(engine: Engine, text: Text) -> str:
    """Tells an engine what tokens spell, so that answers may have a form."""
    if find_spec("llguidance") is None:
        return (
            "the server has no package llguidance, which forms need\nTry: pip install"
            " 'shardlib[structured]' there"
        )
    spelling = text.spelling()
    if spelling is None:
        return "nothing is known of what the tokens of the model spell"
    engine.spell(spelling, text.ends or NO_END)
    return ""
