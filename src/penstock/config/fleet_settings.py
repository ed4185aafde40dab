"""Settings of a fleet: replicas of the server in Ray Serve, and routing to them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from penstock.config.setting import Setting, Settings

RoutingPolicy: TypeAlias = Literal["round-robin", "hash", "prefix", "prefix+load"]
WORTH = 8.0
"""Cost of recomputing a block of one conversation, in queued blocks.

Recomputing puts the block on two replicas, so fewer others fit. In replays, 8 keeps 19 of the 20
hits that 50 keeps; 1 loses a fifth (docs/scale.md).
"""


class FleetSettings(Settings):
    replicas: Annotated[
        int,
        Field(ge=1),
        Setting(
            "With --ray: initial and minimum number of engines, each with --memory-limit.",
            "NUMBER",
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(ge=1),
        Setting(
            "With --ray: maximum number of engines, which are scaled by requests and memory use.",
            "NUMBER",
            unset="always --replicas",
        ),
    ] = None
    cpus: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "With --ray: CPUs that Ray reserves for a replica.",
            "NUMBER",
            flag="replica-cpus",
        ),
    ] = 1.0
    gpus: Annotated[
        float,
        Field(ge=0.0),
        Setting("With --ray: GPUs that Ray reserves for a replica.", "NUMBER", flag="replica-gpus"),
    ] = 0.0
    routing: Annotated[
        RoutingPolicy,
        Setting("With --ray: policy that assigns prompts to replicas (docs/scale.md)."),
    ] = "prefix+load"

    @model_validator(mode="after")
    def _the_most_is_not_below_the_least(self) -> FleetSettings:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}"
            )
        return self
