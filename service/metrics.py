"""What Prometheus is told: latencies as clients see them, and the engine's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.answer import Closing
from service.connections import ConnectionTable
from speculation.messages import STEP_SECONDS_BOUNDS, Stats

SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class EngineCollector(Collector):
    """The engines' latest `Stats`, summed over all of them and over their restarts."""

    def __init__(self) -> None:
        self.stats: Stats | None = None
        self.is_up = False
        self.model_name = ""
        """Name of the served model; empty before the first engine is ready."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("forerun_engine_up", "Whether an engine serves.", value=float(self.is_up))
        stats = self.stats
        if stats is None:
            return
        yield GaugeMetricFamily("forerun_sequences_waiting", "Sequences in the queue.", value=stats.num_waiting)
        yield GaugeMetricFamily("forerun_sequences_running", "Sequences in the batch.", value=stats.num_running)
        states = {"free": stats.blocks_free, "cached": stats.blocks_cached, "in_use": stats.blocks_in_use}
        blocks = GaugeMetricFamily("forerun_kv_blocks", "Blocks of the KV pool by state.", labels=["state"])
        for state, count in states.items():
            blocks.add_metric([state], count)
        yield blocks
        yield from _totals(stats.counters)
        yield _by_position("drafted", "Draft tokens", stats.drafted_per_position)
        yield _by_position("accepted", "Accepted draft tokens", stats.accepted_per_position)
        yield from _vllm_aliases(stats, self.model_name)
        skipped = CounterMetricFamily("forerun_drafts_skipped", "Steps without a draft, by reason.", labels=["reason"])
        for reason, count in stats.skipped_drafts.items():
            skipped.add_metric([reason], count)
        yield skipped
        buckets = list(zip(map(str, STEP_SECONDS_BOUNDS), map(float, stats.step_seconds_buckets), strict=True))
        buckets.append(("+Inf", stats.counters.get("steps", 0.0)))
        steps = HistogramMetricFamily("forerun_step_seconds", "Duration of an engine step.")
        steps.add_metric([], buckets, stats.step_seconds_sum)
        yield steps


class ConnectionCollector(Collector):
    """Connections of clients."""

    def __init__(self, table: ConnectionTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        table = self._table
        yield GaugeMetricFamily("forerun_connections", "Open connections of clients.", value=table.num_open)
        yield GaugeMetricFamily("forerun_connections_limit", "Most connections at a time.", value=table.max_open)
        ended = CounterMetricFamily(
            "forerun_connections_ended", "Connections that the service ended or refused, by reason.", labels=["reason"]
        )
        for reason, count in table.ended.items():
            ended.add_metric([reason], count)
        yield ended


class ServiceMetrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.requests = Counter("forerun_requests", "Requests answered.", ["route", "status"], registry=self.registry)
        self.large_requests = Gauge(
            "forerun_large_requests_waiting", "Requests over 64 KiB that wait to be parsed.", registry=self.registry
        )
        self.departures = Counter(
            "forerun_client_departures", "Clients that left before their answer.", registry=self.registry
        )
        self.stalls = Counter("forerun_client_stalls", "Clients dropped for not reading.", registry=self.registry)
        self.restarts = Counter(
            "forerun_engine_restarts", "Engines that died and were replaced.", registry=self.registry
        )
        self.inter_token = self._histogram("inter_token", "Between two outputs of a sequence.", SHORT)
        self._audited = Counter(
            "forerun_audited_requests", "Requests run again without speculation.", registry=self.registry
        )
        self._diverged = Counter(
            "forerun_audit_divergences", "Of them, those whose tokens differed.", registry=self.registry
        )
        self._ttft = self._histogram("ttft", "From arrival to the first token.", LONG, "method")
        self._tpot = self._histogram("tpot", "Mean time of a token after the first.", SHORT, "method")
        self._end_to_end = self._histogram("end_to_end", "From arrival to the last token.", LONG, "method")
        self._queue = self._histogram("queue", "In the engine's queue.", LONG)
        self._prefill = self._histogram("prefill", "Computing the prompt.", LONG)
        self._tokens = Counter("forerun_tokens", "Tokens by kind.", ["kind"], registry=self.registry)

    def observe(self, closing: Closing, method: str) -> None:
        """Count a request that was answered to its end."""
        timing = closing.metrics.timing
        self._ttft.labels(method).observe(timing.ttft)
        self._end_to_end.labels(method).observe(timing.end_to_end)
        if timing.tokens > 1:
            self._tpot.labels(method).observe(timing.tpot)
        self._queue.observe(timing.queue)
        self._prefill.observe(timing.prefill)
        self._tokens.labels("prompt").inc(closing.num_prompt_tokens)
        self._tokens.labels("cached").inc(closing.num_cached_tokens)
        self._tokens.labels("completion").inc(closing.num_completion_tokens)

    def note_audit(self, is_diverged: bool) -> None:
        """Count a request that was compared with plain decoding."""
        self._audited.inc()
        self._diverged.inc(float(is_diverged))

    def render(self) -> bytes:
        """The page Prometheus reads."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"forerun_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)


def _totals(counters: Mapping[str, float]) -> Iterator[Metric]:
    """The engine's totals; `name:method` counts what one proposer did, and `name` is then left out as their sum."""
    by_name: dict[str, dict[str, float]] = {}
    for key, value in counters.items():
        name, _, method = key.partition(":")
        by_name.setdefault(name, {})[method] = value
    for name, values in by_name.items():
        text = f"Engine total: {name.replace('_', ' ')}."
        if len(values) == 1 and "" in values:
            yield CounterMetricFamily(f"forerun_engine_{name}", text, value=values[""])
            continue
        family = CounterMetricFamily(f"forerun_engine_{name}", text, labels=["method"])
        for method, value in values.items():
            if method:
                family.add_metric([method], value)
        yield family


def _by_position(verb: str, text: str, counts: list[int]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        f"forerun_{verb}_at_position", f"{text} by position in the draft.", labels=["position"]
    )
    for position, count in enumerate(counts, start=1):
        family.add_metric([str(position)], count)
    return family


def _vllm_aliases(stats: Stats, model_name: str) -> Iterator[Metric]:
    """Counters of drafts under vLLM's names and labels, for tools that read those.

    vLLM counts positions from 0 and engines by number; all engines of this service together are engine "0".
    """
    labels, values = ["model_name", "engine"], [model_name, "0"]
    for counter, name, text in (
        ("drafts", "num_drafts", "Number of spec decoding drafts."),
        ("draft_tokens", "num_draft_tokens", "Number of draft tokens."),
        ("accepted_tokens", "num_accepted_tokens", "Number of accepted tokens."),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=labels)
        family.add_metric(values, stats.counters.get(counter, 0.0))
        yield family
    per_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        labels=[*labels, "position"],
    )
    for position, count in enumerate(stats.accepted_per_position):
        per_position.add_metric([*values, str(position)], count)
    yield per_position
