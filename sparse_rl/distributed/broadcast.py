"""Tensors from one process to others that started by themselves: a trainer, and the servers that sample for it.

    sender = Broadcast.sender("127.0.0.1", 3, 60.0)       receiver = Broadcast.receiver("127.0.0.1", port, 1, 3, 60.0)
    sender.join()                                         receiver.join()
    sender.send(weight)                                   receiver.receive_into(weight)

A process group of gloo, apart from torch's default group, so a process can be in several. What travels is bytes of
tensors, through host memory; what they are is agreed on elsewhere. Nothing is unpickled. Whoever reaches the sender's
port can join the group, as with every process group: keep it in a network of your own.
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
    """Rank 0 sends, the others receive. Who stops to take part closes it, and the others are told at once."""

    def __init__(self, store: Store, rank: int, size: int, local: bool, seconds: float):
        self.store, self.rank, self.size, self.local = store, rank, size, local
        self.patience = datetime.timedelta(seconds=seconds)
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def sender(cls, host: str, size: int, seconds: float, port: int = 0) -> Broadcast:
        """host: the address of this machine at which the others find it; port: 0: any free one"""
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
        """Wait until all are there."""
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self.patience
        here = {"hostname": "127.0.0.1"} if self.local else {}
        device = ProcessGroupGloo.create_device(**here) if here else ProcessGroupGloo.create_default_device()
        options._devices = [device]
        try:
            self._group = ProcessGroupGloo(PrefixStore("weights", self.store), self.rank, self.size, options)
        except RuntimeError as error:
            why = _first_line(error)
            raise SparseRLError(f"not all {self.size} processes of the group have come ({why}).") from error

    def send(self, tensor: Tensor) -> None:
        self._move(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))

    def receive_into(self, tensor: Tensor) -> None:
        """tensor: contiguous, on the CPU"""
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
