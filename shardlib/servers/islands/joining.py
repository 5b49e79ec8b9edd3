"""`join`: this process as one of the islands; what cannot be is refused before anything starts."""

from __future__ import annotations

import math
import os

import jax
import numpy as np

from shardlib.errors import ArgumentError, PinError, raise_all
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.parts import BUCKET_BYTES, wrong_bucket_bytes
from shardlib.exchanges.reading import read_exchange
from shardlib.exchanges.values import Exchange
from shardlib.lowering.islands.halves import trained
from shardlib.lowering.islands.use_order import parts_in_order
from shardlib.lowering.program.program import Program
from shardlib.servers.islands.exchanging import Exchanging
from shardlib.servers.islands.island import Island
from shardlib.servers.islands.place import MeetingPlace, read_place
from shardlib.servers.islands.several import SeveralProcesses
from shardlib.servers.link import Link, meeting_finding, read_link
from shardlib.servers.rounds.outline import Outline
from shardlib.servers.rounds.service import HOLD_SECONDS
from shardlib.servers.wire.connection import Connection
from shardlib.tracing.batch import describe_batch
from shardlib.untrusted.shown import shown

#: Seconds that a server may be gone, at least: it holds questions of islands that wait for half of
#: that.
LEAST_PATIENCE = 2 * HOLD_SECONDS


def join(
    program: Program,
    *,
    exchange: DiLoCo | str,
    place: MeetingPlace | None = None,
    weight: float | None = None,
    link: Link | str | None = None,
    patience_s: float = 60.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> Island:
    """Makes this process one of the islands of a run. Nothing is sent before `Island.start`.

    Args:
        program: of this island, as `shardlib.compile` gives it without an exchange.
        exchange: how islands meet, alike on all: `shardlib.DiLoCo`, or "diloco:2:100".
        place: where they meet; by default as the environment says it, see
            `shardlib.servers.islands.place`.
        weight: of this island in the mean of outer gradients; by default the rows of a step.
        link: between this island and the server, "50mbit-20ms", for what `Island.findings` say of
            meetings.
        patience_s: how long a server may be gone, at least 20.
        bucket_bytes: a mean comes in the order in which the loss first uses parameters, in buckets
            of so many bytes.

    Raises:
        PinError: the exchange, or the program, cannot be that of an island; all reasons are listed.
        ArgumentError: arguments out of range; all of them are listed.
        LaunchError: nothing says where islands meet.
    """
    meets = read_exchange("exchange", exchange)
    _require_numbers(weight, patience_s, bucket_bytes)
    outline = _require_island(program, meets)
    assert isinstance(meets, DiLoCo)
    place = read_place(os.environ) if place is None else place
    if place.island >= meets.islands:
        raise ArgumentError(
            f"island {place.island} is none of {meets.islands}, which are numbered from 0 on\nTry:"
            f" exchange={meets.kind}:{place.island + 1}:{meets.every}"
        )
    connection = Connection(
        where=lambda: (place.host, place.port),
        server=0,
        worker=place.island,
        secret=place.token,
        patience_s=patience_s,
    )
    link_figures = read_link(link) if isinstance(link, str) else link
    return Island(
        program=program,
        exchanging=(Exchanging if jax.process_count() == 1 else SeveralProcesses)(
            link=connection,
            number=place.island,
            exchange=meets,
            outline=outline,
            weight=float(rows_of(program) if weight is None else weight),
            uses=parts_in_order(program),
            bucket_bytes=bucket_bytes,
        ),
        findings=(meeting_finding(meets, outline, link_figures),),
    )


def rows_of(program: Program) -> int:
    """Rows of a step, by the convention of batch axes; 1 where nothing has rows."""
    described = describe_batch(program.batch, None)
    return max(
        (s[axes.index("batch")] for _, s, _, axes in described if "batch" in axes), default=1
    )


def _require_numbers(weight: object, patience_s: object, bucket_bytes: object) -> None:
    failures = wrong_bucket_bytes(bucket_bytes)
    failures += [
        f"{name} is {shown(value)}; it is a number of {bound}"
        for name, value, bound, fits in (
            ("weight", weight, "more than 0", weight is None or _is_positive(weight)),
            ("patience_s", patience_s, f"at least {LEAST_PATIENCE}", _is_patient(patience_s)),
        )
        if not fits
    ]
    if failures:
        raise_all(ArgumentError, "shardlib.servers.join cannot use its arguments", failures)


def _is_patient(value: object) -> bool:
    return isinstance(value, int | float) and _is_positive(value) and value >= LEAST_PATIENCE


def _is_positive(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def _require_island(program: Program, exchange: Exchange) -> Outline:
    """The outline of the parameters that meet."""
    if not isinstance(program, Program):
        raise PinError(
            "the program has an exchange of its own, whose islands are in this process\nTry:"
            " shardlib.compile without pin={'exchange': ...}, and servers.join(program,"
            " exchange=...)"
        )
    failures: list[str] = []
    if not isinstance(exchange, DiLoCo):
        failures.append(f"exchange is {exchange}; islands that are processes meet as DiLoCo")
    if program.disk is not None:
        failures.append("its optimizer state is on disk (offload=['disk'])")
    updated = [
        parameter.path for parameter in program.plan.parameters if parameter.role == "updated"
    ]
    if updated:
        failures.append(f"steps update {', '.join(updated[:4])}, which are no parameters")
    parameters = trained(program)
    failures += [
        f"{path} is {leaf.dtype}, and what is outer is float32"
        for path, leaf in parameters.items()
        if not jax.numpy.issubdtype(leaf.dtype, np.floating) or leaf.dtype.itemsize > 4
    ]
    outline = Outline.of({path: tuple(leaf.shape) for path, leaf in parameters.items()})
    if isinstance(exchange, DiLoCo) and exchange.fragments > outline.total:
        failures.append(f"there are {exchange.fragments} fragments of {outline.total} elements")
    if failures:
        raise_all(PinError, "this program cannot be that of an island", failures)
    return outline
