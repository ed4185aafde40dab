"""Sampling of requests that do not say their own: the server's flags, then the model's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.config import SAMPLED, ServerSettings
from penstock.engine.request import Sampling
from penstock.errors import SettingError

logger = logging.getLogger(__name__)


def default_sampling(settings: ServerSettings, model: Mapping[str, float]) -> Sampling:
    """Return the sampling of a request that says none: the settings', then the model's own.

    Wishes of the model that the engine cannot fulfill are passed over, with a line in the log.
    """
    given = {name: getattr(settings, name) for name in SAMPLED}
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in model.items():
        try:
            Sampling(**dict[str, Any]({name: value}))
        except SettingError as error:
            logger.warning("generation_config.json: %s; it is passed over", error)
        else:
            known.setdefault(name, value)
    return Sampling(**known)
