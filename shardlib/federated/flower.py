"""What of Flower is used, by its own names. Flower is imported when it is first needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Protocol

import numpy as np

from shardlib.errors import MissingPackageError


class Array(Protocol):
    """An array as it is sent."""

    def numpy(self) -> np.ndarray:
        """Its numbers."""
        ...


ArrayRecord = MutableMapping[str, Array]
ConfigRecord = MutableMapping[str, object]
MetricRecord = MutableMapping[str, float]


class RecordDict(Protocol):
    """Records by name."""

    array_records: MutableMapping[str, ArrayRecord]
    config_records: MutableMapping[str, ConfigRecord]
    metric_records: MutableMapping[str, MetricRecord]


class Metadata(Protocol):
    """Where a message belongs."""

    group_id: str


class Message(Protocol):
    """A message between a server and a client."""

    content: RecordDict
    metadata: Metadata

    def has_error(self) -> bool:
        """Whether it says an error in place of content."""
        ...


class Context(Protocol):
    """What a client is, and what it keeps between messages."""

    node_config: Mapping[str, object]
    state: RecordDict


#: What answers messages.
Handler = Callable[[Message, Context], Message]
#: What stands around it.
Mod = Callable[[Message, Context, Handler], Message]


class ClientApp(Protocol):
    """What engines call."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answers a message."""
        ...


def flower(module: str = "flwr.app") -> ModuleType:
    """A module of Flower."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            "federated learning needs the package flwr\nTry: pip install 'shardlib[federated]'"
        ) from error
