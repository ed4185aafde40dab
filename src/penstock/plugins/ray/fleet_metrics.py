"""Prometheus metrics of all replicas, with a label for the replica, and of the door."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.plugins.ray.fleet_state import fleet_state
from penstock.plugins.ray.passing import Passing
from penstock.server.access import Access


class FleetMetrics(Collector):
    def __init__(self, access: Access, open_requests: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(access)
        self._open_requests = open_requests
        self._requests = 0
        self._retries = 0

    def ended(self, passing: Passing) -> None:
        self._requests += 1
        self._retries += passing.retries

    def collect(self) -> Iterator[Metric]:
        state = fleet_state()
        for name, words, count in (
            ("requests", "Forwarded requests that have ended.", self._requests),
            ("retries", "Retries on another replica after one failed.", self._retries),
            ("ejections", "Times that a replica was ejected.", state.ejections),
            ("routed_requests", "Requests accepted by a replica.", state.routed_requests),
            ("routed_blocks", "Blocks of the prompts of routed requests.", state.routed_blocks),
            ("hit_blocks", "Blocks expected in the chosen replica's cache.", state.known_blocks),
        ):
            yield CounterMetricFamily(f"penstock_door_{name}", words, count)
        yield GaugeMetricFamily(
            "penstock_door_open_requests", "Requests that have not ended.", self._open_requests()
        )
        yield GaugeMetricFamily(
            "penstock_door_waiting_requests", "Requests no replica has accepted.", state.waiting
        )
        up = GaugeMetricFamily(
            "penstock_replica_up", "Whether a replica answers.", labels=["replica"]
        )
        texts = state.metrics
        for name in sorted(texts):
            up.add_metric([name], int(not state.is_ejected(name)))
        yield up
        yield from labeled(texts)


def labeled(texts: dict[str, str]) -> Iterator[Metric]:
    r"""Merge the metrics of replicas, given in Prometheus' text format, adding a label `replica`.

    >>> (metric,) = labeled({"a": "x 1\n", "b": "x 2\n"})
    >>> [(sample.labels, sample.value) for sample in metric.samples]
    [({'replica': 'a'}, 1.0), ({'replica': 'b'}, 2.0)]
    """
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                joined.samples.append(sample._replace(labels=labels))
    yield from families.values()
