"""Prometheus metrics of one gateway; each is documented in docs/telemetry.md.

Labels take values from closed sets only (route templates, status codes, served models, error codes), so that no client
can make the number of series grow.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshnet.core import FinishCause

_TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)


class GatewayMetrics:
    """Own registry per gateway: several in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "meshnet_gateway_requests",
            "HTTP requests by route and status; 499 is a client that left before its answer began.",
            ["route", "status"],
            registry=self.registry,
        )
        self.errors = Counter(
            "meshnet_gateway_errors", "Error answers and error events by code.", ["code"], registry=self.registry
        )
        self.finished = Counter(
            "meshnet_gateway_generations", "Generations that ended, by cause.", ["cause"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "meshnet_gateway_prompt_tokens", "Prompt tokens of started generations.", ["model"], registry=self.registry
        )
        self.generated_tokens = Counter(
            "meshnet_gateway_generated_tokens", "Generated tokens.", ["model"], registry=self.registry
        )
        self.ttft = Histogram(
            "meshnet_gateway_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.token_interval = Histogram(
            "meshnet_gateway_token_interval_seconds",
            "Between one token and the next of the same generation.",
            ["model"],
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.repairs = Counter(
            "meshnet_gateway_repairs", "Routes repaired in the middle of an answer.", ["cause"], registry=self.registry
        )
        self.running = Gauge("meshnet_gateway_running_generations", "Generations running now.", registry=self.registry)
        for cause in FinishCause:
            self.finished.labels(cause.value)
        for kind in ("HopLost", "HopRefused"):
            self.repairs.labels(kind)

    def token(self, model: str, interval_s: float | None, since_request_s: float) -> None:
        """Count one token; ``interval_s`` is ``None`` for the first of a generation."""
        self.generated_tokens.labels(model).inc()
        if interval_s is None:
            self.ttft.labels(model).observe(since_request_s)
        else:
            self.token_interval.labels(model).observe(interval_s)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
