"""Settings, guards, faults, models by name, and figures of a running server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardlib.errors import ArgumentError, MissingFileError, raise_all
from shardlib.serve.hosting import Deployment, FullError, Stream, StreamError, StreamEvent
from shardlib.untrusted.data import JsonObject, is_integer, is_number, shown

#: Bytes of a file of tokens, and characters of one of them.
TOKEN_FILE_BYTES, TOKEN_LENGTH = 1 << 16, 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of the server.

    Attributes:
        tokens: bearer tokens, of which every request needs one; empty for none.
        waiting: requests of a model that wait for a slot at most; those above are answered 429.
        buffer: tokens that an answer may be ahead of its reader.
        choices: answers that one request may ask for.
        body_bytes: of a request.
        body_seconds: in which it has come in.
        head_seconds: in which its head has come in.
        send_seconds: that one piece of an answer may wait for its reader.
        drain_seconds: that answers have to end in when the server is to stop.
        refresh_seconds: between two looks for newer weights.
        connections: at a time, of those that have shown a token.
        strangers: connections at a time of those that have not.
        strangers_per_address: of one address.
        answer_seconds: after which an answer ends with what it has; None for as long as it takes.

    Raises:
        ArgumentError: figures that are not above 0.
    """

    tokens: tuple[str, ...] = ()
    waiting: int = 64
    buffer: int = 1024
    choices: int = 16
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    send_seconds: float = 60.0
    drain_seconds: float = 60.0
    refresh_seconds: float = 10.0
    connections: int = 1024
    strangers: int = 512
    strangers_per_address: int = 128
    answer_seconds: float | None = None

    def __post_init__(self) -> None:
        failures = [
            f"{field.name} is {value!r}; it is a number above 0"
            for field in fields(self)
            if field.name not in ("tokens", "waiting")
            if (value := getattr(self, field.name)) is not None
            if not is_number(value) or value <= 0
        ]
        if not is_integer(self.waiting) or self.waiting < 0:
            failures.append(f"waiting is {self.waiting!r}; it is a whole number from 0 on")
        if failures:
            raise_all(ArgumentError, "the server cannot run so", failures)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Bearer tokens from a file, one a line."""
    try:
        with path.open("rb") as file:
            text = file.read(TOKEN_FILE_BYTES + 1).decode("ascii")
    except OSError as error:
        raise MissingFileError(f"the tokens in {path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} holds other characters than those of ASCII") from error
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens or len(text) > TOKEN_FILE_BYTES:
        raise ArgumentError(f"{path} holds no tokens, or too many\nTry: one a line")
    if short := [number for number, token in enumerate(tokens, 1) if len(token) < TOKEN_LENGTH]:
        raise ArgumentError(
            f"token {short[0]} of {path} has fewer than {TOKEN_LENGTH} characters\nTry: python -c"
            " 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens


#: Bounds of seconds, in histograms.
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
#: Seconds that the page looks back, and between two of its figures.
BACK, EVERY = 300, 1.0


class ServerMetrics:
    """Counts what the engines of a server do."""

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(models))
        labels = ["model"]

        def histogram(name: str, what: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"shardlib_{name}", what, labels, buckets=bounds, registry=self.registry
            )

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"shardlib_{name}", what, [*labels, *more], registry=self.registry)

        self.ttft = histogram("time_to_first_token_seconds", "From request to token.", SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "From token to token.", SECONDS)
        self.whole = histogram("request_seconds", "From request to the end.", SECONDS)
        self.prompt = histogram("prompt_tokens", "Of a request.", TOKENS)
        self.answer = histogram("answer_tokens", "Of a request.", TOKENS)
        self.generated = counter("generated_tokens", "Of answers.")
        self.cached = counter("cached_prompt_tokens", "That others had computed.")
        self.ended = counter("requests_ended", "By reason.", "reason")
        self.of = {name: ModelMetrics(self, name) for name in models}

    async def look(self, models: Mapping[str, Deployment]) -> None:
        """Writes down how it goes, every second."""
        while True:
            for name, deployed in models.items():
                self.of[name].look(deployed)
            await asyncio.sleep(EVERY)


class _Gauges(Collector):
    """Gauges of the load of the engines, computed on each read."""

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """One metric for each figure of `Load`."""
        loads = {name: asdict(deployed.worker.load) for name, deployed in self._models.items()}
        for figure in next(iter(loads.values()), {}):
            metric = GaugeMetricFamily(f"shardlib_engine_{figure}", "See Load.", labels=["model"])
            for name, load in loads.items():
                metric.add_metric([name], load[figure])
            yield metric


class ModelMetrics:
    """Counts what one engine does; all of it in the event loop."""

    def __init__(self, all_of: ServerMetrics, name: str) -> None:
        self._ttft = all_of.ttft.labels(name)
        self._tpot = all_of.tpot.labels(name)
        self._whole = all_of.whole.labels(name)
        self._prompt = all_of.prompt.labels(name)
        self._answer = all_of.answer.labels(name)
        self._generated = all_of.generated.labels(name)
        self._cached = all_of.cached.labels(name)
        self._ended = {
            reason: all_of.ended.labels(name, reason)
            for reason in ("length", "stop", "late", "cancelled")
        }
        self._last: dict[tuple[Stream, int], tuple[float, int]] = {}
        self._tokens = self._prompted = self._shared = 0
        self._firsts: deque[tuple[float, float]] = deque(maxlen=2000)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=2000)
        self.history: deque[JsonObject] = deque(maxlen=int(BACK / EVERY))

    def heard(self, stream: Stream, heard: StreamEvent) -> None:
        """A token, or an end."""
        key = stream, heard.index
        before, count = self._last.get(key, (stream.begun, 0))
        if heard.token is not None:
            self._generated.inc()
            self._tokens += 1
            spent = heard.at - before
            (self._tpot if count else self._ttft).observe(spent)
            (self._gaps if count else self._firsts).append((heard.at, spent))
            count += 1
            self._last[key] = heard.at, count
        if heard.ended is not None:
            self._last.pop(key, None)
            size = len(stream.asked[heard.index].prompt)
            self._ended.get(heard.ended, self._ended["cancelled"]).inc()
            self._whole.observe(heard.at - stream.begun)
            self._prompt.observe(size)
            self._answer.observe(count)
            self._cached.inc(heard.reused)
            self._prompted += size
            self._shared += heard.reused

    def look(self, deployed: Deployment) -> None:
        """Writes down how it goes now."""
        load, now = deployed.worker.load, time.perf_counter()
        self.history.append(
            {
                "running": load.running,
                "waiting": load.waiting,
                "used": load.used / load.pages,
                "tokens": self._tokens / EVERY,
                "ttft": _median(self._firsts, now),
                "tpot": _median(self._gaps, now),
            }
        )
        self._tokens = 0

    @property
    def shared(self) -> float:
        """Share of the tokens of prompts that others had computed, of all that were asked."""
        return self._shared / self._prompted if self._prompted else 0.0


def _median(samples: deque[tuple[float, float]], now: float) -> float | None:
    """Of what was seen in the last ten seconds; None for nothing."""
    recent = sorted(seconds for when, seconds in samples if now - when < 10)
    return recent[len(recent) // 2] if recent else None


#: Kinds of errors by status; others are the client's.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


class Fault(HTTPException):
    """A request that is not answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        text = message.encode("utf-8", "replace").decode()  # half of a surrogate pair is not text
        super().__init__(status, text, dict(headers or {}))
        self.code, self.param = code, param

    @property
    def body(self) -> JsonObject:
        """As JSON."""
        return {
            "error": {
                "message": self.detail,
                "type": KINDS.get(self.status_code, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> JSONResponse:
        """As an answer."""
        return JSONResponse(self.body, self.status_code, headers=self.headers)


def full(error: FullError) -> Fault:
    """Too many requests are open."""
    return Fault(
        429,
        f"the server is busy: {error}",
        code="server_busy",
        headers={"Retry-After": str(error.seconds)},
    )


def ended(error: StreamError) -> Fault:
    """An answer ended early."""
    if error.refused:
        return Fault(400, str(error), code="invalid_value")
    return Fault(503, str(error), code="engine_failed" if error.dead else "answer_given_up")


def _wrong_body(error: RequestValidationError) -> Fault:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Fault(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}")
    if first["type"] == "characters":
        path = str(first.get("ctx", {}).get("field"))
        return Fault(400, first["msg"], code="invalid_value", param=path.partition(".")[0])
    field = first["loc"][1:2]
    same = [detail for detail in error.errors() if detail["loc"][1:2] == field]
    name = str(field[0]) if field else None
    return Fault(400, _fault_text(same, error.body), code="invalid_value", param=name)


#: What a value should be, by the first word of the kind of pydantic's error.
_TYPES = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}
#: What a number should be, by the name of the limit.
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _fault_text(errors: Sequence[Mapping[str, Any]], body: object) -> str:
    """Describes the fault of a field: of errors of all types that it may have, the one that goes
    deepest.
    """
    paths = [_path(detail, body) for detail in errors]
    deepest = [
        detail
        for detail, path in zip(errors, paths, strict=True)
        if len(path) == max(map(len, paths))
    ]
    detail = next(
        (detail for detail in deepest if not detail["type"].endswith("_type")), deepest[0]
    )
    name = ".".join(_path(detail, body)) or "the body"
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    is_now = f"{name} is {shown(value)}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "literal_error":
        return f"{is_now}; it is {context['expected']}"
    for word, limit in (("max_length", "at most"), ("min_length", "at least")):
        if word in context and isinstance(value, Sized):
            unit = "characters" if isinstance(value, str) else "items"
            return f"{name} has {len(value)} {unit}; it has {limit} {context[word]}"
    for word, limit in _LIMITS.items():
        if word in context:
            bound = context[word]
            return f"{is_now}; it is {limit} {int(bound) if bound == int(bound) else bound}"
    types = [_TYPES.get(detail["type"].partition("_")[0]) for detail in deepest]
    if None in types:
        return f"{name}: {detail['msg']}"
    return f"{is_now}; it is {' or '.join(dict.fromkeys(filter(None, types)))}"


def _path(error: Mapping[str, Any], body: object) -> list[str]:
    """Returns the path of an error in a body, without the names of types that pydantic has among
    the parts.
    """
    path: list[str] = []
    for part in error["loc"][1:]:
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int)
        ):
            body = body[part]
        elif not (error["type"] == "missing" and part == error["loc"][-1]):
            continue
        path.append(str(part))
    return path


