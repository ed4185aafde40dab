"""The only module that imports mlx-vlm: its language models with the interface of mlx-lm's.

`tests/vlm/test_contract_mlx_vlm.py` tests its assumptions. The weights of a vision tower are loaded
if `vlm_images` supports it; those for audio and video are not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.mlx_lm import (
    SWITCHES,
    TokenizerWrapper,
    read_text_side,
)
from penstock.models.source import first_line
from penstock.open_files import unchanged_limit
from penstock.plugins.vlm.vlm_caches import split_all

named.forbid_downloads()
with unchanged_limit():
    import mlx_vlm.models
    import mlx_vlm.models.cache as caches
    import mlx_vlm.utils
    from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    from penstock.plugins.vlm.vlm_images import FAMILIES, SEES_AHEAD, VlmImages, marker_of, tower_of

logger = logging.getLogger(__name__)
SWITCHES[QuantizedSwitchLinear] = SwitchLinear
POSITIONS = {"_position_ids": None, "_rope_deltas": mx.array([[0]])}
"""Attributes in which models keep positions of the last prompt with images, and the values to
reset them to."""


class TextModel(nn.Module):
    """A language model of mlx-vlm with the interface of mlx-lm's models."""

    span_reader: VlmImages | None = None
    image_reader: VlmImages | None = None

    def __init__(self, language_model: Any, arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.language_model = language_model
        self.args = arguments
        self._kept_positions = tuple(name for name in POSITIONS if hasattr(language_model, name))

    def __call__(self, inputs: mx.array, cache: Any = None, **arguments: Any) -> mx.array:
        for name in self._kept_positions:
            setattr(self.language_model, name, POSITIONS[name])
        logits: mx.array = self.language_model(inputs, cache=cache, **arguments).logits
        return logits

    def read_images(self, model: nn.Module, processor: Any, marker: str) -> None:
        """Keep the vision tower of the whole model, and enable image inputs."""
        self.tower = tower_of(model)
        self.span_reader = self.image_reader = VlmImages(
            model, processor, marker, mlx_vlm.utils.prepare_inputs
        )

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.language_model.layers
        return layers

    def make_cache(self) -> list[Any]:
        return list(caches.make_prompt_cache(self.language_model))

    def cache_parts(self) -> list[Any]:
        """Return the model's caches, split into parts that the engine can manage."""
        return split_all(self.language_model, self.make_cache())


PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MIXES_ARGUMENTS = ("LlavaProcessor",)
"""Processors of mlx-vlm that pass arguments for texts to image processors, which refuse them."""
UNSAFE = ("phi3small",)
"""Model types whose classes write outside their arrays; mlx-lm supports them."""


class VlmReader:
    """Reads model folders with mlx-vlm's classes; see `models.mlx_lm.ModelReader`."""

    release = f"mlx-vlm {version('mlx-vlm')}"

    def knows(self, model_type: str) -> bool:
        name = mlx_vlm.utils.MODEL_REMAPPING.get(model_type.lower(), model_type.lower())
        if name in UNSAFE:
            return False
        file = Path(mlx_vlm.models.__path__[0]) / name / "__init__.py"
        return bool(name.isidentifier() and file.is_file())

    def reads_images(self, config: Mapping[str, Any]) -> bool:
        text = config.get("text_config")
        attention = text.get(SEES_AHEAD) if isinstance(text, dict) else None
        return config.get("model_type") in FAMILIES and attention != "vision"

    def image_reader(self, source: str) -> VlmImages | None:
        folder = mlx_vlm.utils.get_model_path(source)
        fields = mlx_vlm.utils.load_config(folder)
        processor = _processor(folder) if self.reads_images(fields) else None
        if processor is None:
            return None
        model_class, _ = mlx_vlm.utils.get_model_and_args(fields)
        config = model_class.ModelConfig.from_dict(fields)
        marker = FAMILIES[fields["model_type"]]
        model = SimpleNamespace(config=config)
        return VlmImages(model, processor, marker, mlx_vlm.utils.prepare_inputs)

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        folder = mlx_vlm.utils.get_model_path(source)
        tokenizer, config = read_text_side(folder)
        return self.read_model(folder), tokenizer, config

    def read_model(self, folder: Path) -> nn.Module:
        if "model_file" in mlx_vlm.utils.load_config(folder):
            raise ModelError(f"{folder} contains code (model_file), which is not run")
        model = mlx_vlm.utils.load_model(folder, lazy=True)
        language_model = getattr(model, "language_model", None)
        if language_model is None:
            raise ModelError(f"{folder.name} is not a language model")
        config = model.config
        text_model = TextModel(language_model, getattr(config, "text_config", config))
        marker = marker_of(config)
        if marker is not None and (processor := _processor(folder)) is not None:
            text_model.read_images(model, processor, marker)
        return text_model


def _processor(folder: Path) -> Any:
    """Return the processor of a folder; None if there is none, so that only text is supported."""
    if not any((folder / name).is_file() for name in PROCESSORS):
        return None
    try:
        loaded = mlx_vlm.utils.load_processor(
            folder, add_detokenizer=False, trust_remote_code=False
        )
    # A boundary, as in `models.mlx_lm.load_folder`.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "%s is loaded without image support, as its processor fails: %s",
            folder.name,
            first_line(error),
        )
        return None
    if type(loaded).__name__ in MIXES_ARGUMENTS:
        _take_image_arguments(loaded.image_processor)
    return loaded


def _take_image_arguments(image_processor: Any) -> None:
    """Let an image processor ignore arguments that are for texts, as `padding`."""
    kind: Any = type(image_processor)
    known = frozenset(kind.valid_kwargs.__annotations__)

    def call(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        taken = {name: value for name, value in kwargs.items() if name in known}
        return kind.__call__(self, images, *args, **taken)

    image_processor.__class__ = type(kind.__name__, (kind,), {"__call__": call})
