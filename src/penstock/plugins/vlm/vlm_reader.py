"""The only module that imports mlx-vlm: its language models with the interface of mlx-lm's.

`tests/vlm/test_contract_mlx_vlm.py` tests its assumptions. The weights of a vision tower are loaded
if `vlm_images` supports it; those for audio and video are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.hidden_states import logits_of, shifted
from penstock.models.mlx_lm import SWITCHES, TokenizerWrapper, head_cache, read_text_side
from penstock.models.source import first_line
from penstock.open_files import unchanged_limit
from penstock.plugins.vlm.vlm_caches import split, split_all

named.forbid_downloads()
with unchanged_limit():
    import mlx_vlm.models
    import mlx_vlm.models.cache as caches
    import mlx_vlm.utils
    from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_vlm.speculative.drafters.mtp_split import detect_mtp_splitter

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
        logits: mx.array = self._output(inputs, cache, **arguments).logits
        return logits

    def _output(self, inputs: mx.array, cache: Any, **arguments: Any) -> Any:
        for name in self._kept_positions:
            setattr(self.language_model, name, POSITIONS[name])
        return self.language_model(inputs, cache=cache, **arguments)

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


Forward: TypeAlias = Callable[[Any, mx.array, mx.array, mx.array, Any], tuple[mx.array, mx.array]]
"""(head, token embeddings, hidden states one position earlier, tokens, cache of the head's keys and
values) -> (hidden states for logits, hidden states for the next call)."""


def _forward_normed(
    head: Any, embedded: mx.array, hidden: mx.array, tokens: mx.array, kv: Any
) -> tuple[mx.array, mx.array]:
    positions = mx.array(kv.offset).reshape(-1, 1) + mx.arange(tokens.shape[1])
    normed = head._forward_hidden(embedded, hidden, [kv], positions)
    return normed, normed


def _forward_streams(
    head: Any, embedded: mx.array, hidden: mx.array, tokens: mx.array, kv: Any
) -> tuple[mx.array, mx.array]:
    head._next_position = kv.offset
    mixed, streams = head._forward_hidden(embedded, hidden, tokens, [kv])
    return mixed, streams


def _forward_indexed(
    head: Any, embedded: mx.array, hidden: mx.array, tokens: mx.array, kv: Any
) -> tuple[mx.array, mx.array]:
    normed = head.mtp(hidden, embedded, head._mask_for(embedded, kv), kv)
    return normed, normed


HEADS: dict[str, Forward] = {
    "glm_moe_dsa": _forward_indexed,
    "qwen3_5": _forward_normed,
    "qwen3_5_moe": _forward_normed,
    "qwen4_exp": _forward_streams,
}
"""Forward pass of the multi-token head of each model type whose head is read."""


class HeadedTextModel(TextModel):
    """A language model of mlx-vlm with its multi-token head (MTP); see `models.mtp`."""

    states_by_token = True

    def __init__(self, text_model: TextModel, head: Any, forward: Forward) -> None:
        super().__init__(text_model.language_model, text_model.args)
        self.mtp = head
        self._forward = forward

    def __call__(self, inputs: mx.array, cache: Any = None, **arguments: Any) -> mx.array:
        if cache is None:
            return super().__call__(inputs, **arguments)
        *caches, (kv, state) = cache
        output = self._output(inputs, caches, return_hidden=True, **arguments)
        previous = shifted(output.hidden_states[-1], state)
        # Of the head only keys and values are kept; the rest is never evaluated.
        self._forward(self.mtp, self._embedded(inputs), previous, inputs, kv)
        logits: mx.array = output.logits
        return logits

    def predict(self, tokens: mx.array, hidden: mx.array, kv: Any) -> tuple[mx.array, mx.array]:
        """Return the head's logits and its hidden states after tokens, (b, n, ...)."""
        last, hidden = self._forward(self.mtp, self._embedded(tokens), hidden, tokens, kv)
        return logits_of(self.language_model, last), hidden

    def make_cache(self) -> list[Any]:
        (kv,) = self.mtp.make_cache()
        return [*super().make_cache(), head_cache(kv)]

    def cache_parts(self) -> list[Any]:
        *caches, (kv, _) = self.make_cache()
        return [*split_all(self.language_model, caches), head_cache(split(kv))]

    def _embedded(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.language_model.model.embed_tokens(tokens)
        return embedded


PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MIXES_ARGUMENTS = ("LlavaProcessor",)
"""Processors of mlx-vlm that pass arguments for texts to image processors, which refuse them."""
UNSAFE = ("phi3small",)
"""Model types whose classes write outside their arrays; mlx-lm supports them."""


class VlmReader:
    """Reads model folders with mlx-vlm's classes; see `models.mlx_lm.ModelReader`."""

    release = f"mlx-vlm {version('mlx-vlm')}"

    def __init__(self, head: Path | None = None) -> None:
        """Take the folder of a multi-token head, which may be the model's; None for no head."""
        self._head = head

    def headed(self, head: Path) -> VlmReader:
        """Return a reader of models together with the multi-token head in a folder."""
        return VlmReader(head)

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
        if self._head is not None:
            forward = HEADS[config.model_type]
            text_model = HeadedTextModel(text_model, _head_in(self._head), forward)
        marker = marker_of(config)
        if marker is not None and (processor := _processor(folder)) is not None:
            text_model.read_images(model, processor, marker)
        return text_model


def _head_in(folder: Path) -> nn.Module:
    """Read the multi-token head in a folder, its model's or one of its own, without evaluation."""
    splitter = detect_mtp_splitter(folder)
    if splitter is None:
        head: nn.Module = mlx_vlm.utils.load_model(folder, lazy=True)
        return head
    splitter.load_shard = _read_lazily
    head = splitter.load(folder, lazy=True)
    return head


def _read_lazily(file: Path, names: Sequence[str]) -> dict[str, mx.array]:
    weights: Any = mx.load(str(file))
    return {name: weights[name] for name in names}


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
