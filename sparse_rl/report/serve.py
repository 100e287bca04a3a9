"""Serve the page on the loopback address while runs write, and make it anew when their files change.

There are two addresses, the page and its data; a request's path never names a file. Requests under any host name other
than loopback's are refused, so that no page of the web can read a run through a name of its own that points here.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..errors import SparseRLError
from ..signals import stoppable
from .document import document, dumped
from .page import page
from .samplers import POOL

LOOPBACK = "127.0.0.1"
EVERY = 2.0  # seconds between two requests of the page
PATIENCE = 10.0  # seconds that a connection may be silent, and that the head of a request may take to arrive
MOST = 32  # connections at a time; the next is closed at once
_FILES = ("metrics.jsonl", "timing.jsonl", POOL, "recipe.yaml", "samples")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0):
        self.paths, self.lock = list(paths), threading.Lock()
        self.places = threading.BoundedSemaphore(MOST)
        self.made: tuple[tuple, dict, bytes] | None = None  # (status of the files, the document, its JSON)
        if not 0 <= port < 65536:
            raise SparseRLError(f"--port is {port}; it must be between 0 (any free port) and 65535.")
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise SparseRLError(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, or 0 for any free one."
            ) from error

    def process_request(self, request, client_address) -> None:
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, which would have given the place back
            self.places.release()
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address) -> None:
        """Say nothing about a reader who leaves in the middle of an answer; report everything else."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def data(self) -> tuple[dict, bytes]:
        """The current document, and its JSON; only one request at a time makes it."""
        with self.lock:
            status = tuple(status_of(path) for path in self.paths)
            if self.made is None or self.made[0] != status:
                found = document(self.paths, live=EVERY)
                self.made = (status, found, dumped(found).encode())
            return self.made[1:]


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]  # typeshed has the base class here
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def handle_one_request(self) -> None:
        self.late = threading.Timer(self.timeout or PATIENCE, self.hang_up)
        self.late.daemon = True
        self.late.start()
        try:
            super().handle_one_request()
        finally:
            self.late.cancel()

    def parse_request(self) -> bool:
        """Read the head. A reader who sends it byte by byte would never be silent, so it has a deadline as a whole."""
        try:
            return super().parse_request()
        finally:
            self.late.cancel()

    def hang_up(self) -> None:
        with suppress(OSError):  # it has ended meanwhile
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        port = self.server.server_port
        ports = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers omit port 80
        if self.headers.get("Host") not in {name + end for name in (LOOPBACK, "localhost") for end in ports}:
            self.answer(403, "text/plain", b"this page is served to this machine only")
            return
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html", lambda: page(self.server.data()[0]).encode()),
            "/data.json": ("application/json", lambda: self.server.data()[1]),
        }
        if self.path not in answers:
            self.answer(404, "text/plain", b"there is nothing here; the page is at /")
            return
        kind, make = answers[self.path]
        try:
            self.answer(200, kind, make())
        except SparseRLError as error:  # for example, all runs are gone; they may come back
            self.answer(503, "text/plain", str(error).encode())

    do_HEAD = do_GET  # `answer` omits the body

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args) -> None:
        """Log nothing: the page asks every few seconds."""


def status_of(path: Path) -> tuple:
    """A tuple that changes when a run, or a run in this folder, is written. Files that vanish meanwhile are skipped."""
    found = []
    for folder in [path, *sorted(_children(path))]:
        newest = sorted((folder / "samples").glob("step-*/trajectories.jsonl"))[-1:]
        for file in [*(folder / name for name in _FILES), *newest]:
            try:
                status = file.stat()
            except OSError:
                continue
            found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _children(path: Path) -> list[Path]:
    try:
        return [child for child in path.iterdir() if child.is_dir()]
    except OSError:
        return []


def serve(paths: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    document(paths)  # complains about a folder that is not a run before anything is served
    with Server(paths, port) as server, stoppable():
        say(f"{server.address} (Ctrl-C ends it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")
