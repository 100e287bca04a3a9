"""Send tensors from one process to others that were started separately: from a trainer to the servers that sample.

    sender = Broadcast.sender("127.0.0.1", 3, 60.0)       receiver = Broadcast.receiver("127.0.0.1", port, 1, 3, 60.0)
    sender.join()                                         receiver.join()
    sender.send(weight)                                   receiver.receive_into(weight)

This is a process group of gloo, apart from torch's default group, so a process can be in several. Only the bytes of
tensors travel, through host memory; names and shapes are agreed on elsewhere, and nothing is unpickled. As with every
process group, anyone who reaches the sender's port can join, so keep it in a private network.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket

import torch
from torch import Tensor
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from ..errors import SparseRLError


class Broadcast:
    """A group in which rank 0 sends and the others receive. A process that leaves must close it; the others notice at
    once.
    """

    def __init__(self, store: Store, rank: int, size: int, local: bool, seconds: float):
        self.store, self.rank, self.size, self.local = store, rank, size, local
        self.patience = datetime.timedelta(seconds=seconds)
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def sender(cls, host: str, size: int, seconds: float, port: int = 0) -> Broadcast:
        """The sender's end. host: the address at which the others find this machine; port: 0: any free one"""
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        patience = datetime.timedelta(seconds=seconds)
        store = TCPStore(host, port, None, True, patience, False, master_listen_fd=listening.detach())
        return cls(store, 0, size, is_loopback(host), seconds)

    @classmethod
    def receiver(cls, host: str, port: int, rank: int, size: int, seconds: float) -> Broadcast:
        try:
            store = TCPStore(host, port, None, False, datetime.timedelta(seconds=seconds), False)
        except (RuntimeError, ValueError) as error:
            raise SparseRLError(f"{host}:{port} does not answer ({_first_line(error)}).") from error
        return cls(store, rank, size, is_loopback(host), seconds)

    @property
    def port(self) -> int:
        assert isinstance(self.store, TCPStore)
        return self.store.port

    def join(self) -> None:
        """Wait until all processes have joined."""
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self.patience
        here = {"hostname": "127.0.0.1"} if self.local else {}
        device = ProcessGroupGloo.create_device(**here) if here else ProcessGroupGloo.create_default_device()
        options._devices = [device]
        try:
            self._group = ProcessGroupGloo(PrefixStore("weights", self.store), self.rank, self.size, options)
        except RuntimeError as error:
            why = _first_line(error)
            raise SparseRLError(f"not all {self.size} processes of the group have joined ({why}).") from error

    def send(self, tensor: Tensor) -> None:
        self._move(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))

    def receive_into(self, tensor: Tensor) -> None:
        """Receive into a contiguous tensor on the CPU."""
        self._move(tensor.view(-1).view(torch.uint8))

    def _move(self, content: Tensor) -> None:
        assert self._group is not None
        if not len(content):
            return
        try:
            work = self._group.broadcast([content], BroadcastOptions())  # pyright: ignore[reportAttributeAccessIssue]
            work.wait()
        except RuntimeError as error:
            self.close()
            raise SparseRLError(f"another process of the group is gone, or too slow ({_first_line(error)}).") from error

    def close(self) -> None:
        self._group = None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
