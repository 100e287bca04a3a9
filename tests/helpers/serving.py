"""A server of the built-in model, in threads of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from sparse_rl import Engine, load_model
from sparse_rl.compressors import make
from sparse_rl.serve.app import make_app
from sparse_rl.serve.http import connections
from sparse_rl.serve.run import Placed, service_of
from sparse_rl.serve.service import Service, Settings

ASK = "{% if add_generation_prompt %}a:{% endif %}"
CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}" + ASK
TOKENS = 200  # of a prompt and its answer


@contextlib.contextmanager
def served(
    rows: int = 4, waiting: int = 64, dense_rows: int = 1, slots: str = "model", tokens: int = TOKENS, **settings
) -> Iterator[tuple[str, Service]]:
    """(address, service) of a server that listens."""
    model, tokenizer = load_model("tiny-sums", "float32")
    tokenizer.chat_template = CHAT
    engines = {"sums": Engine(model, make("rkv", slots=slots), 24, 4, rows, max_tokens=tokens)}
    if dense_rows:
        engines["sums:dense"] = Engine(model, "dense", rows=dense_rows, max_tokens=tokens)
    service = service_of(Placed(model, tokenizer, engines, waiting=waiting), Settings(100, tokens, **settings))
    protocol = connections(service.settings.patience)
    config = uvicorn.Config(make_app(service), http=protocol, ws="none", log_level="error", timeout_graceful_shutdown=5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            assert until(lambda: server.started), "the server did not start"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", service
        finally:
            server.should_exit = True
            thread.join()
            service.desk.stop()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether a condition of another thread comes true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def all_free(service: Service) -> bool:
    """Whether no answer is left, and no row is in use."""
    return service.desk.running == service.desk.waiting == service.desk.rows_in_use == 0
