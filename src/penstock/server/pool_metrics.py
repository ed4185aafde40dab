"""`/metrics` of several models: their states, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.pool.model_policy import Standing
from penstock.pool.model_pool import ModelPool


class PoolMetrics(Collector):
    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        ledger = self._pool.ledger
        limit = "Memory limit of all models together, never exceeded."
        yield GaugeMetricFamily("penstock_memory_limit_bytes", limit, ledger.limit_bytes)
        used = GaugeMetricFamily(
            "penstock_memory_used_bytes", "Bytes held or reserved, by purpose.", labels=["kind"]
        )
        for kind, nbytes in ledger.by_class().items():
            used.add_metric([kind.value], nbytes)
        yield used
        states = GaugeMetricFamily(
            "penstock_model_state", "1 for a model's current state.", labels=["model", "state"]
        )
        sizes = GaugeMetricFamily(
            "penstock_model_bytes", "Bytes of a loaded model in the ledger.", labels=["model"]
        )
        requests = GaugeMetricFamily(
            "penstock_model_open_requests", "Open requests of a model.", labels=["model"]
        )
        for model in self._pool.states():
            for standing in Standing:
                states.add_metric([model.name, standing.value], int(model.standing is standing))
            sizes.add_metric([model.name], 0 if model.standing is Standing.AWAY else model.nbytes)
            requests.add_metric([model.name], model.open_requests)
        yield from (states, sizes, requests)
