"""Default sampling: the server's flags, then the model's generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.config import SAMPLED, ServerSettings
from penstock.engine.request import Sampling
from penstock.errors import SettingError

logger = logging.getLogger(__name__)


def default_sampling(settings: ServerSettings, model: Mapping[str, float]) -> Sampling:
    """Merge flags with the model's values; unsupported values are logged and ignored."""
    flags = {name: getattr(settings, name) for name in SAMPLED}
    known: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for name, value in model.items():
        try:
            Sampling(**dict[str, Any]({name: value}))
        except SettingError as error:
            logger.warning("ignoring a value of generation_config.json: %s", error)
        else:
            known.setdefault(name, value)
    return Sampling(**known)
