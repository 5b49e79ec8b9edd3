"""Who may ask, and how much: before anything of a body is read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardlib.serving.http.faults import Fault
from shardlib.serving.http.settings import Settings

#: What everybody may look at.
OPEN = frozenset({"/", "/health", "/figures", "/metrics"})


class Guard:
    """Lets requests with a token through whose bodies are small and come in time.

    `scope["state"]["salt"]` is what the prefixes of a token are known by.

    Args:
        app: behind it.
        settings: tokens and limits.
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
