"""/metrics, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

if TYPE_CHECKING:
    from .service import Service


def metrics(service: Service) -> bytes:
    desk, registry = service.desk, CollectorRegistry()
    counts = desk.counts
    for name, about, value in (
        ("requests", "Answers that were asked for", counts.requests),
        ("prompt_tokens", "Tokens of prompts", counts.prompt_tokens),
        ("generated_tokens", "Tokens that were sampled", counts.generated_tokens),
        ("cancelled", "Answers that nobody waited for any more", counts.cancelled),
        ("failed", "Answers that were lost to an error of the engine", counts.failed),
    ):
        Counter(f"sparse_rl_{name}", about, registry=registry).inc(value)
    finished = Counter("sparse_rl_finished", "Answers that ended", ["reason"], registry=registry)
    for reason, count in list(counts.finished.items()):
        finished.labels(reason).inc(count)
    for name, about, value in (
        ("running", "Answers that run", desk.running),
        ("waiting", "Answers that wait for a row", desk.waiting),
        ("rows_in_use", "Rows of the cache in use", desk.rows_in_use),
        ("trace_bytes", "Bytes of traces that are kept", service.traces.size),
        ("paused", "1: no tokens are sampled", int(desk.paused)),
    ):
        Gauge(f"sparse_rl_{name}", about, registry=registry).set(value)
    version = Gauge("sparse_rl_weight_version", "Optimizer steps behind the weights", ["model"], registry=registry)
    rows = Gauge("sparse_rl_rows", "Rows of the cache", ["model"], registry=registry)
    for name, place in desk.places.items():
        version.labels(name).set(place.engine.version)
        rows.labels(name).set(place.engine.rows)
    return generate_latest(registry)
