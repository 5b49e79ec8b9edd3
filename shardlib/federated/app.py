"""The ClientApp: Flower's messages answered by local training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardlib.errors import ArgumentError
from shardlib.federated.flower import ClientApp, Context, Message, Mod, flower
from shardlib.federated.job import Job
from shardlib.federated.local import evaluate, train
from shardlib.federated.records import answer_to, request_of
from shardlib.federated.request import Answer, Request
from shardlib.untrusted.shown import shown


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers messages; a value that engines may copy into other processes.

    Attributes:
        job: what is trained.
        what: (job, request) -> answer.
    """

    job: Job
    what: Callable[[Job, Request], Answer]

    def __call__(self, message: Message, context: Context) -> Message:
        """Answers."""
        return answer_to(message, context, self.what(self.job, request_of(message, context)))


def client(job: Job, *, mods: Sequence[Mod] = ()) -> ClientApp:
    """A Flower ClientApp whose local epochs are a planned, sharded program.

    It answers `train` and `evaluate` of any strategy that sends parameters and takes parameters
    (FedAvg, FedProx, FedAdam, Krum and others, with wrappers for differential privacy), and of the
    SecAgg+ workflow. Parameters go by path; frozen ones are not sent. FedProx's "proximal-mu" is
    used where the strategy sends it.
    """
    if not isinstance(job, Job):
        raise ArgumentError(f"job is {shown(job)}\nTry: federated.Job(init=..., loss=..., ...)")
    app = flower("flwr.clientapp").ClientApp(mods=list(mods))
    app.train()(Answers(job=job, what=train))
    app.evaluate()(Answers(job=job, what=evaluate))
    return app
