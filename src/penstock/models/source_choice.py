"""Choice between mlx-lm and mlx-vlm, by a folder's model type and vision tower."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import ModelSource
from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.memory.families import shares_index
from penstock.memory.heads import drafter_spec
from penstock.memory.reading import has_float8_blocks, has_tensor
from penstock.models.encoder_types import ENCODER_NOTE, is_encoder
from penstock.models.mlx_lm import MlxLmReader, ModelReader
from penstock.models.recommended import pull
from penstock.models.source import SourceChoice, not_downloaded, read_object

INSTALL = "pip install mlx-vlm"
TOWERS = ("vision", "visual")
"""Substrings that identify the weights of a vision tower."""
_DRAFTER = re.compile(
    r"eagle-?3|eagle$|dflash|dspark|_mtp$|(gemma4|glimmer)\w*_assistant", re.IGNORECASE
)
"""Names of models that read hidden states of the model that they draft for."""


def choose_source(source: str, asked: ModelSource = "auto") -> tuple[SourceChoice, ModelReader]:
    """Return the library that loads a model, and its reader.

    With `auto`, mlx-vlm is used for model types that only it supports, for models whose images it
    can read, and for 8-bit floats in blocks; otherwise mlx-lm.

    Args:
        source: checked folder, or hub name.
        asked: requested library, or `auto`.

    Raises:
        ModelError: mlx-vlm is needed but not installed, or does not support the model type; or the
            folder has no language model, but a drafter that needs hidden states of one.
    """
    refuse_drafter(source)
    mlx_lm = MlxLmReader()
    if asked == "mlx-lm":
        return SourceChoice("mlx-lm", "--model-source"), mlx_lm
    model_type = _config(source).get("model_type")
    if asked == "mlx-vlm":
        mlx_vlm = _mlx_vlm()
        if mlx_vlm is None:
            raise ModelError(f"--model-source mlx-vlm needs mlx-vlm: {INSTALL}")
        if isinstance(model_type, str) and not mlx_vlm.knows(model_type):
            raise ModelError(f"{source}: {mlx_vlm.release} has no model type {model_type}")
        return SourceChoice("mlx-vlm", "--model-source"), mlx_vlm
    if not isinstance(model_type, str):
        return SourceChoice("mlx-lm", "no model type is known"), mlx_lm
    if mlx_lm.knows(model_type) and shares_index(_config(source)):
        mlx_vlm, lacks = _mlx_vlm(), "some layers reuse another layer's sparse-attention index"
        if mlx_vlm is None or not mlx_vlm.knows(model_type):
            raise ModelError(
                f"{source}: {lacks}, which {mlx_lm.release} does not support; mlx-vlm does: "
                f"{INSTALL}"
            )
        return SourceChoice("mlx-vlm", f"{lacks}, which mlx-lm does not support"), mlx_vlm
    if mlx_lm.knows(model_type):
        images = _image_reader(source)
        if images is not None:
            why = f"it reads images of the model type {model_type}, and mlx-lm only text"
            return SourceChoice("mlx-vlm", why), images
        if has_float8_blocks(_config(source)):
            mlx_vlm = _mlx_vlm()
            if mlx_vlm is not None and mlx_vlm.knows(model_type):
                why = "it keeps FP8 weights in 8 bits (mxfp8), and mlx-lm does not"
                return SourceChoice("mlx-vlm", why), mlx_vlm
        return SourceChoice("mlx-lm", f"it has the model type {model_type}"), mlx_lm
    if is_encoder(_config(source)):
        raise ModelError(f"{source}: {ENCODER_NOTE}; penstock serve has its embeddings or scores")
    lacks = f"{mlx_lm.release} has no model type {model_type}"
    # Imported last because it takes seconds.
    mlx_vlm = _mlx_vlm()
    if mlx_vlm is None:
        raise ModelError(f"{source}: {lacks}; mlx-vlm may have it: {INSTALL}")
    if not mlx_vlm.knows(model_type):
        raise ModelError(f"{source}: {lacks}, and {mlx_vlm.release} has none either")
    return SourceChoice("mlx-vlm", lacks), mlx_vlm


def refuse_drafter(source: str) -> None:
    """Raise ModelError if a folder or name is that of a drafter, which is no language model."""
    config = _config(source)
    classes = config.get("architectures")
    names = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    drafter = next((str(name) for name in names if _DRAFTER.search(str(name))), None)
    if drafter is not None:
        takes = "language models with the same tokenizer, mtp, and drafters of DFlash and EAGLE-3"
        if _is_supported(config):
            takes = "it beside its model, once it is on this machine (penstock pull)"
        raise ModelError(
            f"{source} is no language model but a drafter ({drafter[:64]}), which reads hidden "
            f"states of another; --draft-model takes {takes}"
        )


def _is_supported(config: dict[str, Any]) -> bool:
    try:
        return drafter_spec(config, "") is not None
    except ModelError:
        return False


def _image_reader(source: str) -> ModelReader | None:
    """Return mlx-vlm's reader if it is installed and can use the model's vision tower."""
    config = _config(source)
    if "vision_config" not in config:
        return None
    mlx_vlm = _mlx_vlm()
    if mlx_vlm is None or not mlx_vlm.reads_images(config):
        return None
    # A folder converted by mlx-lm has the config of a tower, but not its weights.
    folder = Path(source) if Path(source).is_dir() else pull(source)
    return mlx_vlm if has_tensor(folder, TOWERS) else None


def _mlx_vlm() -> ModelReader | None:
    try:
        reader = extension("mlx-vlm")
    except ImportError:
        return None
    return None if reader is None else reader()


def _config(source: str) -> dict[str, Any]:
    config = read_object(source, "config.json")
    if config or Path(source).exists():
        return config
    # As in `source.find_file`.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    unreached: LocalEntryNotFoundError | None = None
    # A boundary: mlx-lm's loader reports what else is wrong with a name.
    with suppress(Exception):
        try:
            hf_hub_download(source, "config.json")
        except LocalEntryNotFoundError as error:
            unreached = error
    if unreached is not None:
        raise not_downloaded(source, unreached) from unreached
    return read_object(source, "config.json")
