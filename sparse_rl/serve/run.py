"""Start a server: open the engines, listen, and drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from torch import nn

from ..errors import SparseRLError
from ..rollout import Engine
from .app import make_app
from .desk import Desk, Place
from .http import connections
from .service import Service, Settings

_LAST = 10  # seconds to tell clients that their answers were ended


class _Server(uvicorn.Server):
    """A server whose first SIGTERM or Ctrl-C lets running answers finish for some time; the second one ends them."""

    def __init__(self, config: uvicorn.Config, desk: Desk, drain: float):
        super().__init__(config)
        self.desk, self.drain = desk, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self.drain, self.desk.end)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        if self.force_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off are no errors
        self.should_exit = True


@dataclass(frozen=True)
class Placed:
    """A model with the engines that serve it, by name."""

    model: nn.Module
    tokenizer: Any
    engines: dict[str, Engine]
    template: str | None = None
    waiting: int = 256


def service_of(placed: Placed, settings: Settings) -> Service:
    """Open the engines. The caller stops `desk`."""

    def opened(engine: Engine):
        tokens, longest = settings.prompt_tokens, settings.max_tokens
        return engine.open(tokens, longest, waiting=placed.waiting, tokenizer=placed.tokenizer)

    desk = Desk({name: Place(engine, opened) for name, engine in placed.engines.items()})
    desk.start()
    return Service(placed.model, placed.tokenizer, desk, settings, placed.template)


def run(
    placed: Placed,
    *,
    host: str,
    port: int,
    prompt_tokens: int,
    max_tokens: int,
    api_keys: tuple[str, ...],
    admin_key: str | None,
    weights_root: Path | None,
    loopback: bool,
    drain: float,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SparseRLError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another --port, or 0 for any free one."
        ) from error
    with listening:
        settings = Settings(prompt_tokens, max_tokens, api_keys, admin_key, weights_root, loopback)
        service = service_of(placed, settings)
        shown = f"[{host}]" if ":" in host else host
        for name in placed.engines:
            about = service.about(name)["sparse_rl"]
            budget = f", budget {about['budget']} + {about['interval']}" if "budget" in about else ""
            say(f"{name}: {about['compressor']}{budget}, {about['rows']} rows of up to {max_tokens:,} tokens")
        say(f"http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends)")
        config = uvicorn.Config(
            make_app(service),
            lifespan="off",  # `desk` is stopped below
            http=connections(settings.patience),
            ws="none",
            log_level="error",  # clients that send nonsense are told so
            timeout_graceful_shutdown=round(drain) + _LAST,
            timeout_keep_alive=30,
        )
        server = _Server(config, service.desk, drain)
        try:
            server.run(sockets=[listening])
        finally:
            service.desk.stop()
        if server.force_exit:
            raise KeyboardInterrupt
