"""Door and replicas as one application of Ray Serve, and its life."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
)
from ray.serve.schema import ApplicationStatus

from penstock.config import WORTH, FleetSettings
from penstock.errors import PenstockError
from penstock.serve_ray.door import Door
from penstock.serve_ray.replica import Replica, Served

NAME = "penstock"
FLUSH_SECONDS = 60.0
"""Seconds a replica has, after its answers have ended, to write pending blocks."""
START_SECONDS = 600.0
"""Seconds that replicas may take to load the model."""
RAY_TRIES = 3
"""Attempts to start Ray, whose own processes have 30 s each, which a busy machine can exceed."""
WATCH_SECONDS = 0.5


class RayFailed(PenstockError):
    """Ray or an application in it could not be started."""


class Fleet(FleetSettings):
    """Numbers of replicas and doors, and the settings of their routing."""

    doors: int = 1
    worth: float = WORTH
    gossip_seconds: float = 1.0
    """Seconds between two requests for a replica's summary."""
    upscale_seconds: float = 10.0
    downscale_seconds: float = 300.0


def application(served: Served, fleet: Fleet) -> serve.Application:
    """Put door and replicas together; `serve.run` starts it."""
    batch, queue = served.limits.get("max_batch_size", 8), served.limits.get("max_queue", 256)
    drain_seconds = served.settings.drain_timeout_seconds
    scaling: dict[str, object] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fleet.replicas,
                max_replicas=fleet.max_replicas,
                target_ongoing_requests=batch,
                upscale_delay_s=fleet.upscale_seconds,
                downscale_delay_s=fleet.downscale_seconds,
                look_back_period_s=max(2.0, fleet.upscale_seconds / 2),
                metrics_interval_s=1.0,
                policy=AutoscalingPolicy(policy_function="penstock.serve_ray.autoscaling.policy"),
            )
        }
    replicas = serve.deployment(Replica, name="replica").options(
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        max_ongoing_requests=2 * batch,  # more waits at the door, where all replicas are seen
        max_queued_requests=queue,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_seconds + FLUSH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="penstock.serve_ray.router.PrefixRouter",
            request_router_kwargs={"policy": fleet.routing, "worth": fleet.worth},
            request_routing_stats_period_s=fleet.gossip_seconds,
        ),
        **scaling,
    )
    door = serve.deployment(Door, name="door").options(
        num_replicas=fleet.doors,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=(fleet.max_replicas or fleet.replicas) * 2 * batch + queue,
        graceful_shutdown_timeout_s=drain_seconds,
    )
    return door.bind(replicas.bind(served), served)


@contextmanager
def running(served: Served, fleet: Fleet) -> Iterator[str]:
    """Serve until the context is left; yield the URL.

    With `RAY_ADDRESS` it joins a running Ray, of which only this application is ended.

    Raises:
        RayFailed: the replicas did not become ready.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports to Ray
    settings = served.settings
    owned = not ray.is_initialized()
    shared = ray.is_initialized() or "RAY_ADDRESS" in os.environ
    if owned:
        _start_ray()
    try:
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=settings.host, port=settings.port),
        )
        target = serve.RunTarget(application(served, fleet), name=NAME, route_prefix="/")
        try:
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_ready()
            yield f"http://{settings.host}:{settings.port}"
        finally:
            if shared:
                serve.delete(NAME)
            else:
                serve.shutdown()
    finally:
        if owned:
            ray.shutdown()


def _start_ray() -> None:
    """Start Ray, or connect to the one that `RAY_ADDRESS` names."""
    for tries_left in range(RAY_TRIES - 1, -1, -1):
        try:
            ray.init(namespace=NAME, include_dashboard=False, log_to_driver=False)
            return
        # A boundary: Ray raises a plain Exception, among others.
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                raise RayFailed(f"Ray could not be started or reached: {error}") from error


def _wait_until_ready() -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        application = serve.status().applications.get(NAME)
        if application is not None and application.status == ApplicationStatus.RUNNING:
            return
        late = time.monotonic() > until
        if late or (
            application is not None and application.status == ApplicationStatus.DEPLOY_FAILED
        ):
            said = (
                []
                if application is None
                else [one.message for one in application.deployments.values()]
            )
            why = [line.strip() for text in said for line in text.splitlines() if line.strip()]
            raise RayFailed(
                f"the replicas are not ready after {START_SECONDS:.0f} s"
                if late
                else f"Ray Serve could not start the replicas: {why[-1] if why else 'no reason'}"
            )
        time.sleep(WATCH_SECONDS)


def wait_for_signal() -> None:
    """Wait for SIGTERM or Ctrl-C."""
    signaled = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        signaled.set()

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not signaled.wait(WATCH_SECONDS):
            pass
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