def install(app: FastAPI) -> None:
    """Makes an application answer so."""

    def answering(fault_of: Callable[[Any], Fault]) -> Callable[..., Awaitable[JSONResponse]]:
        async def answer(_: Request, error: Exception) -> JSONResponse:
            return fault_of(error).response

        return answer

    def http(error: HTTPException) -> Fault:
        if isinstance(error, Fault):
            return error
        return Fault(error.status_code, error.detail, headers=error.headers)

    def other(_: Exception) -> Fault:
        return Fault(500, "the server has failed at this; its log says more")

    app.add_exception_handler(HTTPException, answering(http))
    app.add_exception_handler(RequestValidationError, answering(_wrong_body))
    app.add_exception_handler(FullError, answering(full))
    app.add_exception_handler(StreamError, answering(ended))
    app.add_exception_handler(Exception, answering(other))


#: What everybody may look at.
OPEN = frozenset({"/", "/health", "/figures", "/metrics"})


class Guard:
    """Lets requests with a token through whose bodies are small and come in time.

    `scope["state"]["salt"]` is what the prefixes of a token are known by.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._tokens = [token.encode() for token in settings.tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            state = scope.setdefault("state", {})
            if b"content-length" in headers and b"transfer-encoding" in headers:
                raise Fault(
                    400,
                    "the request has both content-length and transfer-encoding",
                    headers={"Connection": "close"},
                )
            state["salt"] = self._salt(scope["path"], headers.get(b"authorization", b""))
            if scope["path"] not in OPEN and not state.get("shown", lambda: True)():
                raise Fault(
                    503,
                    f"the server has {self.settings.connections} connections, and no place for"
                    " another",
                    code="server_busy",
                    headers={"Retry-After": "5", "Connection": "close"},
                )
            self._check_length(headers.get(b"content-length", b"0"))
        except Fault as fault:
            await fault.response(scope, receive, send)
            return
        await self.app(scope, _Counted(receive, self.settings), send)

    def _salt(self, path: str, header: bytes) -> str:
        if not self._tokens or path in OPEN:
            return ""
        scheme, _, token = header.partition(b" ")
        matches = [hmac.compare_digest(token.strip(), known_token) for known_token in self._tokens]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Fault(
                401,
                "the request has no bearer token that is known here",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.sha256(b"shardlib prefixes " + token.strip()).hexdigest()

    def _check_length(self, header: bytes) -> None:
        if not header.isdigit() or len(header) > 18 or int(header) > self.settings.body_bytes:
            raise too_large(self.settings)


def too_large(settings: Settings) -> Fault:
    """The body is larger than is read."""
    return Fault(413, f"the body has more than {settings.body_bytes} bytes", code="body_too_large")


class _Counted:
    """Receives a body of so many bytes in so many seconds at most; whether a length was said or
    not.
    """

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive, self._settings = receive, settings
        self._bytes, self._whole = 0, False
        self._end = asyncio.get_running_loop().time() + settings.body_seconds

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError as error:
            raise Fault(
                408, f"the body took more than {self._settings.body_seconds:g} seconds"
            ) from error
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._bytes > self._settings.body_bytes:
            raise too_large(self._settings)
        return message


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """The model that a name of a request refers to.

    Attributes:
        name: by which it is asked for.
        deployed: the model.
        adapter: of it; "" for the model itself.
    """

    name: str
    deployed: Deployment
    adapter: str = ""


class Catalog:
    """The models of a server, by name. A name is a key, and never a path.

    Args:
        models: by name, at least one.

    Raises:
        ArgumentError: two of one name.
    """

    def __init__(self, models: Mapping[str, Deployment]) -> None:
        entries = [
            NamedModel(name=name, deployed=deployment) for name, deployment in models.items()
        ]
        entries += [
            NamedModel(name=adapter, deployed=deployment, adapter=adapter)
            for deployment in models.values()
            for adapter in deployment.adapters
        ]
        self._named = {entry.name: entry for entry in entries}
        if len(self._named) < len(entries):
            names = ", ".join(entry.name for entry in entries)
            raise ArgumentError(f"models and adapters are {names}; each has a name of its own")
        self._models = len(models)

    def __iter__(self) -> Iterator[NamedModel]:
        return iter(self._named.values())

    def find(self, name: str | None) -> NamedModel:
        """Returns the model of a name; the only model where no name is given."""
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
