"""`/metrics` of several models: their states, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.pool.model_policy import Standing
from penstock.pool.model_pool import ModelPool
from penstock.server.metrics import gauge, gauges


class PoolMetrics(Collector):
    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        ledger, models = self._pool.ledger, self._pool.states()
        limit = "Memory limit of all models together, never exceeded."
        yield gauge("memory_limit_bytes", limit, ledger.limit_bytes)
        by_kind = {kind.value: nbytes for kind, nbytes in ledger.by_class().items()}
        yield gauges("memory_used_bytes", "Bytes held or reserved, by purpose.", "kind", by_kind)
        states = GaugeMetricFamily(
            "penstock_model_state", "1 for a model's current state.", labels=["model", "state"]
        )
        for model in models:
            for standing in Standing:
                states.add_metric([model.name, standing.value], int(model.standing is standing))
        yield states
        sizes = {x.name: 0 if x.standing is Standing.AWAY else x.nbytes for x in models}
        yield gauges("model_bytes", "Bytes of a loaded model in the ledger.", "model", sizes)
        requests = {model.name: model.open_requests for model in models}
        yield gauges("model_open_requests", "Open requests of a model.", "model", requests)
