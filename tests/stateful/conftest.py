"""Hypothesis profiles: quick and repeatable by default, long and random with `soak`."""

import os

from hypothesis import HealthCheck, settings

LAZY = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
COMMON = {"deadline": None, "suppress_health_check": LAZY, "print_blob": True}

settings.register_profile(
    "default", max_examples=25, stateful_step_count=30, derandomize=True, database=None, **COMMON
)
settings.register_profile("soak", max_examples=600, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
