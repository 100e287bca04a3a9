"""Check every request before a route sees it: its key, host, size and how long it takes to arrive.

Without keys the server only listens on loopback, and only answers under loopback's names and to loopback's pages. So no
web page can use it, neither through a domain name that points here nor by a cross-site request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .protocol import Refusal
from .service import Settings

ADMIN = (
    "/pause", "/resume", "/is_paused", "/update_weights", "/init_weight_transfer_engine", "/start_weight_update",
    "/finish_weight_update", "/get_world_size", "/init_broadcaster", "/load_lora_adapter",
)  # fmt: skip
OPEN = ("/health", "/liveness", "/", "/favicon.ico")  # the page asks for the key itself
_HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)  # names of loopback


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            scope.setdefault("state", {})["owner"] = self.owner(scope["path"], headers)
            size = headers.get("content-length", "0")
            if len(size) > 18 or not size.isdecimal() or int(size) > self.settings.most_bytes:
                raise self.too_large()
            whole = await self.whole_body(receive)
        except Refusal as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        if whole is not None:  # else the client has gone
            await self.app(scope, whole, send)

    def owner(self, path: str, headers: dict[str, str]) -> str | None:
        """Whose request it is; None: the administrator's, who may see everything."""
        settings = self.settings
        if settings.loopback and not settings.api_keys:
            if not _HERE.fullmatch(headers.get("host", "")):
                message = "without a key this server answers under loopback's names only."
                raise Refusal(403, message, "permission_error")
            if (origin := headers.get("origin")) is not None and not _HERE.fullmatch(origin.partition("://")[2]):
                message = "without a key this server does not answer pages of other servers."
                raise Refusal(403, message, "permission_error")
        key = headers.get("authorization", "").removeprefix("Bearer ").strip()
        admin = settings.admin_key is not None and _is_one(key, [settings.admin_key])
        if path in ADMIN and not admin:
            why = "it needs the admin key" if settings.admin_key else "the server was started without --admin-key"
            raise Refusal(403, f"{path} is not allowed: {why}.", "permission_error")
        if settings.api_keys and path not in OPEN and not admin and not _is_one(key, settings.api_keys):
            raise Refusal(401, "the API key is wrong or missing.", "authentication_error", code="invalid_api_key")
        return None if admin else hashlib.sha256(key.encode()).hexdigest()

    def too_large(self) -> Refusal:
        return Refusal(413, f"a request may have up to {self.settings.most_bytes:,} bytes.", code="request_too_large")

    async def whole_body(self, receive: Receive) -> Receive | None:
        """Read the body, within bounds of size and time; the app then gets it at once. None: the client has gone"""
        body, more = bytearray(), True

        async def read() -> bool:
            nonlocal more
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                body.extend(message.get("body", b""))
                more = message.get("more_body", False)
                if len(body) > self.settings.most_bytes:
                    raise self.too_large()
            return True

        try:
            there = await asyncio.wait_for(read(), self.settings.patience)
        except TimeoutError:
            raise Refusal(408, "the request did not arrive in time.", code="request_timeout") from None
        if not there:
            return None
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Any:
            return first.pop() if first else await receive()

        return again


def _is_one(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of these; takes as long whichever it is."""
    found = False
    for known in keys:
        found |= hmac.compare_digest(key.encode(), known.encode())
    return found
