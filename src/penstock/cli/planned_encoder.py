"""Encoders in `penstock plan`: weights, and the memory of the longest text."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.cli.plan_several import PlannedMember
from penstock.cli.planned_spec import find_model
from penstock.memory.model_config import read_config
from penstock.models.encoder_types import is_encoder

CONFIG = "config.json"


def downloaded_encoder(model: str) -> Path | None:
    """Return the folder of an encoder; None for other models."""
    path = find_model(model)
    folder = path.parent if path.name == CONFIG else path
    file = folder / CONFIG
    return folder if file.is_file() and is_encoder(read_config(file)) else None


def encoder_bytes(folder: Path) -> int:
    """Return the bytes of an encoder's weights once loaded."""
    # MLX and numpy take a while to import, which --help need not wait for.
    from penstock.encoders.encoder import expected_bytes

    return expected_bytes(folder, sys.maxsize)


def planned_encoder(
    name: str, folder: Path, room_bytes: int, *, pinned: bool = False
) -> PlannedMember:
    """Return an encoder's memory, and its longest text within `room_bytes`."""
    from penstock.encoders.bert import batch_bytes
    from penstock.encoders.encoder_spec import read_encoder_spec

    spec, weights = read_encoder_spec(folder), encoder_bytes(folder)
    longest = spec.most_tokens
    while longest > 1 and weights + batch_bytes(spec, [longest]) > room_bytes:
        longest -= 1
    nbytes = batch_bytes(spec, [longest])
    return PlannedMember(
        name=name,
        pinned=pinned,
        weight_bytes=weights,
        bytes_per_token=-(-nbytes // longest),
        largest_tokens=longest,
        missing_bytes=max(0, weights + nbytes - room_bytes),
    )
