"""The route /metrics, in Prometheus' text format.

Metrics that trainers act on also have vLLM's names: prime-rl admits as many episodes as these say there is room for. A
cache of `max_model_len` tokens per row is reported there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .service import Service


def metrics(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(Reading(service))
    return generate_latest(registry)


class Reading(Collector):
    """The server's counts at one moment."""

    def __init__(self, service: Service):
        self.service = service

    def collect(self) -> Iterator[Metric]:
        desk = self.service.desk
        counts = desk.counts
        for name, about, value in (
            ("requests", "Answers that were asked for", counts.requests),
            ("prompt_tokens", "Tokens of prompts", counts.prompt_tokens),
            ("generated_tokens", "Tokens that were sampled", counts.generated_tokens),
            ("cancelled", "Answers that nobody waited for any more", counts.cancelled),
            ("failed", "Answers that were lost to an error of the engine", counts.failed),
        ):
            yield CounterMetricFamily(f"sparse_rl_{name}", about, value)
        finished = CounterMetricFamily("sparse_rl_finished", "Answers that ended", labels=["reason"])
        for reason, count in list(counts.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        turns = CounterMetricFamily(
            "sparse_rl_turns", "Turns of named conversations, by their beginning", labels=["way"]
        )
        for way, count in list(counts.turns.items()):
            turns.add_metric([way], count)
        yield turns
        for name, about, value in (
            ("running", "Answers that run", desk.running),
            ("waiting", "Answers that wait for a row", desk.waiting),
            ("open", "Answers and conversations that the engines know", desk.open),
            ("conversations", "Conversations that may go on", len(self.service.conversations)),
            ("rows_in_use", "Rows of the cache in use", desk.rows_in_use),
            ("trace_bytes", "Bytes of traces that are kept", self.service.traces.size),
            ("paused", "1: no tokens are sampled", int(desk.paused)),
        ):
            yield GaugeMetricFamily(f"sparse_rl_{name}", about, value)
        version = GaugeMetricFamily("sparse_rl_weight_version", "Optimizer steps behind the weights", labels=["model"])
        rows = GaugeMetricFamily("sparse_rl_rows", "Rows of the cache", labels=["model"])
        for name, place in desk.places.items():
            version.add_metric([name], place.engine.version)
            rows.add_metric([name], place.engine.rows)
        yield version
        yield rows
        yield from self.as_vllm()

    def as_vllm(self) -> Iterator[Metric]:
        """Of the engine that serves requests without a name."""
        desk = self.service.desk
        name, place = next(iter(desk.places.items()))
        used = 0 if place.live is None else place.live.rows_in_use
        for metric, about, value in (
            ("num_requests_running", "Answers that run", desk.running),
            ("num_requests_waiting", "Answers that wait for a row", desk.waiting),
            ("kv_cache_usage_perc", "Share of the rows in use", used / place.engine.rows),
        ):
            family = GaugeMetricFamily(f"vllm:{metric}", about, labels=["engine", "model_name"])
            family.add_metric(["0", name], value)
            yield family
        size = str(place.engine.rows * self.service.settings.max_tokens)
        labels = ["engine", "kv_cache_size_tokens"]
        cache = GaugeMetricFamily("vllm:cache_config_info", "Rows, in tokens of the longest answers", labels=labels)
        cache.add_metric(["0", size], 1)
        yield cache
