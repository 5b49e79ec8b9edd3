"""Flower's grid within this process: clients are called in turn, messages are copied."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr", reason="the package flwr is not installed")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class InProcess(Grid):
    """As many clients as there are partitions, or those that are given.

    Attributes:
        errors: what clients answered that failed.
    """

    def __init__(self, app: ClientApp, partitions: list[int], count: int) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.app, self.errors = app, list[str]()
        self.contexts = {
            100 + node: Context(
                run_id=1,
                node_id=100 + node,
                node_config={"partition-id": partition, "num-partitions": count},
                state=RecordDict(),
                run_config={},
            )
            for node, partition in enumerate(partitions)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [self._answer(copy.deepcopy(message)) for message in messages]

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # as engines do
            self.errors.append(str(error))
            return Message(Error(code=1, reason=str(error)), reply_to=message)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *given: Any, **named: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        raise NotImplementedError
