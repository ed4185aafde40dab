"""Folders that a model's multi-token head (MTP) or drafter comes from; no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import MTP
from penstock.errors import ModelError
from penstock.memory.heads import HEADED_TYPES, SPLIT_TYPES, DrafterSpec, drafter_spec
from penstock.memory.reading import has_head
from penstock.models import named
from penstock.models.recommended import source_of
from penstock.models.source import checked_source, find_file, read_object


def head_of(settings: Mapping[str, Any]) -> str | None:
    """Return the `draft_model` of an engine's settings if it becomes part of the model, else None.

    Multi-token heads do, and drafters that read the model's hidden states.

    Raises:
        ModelError: it names nothing that can be loaded, as far as that is known without a network.
    """
    draft = settings.get("draft_model")
    is_head = isinstance(draft, str | Path) and (
        str(draft) == MTP or is_split_head(draft) or state_drafter(draft) is not None
    )
    if isinstance(draft, str | Path) and not is_head:
        _check_draft(draft)
    return str(draft) if is_head else None


def _check_draft(draft: str | Path) -> None:
    if str(draft) in named.MODELS or Path(draft).is_file():
        return
    try:
        checked_source(source_of(str(draft)))
    except ModelError as error:
        raise ModelError(f"draft_model (--draft-model): {error}") from None


def is_split_head(source: str | Path) -> bool:
    """Return whether a folder, or a downloaded name, has a multi-token head alone."""
    return _type_in(source) in SPLIT_TYPES


def is_split_for(source: str | Path, model_type: object) -> bool:
    """Return whether a folder has a multi-token head alone that goes with a model type."""
    prefix = SPLIT_TYPES.get(_type_in(source))
    return prefix is not None and str(model_type).startswith(prefix)


def _type_in(source: str | Path) -> str:
    return str(read_object(source_of(str(source)), "config.json").get("model_type"))


def state_drafter(source: str | Path) -> DrafterSpec | None:
    """Return the drafter in a folder or of a downloaded name; None if it has none.

    Raises:
        ModelError: see `drafter_spec`.
    """
    return drafter_spec(read_object(source_of(str(source)), "config.json"), source)


def head_folder(head: str | Path, model_folder: Path) -> Path:
    """Return the folder with the weights of a head; `MTP` stands for that of its model."""
    if str(head) == MTP:
        return model_folder
    config = find_file(source_of(str(head)), "config.json")
    return Path(head).expanduser() if config is None else config.parent


def ships_head(source: str, model_type: object) -> bool:
    """Return whether a model's folder, or its copy in the hub's cache, has a head that is read."""
    config = find_file(source_of(source), "config.json")
    return config is not None and model_type in HEADED_TYPES and has_head(config.parent)
