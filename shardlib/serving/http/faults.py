"""What is answered where something is wrong, in the form of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shardlib.serving.hosting.load import FullError
from shardlib.serving.hosting.stream import StreamError
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown

#: Kinds of errors by status; others are the client's.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


class Fault(HTTPException):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: for people.
        code: for programs.
        param: the field that is wrong, if one is.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        text = message.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
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
        return Fault(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}")
    if first["type"] == "characters":
        path = str(first.get("ctx", {}).get("field"))
        return Fault(400, first["msg"], code="invalid_value", param=path.partition(".")[0])
    field = first["loc"][1:2]
    same = [detail for detail in error.errors() if detail["loc"][1:2] == field]
    name = str(field[0]) if field else None
    return Fault(400, _said(same, error.body), code="invalid_value", param=name)


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


def _said(errors: Sequence[Mapping[str, Any]], body: object) -> str:
    """What is wrong with a field: of errors of all types that it may have, the one that goes
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
    """Where in a body an error is, without the names of types that pydantic has among the parts."""
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
    """Has an application answer so."""

    async def http(request: Request, error: Exception) -> JSONResponse:
        del request
        assert isinstance(error, HTTPException)
        if isinstance(error, Fault):
            return error.response
        return Fault(error.status_code, error.detail, headers=error.headers).response

    async def wrong(request: Request, error: Exception) -> JSONResponse:
        del request
        assert isinstance(error, RequestValidationError)
        return _wrong_body(error).response

    async def busy(request: Request, error: Exception) -> JSONResponse:
        del request
        assert isinstance(error, FullError)
        return full(error).response

    async def dead(request: Request, error: Exception) -> JSONResponse:
        del request
        assert isinstance(error, StreamError)
        return ended(error).response

    async def other(request: Request, error: Exception) -> JSONResponse:
        del request, error
        return Fault(500, "the server has failed at this; its log says more").response

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(FullError, busy)
    app.add_exception_handler(StreamError, dead)
    app.add_exception_handler(Exception, other)
