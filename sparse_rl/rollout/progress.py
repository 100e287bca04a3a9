"""A progress bar with tokens/s, busy rows and the cache's size; shows nothing when off."""

from __future__ import annotations

from typing import Any

from ..cache import SlotCache
from ..planning.memory import size


class ProgressBar:
    def __init__(self, on: bool, total: int, cache: SlotCache):
        self.on, self.total, self.cache, self.shown = on, total, cache, 0.0
        self.bar: Any = None

    def __enter__(self) -> ProgressBar:
        if self.on:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, desc="rollout", unit="traj")
        return self

    def __exit__(self, *exception):
        if self.bar is not None:
            self.bar.close()

    def update(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def show(self, busy: int, tokens: int, seconds: float) -> None:
        if self.bar is not None and (seconds - self.shown > 0.2 or not busy):
            self.shown = seconds
            self.bar.set_postfix_str(
                f"{tokens / seconds:,.0f} tok/s, {busy}/{self.cache.rows} rows, KV {size(self.cache.nbytes)}"
            )
