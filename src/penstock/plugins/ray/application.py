"""Lifecycle of the Ray Serve application, which consists of the door and the replicas."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
)
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from penstock.config import LOOPBACK_HOSTS, WORTH, FleetSettings, ServerSettings, read_keys
from penstock.errors import PenstockError, SettingError
from penstock.plugins.ray.door import FLUSH_SECONDS, GOODBYE_SECONDS, Door
from penstock.plugins.ray.replica import Replica, Served

logger = logging.getLogger(__name__)

NAME = "penstock"
START_SECONDS = 600.0
HEALTH_SECONDS = 2.0
HUNG_SECONDS = 10.0
"""Timeout of a health check in seconds; Ray replaces a replica after three failures in a row."""
RAY_TRIES = 3
"""Attempts to start Ray, whose processes may take longer than its timeout on a busy machine."""
WATCH_SECONDS = 0.5
_DOOR_VERSION = uuid.uuid4().hex
"""Version of the door. Ray restarts a deployment if its version changes; the door's never does."""


class RayFailed(PenstockError):
    pass


class Fleet(FleetSettings):
    worth: float = WORTH
    gossip_seconds: float = 1.0
    """Interval in seconds at which a replica's summary is requested."""
    upscale_seconds: float = 10.0
    downscale_seconds: float = 300.0


def application(served: Served, fleet: Fleet) -> serve.Application:
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
                policy=AutoscalingPolicy(policy_function="penstock.plugins.ray.autoscaling.policy"),
            )
        }
    replicas = serve.deployment(Replica, name="replica").options(
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        max_ongoing_requests=2 * batch,  # others wait at the door, which can choose any replica
        max_queued_requests=queue,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HUNG_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_seconds + FLUSH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="penstock.plugins.ray.router.PrefixRouter",
            request_router_kwargs={"policy": fleet.routing, "worth": fleet.worth},
            request_routing_stats_period_s=fleet.gossip_seconds,
        ),
        **scaling,
    )
    door = serve.deployment(Door, name="door").options(
        num_replicas=1,  # the only one that counts the usage of keys and detects hung replicas
        ray_actor_options={"num_cpus": 0},
        # More than replicas and queue accept, so that the door refuses them in the API's format.
        max_ongoing_requests=2 * ((fleet.max_replicas or fleet.replicas) * 2 * batch + queue),
        graceful_shutdown_timeout_s=GOODBYE_SECONDS,
    )
    replicas = replicas.options(version=uuid.uuid4().hex, _internal=True)
    door = door.options(version=_DOOR_VERSION, _internal=True)
    return door.bind(replicas.bind(served), served)


@contextmanager
def running(served: Served, fleet: Fleet) -> Iterator[str]:
    """Context manager that deploys the application, yields its URL, and drains it at the end.

    With `RAY_ADDRESS`, it joins a running Ray cluster, and stops only this application at the end;
    a running Serve keeps its address.

    Raises:
        RayFailed: the replicas do not become ready, or Serve is reachable from other machines
            without a key.
    """
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
        http = _get_global_client().http_config  # a Serve that was running keeps its options
        if http.host not in LOOPBACK_HOSTS and not settings.needs_key:
            raise RayFailed(
                f"Serve is already running in that Ray cluster, and listens on {http.host}; set "
                f"PENSTOCK_API_KEY"
            )
        try:
            deploy(served, fleet)
            _wait_until_ready()
            read_keys_again(settings)
            host = "127.0.0.1" if http.host == "0.0.0.0" else http.host
            yield f"http://{f'[{host}]' if ':' in host else host}:{http.port}"
            _drain(settings.drain_timeout_seconds)
        finally:
            if shared:
                with suppress(TimeoutError):  # a replica hangs; Ray will end it
                    serve.delete(NAME)
    finally:
        if owned:
            ray.shutdown()


def deploy(served: Served, fleet: Fleet) -> None:
    target = serve.RunTarget(application(served, fleet), name=NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def _drain(seconds: float) -> None:
    drained = serve.get_app_handle(NAME).broadcast("drain", seconds)
    try:
        drained.results(timeout_s=seconds + FLUSH_SECONDS + 2 * GOODBYE_SECONDS)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.error("draining failed, open requests may be cut off: %s", type(error).__name__)


def read_keys_again(settings: ServerSettings) -> None:
    """Reread the key file and send the keys to the door; SettingError for an invalid file."""
    if settings.keys is not None:
        answers = serve.get_app_handle(NAME).broadcast("set_keys", read_keys(settings.keys))
        answers.results(timeout_s=GOODBYE_SECONDS)


def _start_ray() -> None:
    for tries_left in range(RAY_TRIES - 1, -1, -1):
        try:
            ray.init(namespace=NAME, include_dashboard=False, log_to_driver=False)
            return
        # A boundary: Ray raises Exception itself, among others.
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
                else [deployment.message for deployment in application.deployments.values()]
            )
            why = [line.strip() for text in said for line in text.splitlines() if line.strip()]
            raise RayFailed(
                f"the replicas were not ready after {START_SECONDS:.0f} s"
                if late
                else f"Ray Serve could not start the replicas: {why[-1] if why else 'no reason'}"
            )
        time.sleep(WATCH_SECONDS)


def wait_for_signal(settings: ServerSettings, restart: Callable[[], None]) -> None:
    signaled, hung_up, restarts = threading.Event(), threading.Event(), threading.Event()
    events = {signal.SIGTERM: signaled, signal.SIGINT: signaled, signal.SIGUSR1: restarts}
    if settings.keys is not None:
        events[signal.SIGHUP] = hung_up

    def note(number: int, frame: FrameType | None) -> None:
        events[signal.Signals(number)].set()

    acts = (
        (hung_up, partial(read_keys_again, settings), "keeping the previous keys"),
        (restarts, restart, "the replicas were not restarted"),
    )
    before = {number: signal.signal(number, note) for number in events}
    try:
        while not signaled.wait(WATCH_SECONDS):
            for event, act, failed in acts:
                if event.is_set():
                    event.clear()
                    try:
                        act()
                    except (SettingError, RayError, RayServeException, TimeoutError) as error:
                        logger.error("%s: %s", failed, error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
