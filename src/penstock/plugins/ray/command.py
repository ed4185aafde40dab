"""`penstock serve --ray`: starts the replicas, and serves until stopped."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from penstock import __version__, config
from penstock.plugins.ray.environment import prepare_environment


def run_in_ray(
    model: str,
    name: str,
    settings: config.ServerSettings,
    limits: dict[str, Any],
    fleet: config.FleetSettings,
    *,
    preload: bool,
    weights_dtype: config.WeightsDtype,
    model_source: config.ModelSource,
) -> None:
    prepare_environment()
    from penstock.plugins.ray.application import Fleet, deploy, running, wait_for_signal
    from penstock.plugins.ray.replica import Served

    served = Served(model, name, settings, limits, preload, weights_dtype, model_source)
    replicas = Fleet(**fleet.model_dump())
    with running(served, replicas) as url:
        maximum = fleet.max_replicas
        count = fleet.replicas if maximum is None else f"{fleet.replicas} to {maximum}"
        print(f"penstock {__version__} serves {name} on {url} with {count} replicas in Ray Serve")
        if not url.endswith(f":{settings.port}"):
            print("port     that of the Serve already running in this Ray cluster")
        shared = os.environ.get("RAY_ADDRESS")
        ports = f"at {shared}" if shared else "listens on all addresses; requires its token"
        print(f"ray      {ports}")
        print(f"routing  {fleet.routing}")
        sys.stdout.flush()
        wait_for_signal(settings, partial(deploy, served, replicas))
