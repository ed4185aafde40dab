"""`/metrics`: engine statistics and latencies in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock.engine.offload.tier_kinds import TIER_KINDS
from penstock.engine.stats import SpillStats, Stats, StepTimes
from penstock.errors import EngineStopped
from penstock.server.recent import Recent
from penstock.server.response_store import ResponseStore
from penstock.server.service import Service
from penstock.tiers.worker import TierStats

FIRST_TOKEN_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
NEXT_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineMetrics()
        self.registry.register(self.engine)
        self._requests = Counter(
            "penstock_requests",
            "Requests that have ended, by path and finish reason.",
            ("path", "finish"),
            registry=self.registry,
        )
        self._first = Histogram(
            "penstock_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._next = Histogram(
            "penstock_inter_token_seconds",
            "Seconds between two tokens of an answer.",
            buckets=NEXT_TOKEN_SECONDS,
            registry=self.registry,
        )

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def ended(self, recent: Recent) -> None:
        self._requests.labels(recent.label, recent.finish or recent.state).inc()


class EngineMetrics(Collector):
    def __init__(self) -> None:
        self.stats: Stats | None = None
        self.waiting: dict[str | int, int] = {}
        """Waiting answers by client; only clients with named keys are exported."""
        self.key_names: Callable[[], Iterable[str]] = tuple
        self.stored: ResponseStore | None = None

    def collect(self) -> Iterator[Metric]:
        up = 0 if self.stats is None else 1
        yield gauge("engine_up", "Whether the engine's thread runs.", up)
        if self.stored is not None:
            yield gauge(
                "stored_responses", "Responses stored for retrieval by id.", len(self.stored)
            )
            nbytes = self.stored.nbytes
            yield gauge("stored_response_bytes", "Bytes of stored responses.", nbytes)
        if self.stats is None:
            return
        yield from _memory(self.stats)
        yield from _work(self.stats)
        waiting = {name: self.waiting.get(name, 0) for name in self.key_names()}
        if waiting:
            yield gauges("key_waiting", "Waiting answers, by key name.", "key", waiting)
        if self.stats.spilling is not None:
            yield from _spilling(self.stats.spilling)
        for name, tier in self.stats.tiers.items():
            yield from _tier(TIER_KINDS[name].metrics_prefix, tier)
        yield from _steps({"decode": self.stats.decode, "prefill": self.stats.prefill})


def router(service: Service) -> APIRouter:
    router = APIRouter(tags=["metrics"])
    metrics = Metrics()
    metrics.engine.stored = service.stored
    metrics.engine.key_names = service.access.names
    metrics.registry.register(service.access)
    service.listeners.append(metrics)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def scrape(http: HttpRequest) -> Response:
        """Return all metrics in Prometheus' text format."""
        try:
            stats, waiting = await service.ask(
                lambda view: (view.stats(), view.waiting_by_client())
            )
        except EngineStopped:
            stats, waiting = None, {}
        # No await between here and the encoding.
        metrics.engine.stats, metrics.engine.waiting = stats, waiting
        return exposed(metrics.registry, http.headers.get("accept", ""))

    return router


def exposed(registry: CollectorRegistry, accept: str) -> Response:
    encode, content_type = choose_encoder(accept)
    return Response(encode(registry), media_type=content_type)


def _memory(stats: Stats) -> Iterator[Metric]:
    yield gauge("memory_limit_bytes", "Memory limit, never exceeded.", stats.limit_bytes)
    words = "Bytes held or reserved, by purpose."
    yield gauges("memory_used_bytes", words, "kind", stats.by_kind)
    yield gauge("memory_held_bytes", "Bytes held, not counting reserved ones.", stats.held_bytes)
    yield gauge("memory_active_bytes", "Bytes that MLX reports as allocated.", stats.active_bytes)
    yield gauge("tree_nodes", "Nodes of the prefix tree.", stats.nodes)
    yield gauge("tree_tokens", "Tokens in the prefix tree.", stats.held_tokens)
    yield _counter("evicted_nodes", "Evicted nodes.", stats.evicted_nodes)
    yield _counter("evicted_bytes", "Bytes of evicted nodes.", stats.evicted_bytes)
    yield _counter("copied_bytes", "KV copied by splits and merges.", stats.copied_bytes)


