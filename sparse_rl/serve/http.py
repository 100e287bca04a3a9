"""Connections that refuse a request whose head is not HTTP, or is too slow to arrive, in OpenAI's format as well."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .protocol import Refusal


class Connection(H11Protocol):
    patience = 30.0  # seconds that the head of a request may take; `connections` changes it
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """From the first byte of a head to its last one."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(self.patience, self._too_late)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._refuse(Refusal(408, "the request did not arrive in time.", code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "this is not a request of HTTP/1.1, or its head is too long."))

    def _refuse(self, refusal: Refusal) -> None:
        self._unwatch()
        if self.cycle is not None:  # whoever works on the request need not answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no answer has begun
            body = json.dumps(refusal.body).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (
                h11.Response(status_code=refusal.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connections(patience: float) -> type[Connection]:
    return type("Connection", (Connection,), {"patience": patience})
