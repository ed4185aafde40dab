"""Settings of a fleet: replicas of the server in Ray Serve, and the way to them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from penstock.config.setting import Setting, Settings

RoutingPolicy: TypeAlias = Literal["round-robin", "hash", "prefix", "prefix+load"]
WORTH = 8.0
"""Cost of recomputing a block of one conversation, in queued blocks.

Recomputing puts the block on two replicas, so fewer others fit. In replay, 8 keeps 19 of the 20
hits that 50 keeps; 1 loses a fifth (docs/scale.md).
"""


class FleetSettings(Settings):
    replicas: Annotated[
        int,
        Field(ge=1),
        Setting(
            "With --ray: engines at the start, and at least. --memory-limit is each one's.",
            "NUMBER",
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(ge=1),
        Setting(
            "With --ray: engines at most; how many there are goes by requests and ledgers.",
            "NUMBER",
            unset="always --replicas",
        ),
    ] = None
    cpus: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "With --ray: processors that Ray sets aside for a replica.",
            "NUMBER",
            flag="replica-cpus",
        ),
    ] = 1.0
    gpus: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "With --ray: GPUs that Ray sets aside for a replica.", "NUMBER", flag="replica-gpus"
        ),
    ] = 0.0
    routing: Annotated[
        RoutingPolicy, Setting("With --ray: which replica gets a prompt (docs/scale.md).")
    ] = "prefix+load"

    @model_validator(mode="after")
    def _the_most_is_not_below_the_least(self) -> FleetSettings:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}"
            )
        return self