def _work(stats: Stats) -> Iterator[Metric]:
    states = ("waiting", "prefilling", "restoring", "running", "preempted")
    open_answers = {state: getattr(stats, state) for state in states}
    yield gauges("answers", "Open answers, by state.", "state", open_answers)
    clients = "Clients with waiting answers; each may fill an equal share of the queue."
    yield gauge("waiting_clients", clients, stats.waiting_clients)
    words = "Largest number of waiting answers of one client."
    yield gauge("waiting_most_of_a_client", words, stats.most_waiting)
    yield _counter("answers_started", "Answers requested.", stats.requests)
    yield _counter("answers_finished", "Answers that have finished.", stats.finished)
    yield _counter("answers_failed", "Answers that have failed with an error.", stats.failed)
    yield _counter("prompt_tokens", "Tokens of admitted prompts.", stats.prompt_tokens)
    yield _counter("hit_tokens", "Prompt tokens read from the cache.", stats.hit_tokens)
    yield _counter("restored_tokens", "Hit tokens read from a cold tier.", stats.restored_tokens)
    yield _counter("prefilled_tokens", "Prompt tokens computed.", stats.prefilled_tokens)
    yield _counter("generated_tokens", "Tokens generated.", stats.generated_tokens)
    yield _counter("proposed_tokens", "Speculative tokens verified.", stats.proposed_tokens)
    yield _counter("accepted_tokens", "Speculative tokens accepted.", stats.accepted_tokens)
    yield _counter(
        "drafted_tokens", "Speculative tokens proposed by the draft model.", stats.drafted_tokens
    )
    yield _counter(
        "accepted_draft_tokens", "Accepted draft-model tokens.", stats.accepted_draft_tokens
    )
    yield _counter("failed_proposals", "Failed attempts to propose tokens.", stats.failed_proposals)
    yield _counter("preemptions", "Preemptions of running answers.", stats.preemptions)
    yield _counter("out_of_memory", "Out-of-memory errors of MLX.", stats.out_of_memory)


def _tier(name: str, stats: TierStats) -> Iterator[Metric]:
    counts = stats.counts
    if stats.limit_bytes:
        yield gauge(f"{name}_held_bytes", "Bytes of blocks in the tier.", stats.held_bytes)
        yield gauge(f"{name}_limit_bytes", "Limit of the tier in bytes.", stats.limit_bytes)
    yield gauge(f"{name}_up", "Whether the tier's store works.", int(stats.off is None))
    yield gauge(f"{name}_queued_bytes", "Bytes queued for writing.", stats.queued_bytes)
    yield _counter(f"{name}_faults", "Failures of the tier's store.", stats.faults)
    outcomes = ("written", "known", "refused", "read", "damaged", "missing")
    blocks = {outcome: getattr(counts, f"{outcome}_blocks") for outcome in outcomes}
    blocks["dropped"] = stats.dropped_blocks
    yield counters(f"{name}_blocks", "Blocks of the tier, by outcome.", "outcome", blocks)
    yield _counter(f"{name}_written_bytes", "Bytes of files written.", counts.written_bytes)
    yield _counter(f"{name}_read_bytes", "Bytes of files read.", counts.read_bytes)
    yield _counter(f"{name}_read_seconds", "Seconds spent on reading files.", counts.read_seconds)


def _spilling(stats: SpillStats) -> Iterator[Metric]:
    counts = stats.counts
    tokens = {"memory": stats.active_tokens, "tier": stats.spilled_tokens}
    yield gauges("kv_tokens", "Tokens in the prefix tree, by location.", "place", tokens)
    outcomes = ("cached", "read", "streamed", "lost")
    blocks = {outcome: getattr(counts, f"{outcome}_blocks") for outcome in outcomes}
    yield counters("spilled_blocks", "Blocks of spilled KV, by outcome.", "outcome", blocks)
    yield _counter("spilled_read_bytes", "Bytes of spilled KV read.", counts.read_bytes)


def _steps(kinds: dict[str, StepTimes]) -> Iterator[Metric]:
    counts = {kind: times.count for kind, times in kinds.items()}
    yield counters("steps", "Steps of the engine.", "kind", counts)
    seconds = GaugeMetricFamily(
        "penstock_step_seconds", "Duration of the last 512 steps.", labels=["kind", "quantile"]
    )
    for kind, times in kinds.items():
        seconds.add_metric([kind, "0.5"], times.median_seconds)
        seconds.add_metric([kind, "0.95"], times.p95_seconds)
        seconds.add_metric([kind, "1"], times.worst_seconds)
    yield seconds


def gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_{name}", words, value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"penstock_{name}", words, value)


def gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"penstock_{name}", words, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def counters(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"penstock_{name}", words, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
