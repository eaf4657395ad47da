"""What Prometheus is told of each engine of the pool, and of what went on between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_store.store_health import StoreHealth
from service.pool.engine_pool import EnginePool
from service.pool.member import Member
from speculation.messages import Stats

GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "waiting": ("Sequences in an engine's queue, of all fronts.", lambda stats: stats.num_waiting),
    "running": ("Sequences in an engine's batch, of all fronts.", lambda stats: stats.num_running),
    "blocks_available": ("Blocks an engine can hand out.", lambda stats: stats.blocks_free + stats.blocks_cached),
    "prefill_tokens_per_second": (
        "How fast an engine computes prompts, of late.",
        lambda stats: stats.prefill_tokens_per_second,
    ),
    "decode_tokens_per_second": (
        "How fast an engine brings tokens, of late, all sequences together.",
        lambda stats: stats.decode_tokens_per_second,
    ),
}


class PoolCollector(Collector):
    """Reads the pool when it is asked."""

    def __init__(self, pool: EnginePool, health: StoreHealth) -> None:
        self._pool = pool
        self._health = health

    def collect(self) -> Iterator[Metric]:
        members = list(self._pool.members.values())
        yield _gauge("serving", "Whether an engine takes requests.", {m: float(m.is_serving) for m in members})
        for name, (text, read) in GAUGES.items():
            values = {m: read(m.totals.latest) if m.totals.latest is not None else 0.0 for m in members}
            yield _gauge(name, text, values)
        deaths = CounterMetricFamily("forerun_pool_engine_deaths", "How often an engine died.", labels=["engine"])
        for member in members:
            deaths.add_metric([member.engine_id], member.num_deaths)
        yield deaths
        yield CounterMetricFamily(
            "forerun_pool_resumed", "Sequences that went on elsewhere.", value=self._pool.num_resumed
        )
        yield CounterMetricFamily(
            "forerun_pool_given_up", "Sequences that no engine could end.", value=self._pool.num_given_up
        )
        yield GaugeMetricFamily(
            "forerun_pool_waiting", "Sequences that wait for an engine that takes over.", value=self._pool.num_waiting
        )
        yield GaugeMetricFamily(
            "forerun_store_up", "Whether the metadata store answers.", value=float(self._health.is_up)
        )
        yield CounterMetricFamily(
            "forerun_store_failures", "Calls that the store did not answer.", value=self._health.num_failures
        )


def _gauge(name: str, text: str, values: dict[Member, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"forerun_pool_engine_{name}", text, labels=["engine"])
    for member, value in values.items():
        gauge.add_metric([member.engine_id], value)
    return gauge
