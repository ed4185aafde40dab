"""Images of mlx-vlm's models: placeholders in a prompt, embeddings and positions.

place      run the model's processor on one image ──> placeholder text and tokens
embed      run the vision tower on one image ──> embeddings of these tokens
arguments  embeddings and 3-axis positions of a chunk, and inputs of the first layers
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from io import BytesIO
from math import prod
from threading import Lock
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image, ImageOps

from penstock.errors import PenstockError
from penstock.models.image_reader import ImageError, ImageFile, PlacedImage
from penstock.models.input_spans import InputSpan, SpanEmbeddings, SpanPositions

QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "idefics3": "<image>",
    "internvl_chat": "<image>",
    "kimi_vl": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
    "llava": "<image>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "smolvlm": "<image>",
}
"""Text that marks an image before its size is known, by model type. In these models, image tokens
have causal attention, so that a prefill chunk may end within an image."""
RETURNS_STATES = ("llava",)
"""Model types whose tower returns the states of all its layers."""
SEES_AHEAD = "use_bidirectional_attention"
"""Config key whose value `vision` means bidirectional attention within an image."""
LANGUAGE_MODEL = "language_model"
REMEMBERED = 4_096
"""Maximum number of cached image sizes, and of images remembered as decodable."""
SCORE_COPIES = 3
ACTIVATION_COPIES = 6
PIXEL_COPIES = 6
TABLE_COPIES = 6
PIXEL_BYTES = 3
"""Bytes of a decoded pixel."""


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Values that depend only on an image's size."""

    text: str
    tokens: tuple[int, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the arrays that the processor returns."""
    pixel_shape: tuple[int, ...]
    places: Mapping[str, mx.array]
    """Arrays of the grid, by argument name of the model's `get_rope_index`."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    image: ImageFile
    grid: ImageGrid


class VlmImages:
    """Image support of one model: `ImageReader` for the server, `SpanReader` for the engine.

    Args:
        model: the whole model of mlx-vlm.
        processor: the model's processor.
        marker: text that marks an image before its size is known.
        prepare: mlx-vlm's function that runs a processor.
    """

    def __init__(
        self, model: Any, processor: Any, marker: str, prepare: Callable[..., dict[str, Any]]
    ) -> None:
        self.marker = marker
        self._prepare = prepare
        self._config = model.config
        self._processor = processor
        self._model = model
        self._lock = Lock()
        self._grids: OrderedDict[tuple[int, int], ImageGrid] = OrderedDict()
        self._whole: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        token = getattr(self._config, "image_token_index", None)
        self._token = int(self._config.image_token_id if token is None else token)

    # ---- places

    def place(self, image: ImageFile) -> PlacedImage:
        digest = blake2b(image.data, digest_size=32).digest()
        with self._lock:
            size = self._whole.get(digest)
            grid = None if size is None else self._grids.get(size)
            if grid is None:
                picture = _decoded(image)
                grid = self._grids.get(picture.size)
                if grid is None:
                    grid = self._grid(picture)
                    _remember(self._grids, picture.size, grid)
                _remember(self._whole, digest, picture.size)
        identity = json.dumps([self.marker, grid.shapes, grid.tokens]).encode()
        key = blake2b(digest + identity, digest_size=32).digest()
        return PlacedImage(grid.text, grid.tokens, key, ImageSource(image, grid))

    def _grid(self, picture: Image.Image) -> ImageGrid:
        inputs = self._inputs(picture)
        tokens = np.array(inputs["input_ids"])[0].tolist()
        places = [i for i, token in enumerate(tokens) if token == self._token]
        if not places:
            raise ImageError("the model's processor returns no tokens for it")
        arrays = {name: array for name, array in inputs.items() if isinstance(array, mx.array)}
        pixels = inputs["pixel_values"]
        shape = _shape(pixels)
        shapes = tuple(sorted((name, tuple(array.shape)) for name, array in arrays.items()))
        grids = {name: array for name, array in arrays.items() if name.startswith("image_grid")}
        mx.eval(grids)
        values = tuple((name, *np.array(grid).ravel().tolist()) for name, grid in grids.items())
        text = self._processor.tokenizer.decode(tokens, skip_special_tokens=False)
        return ImageGrid(
            text,
            tuple(tokens[places[0] : places[-1] + 1]),
            (*shapes, *values),
            shape,
            grids,
        )

    def _inputs(self, picture: Image.Image) -> dict[str, Any]:
        return self._prepare(
            self._processor, images=[picture], prompts=[self.marker], image_token_index=self._token
        )

    # ---- embeddings

    @cached_property
    def _tower(self) -> Any:
        """Copy of the model with separate attributes, for the thread that runs the tower."""
        return own_attributes(self._model)

    @cached_property
    def _text(self) -> Any:
        """Copy of the model with separate attributes, for the engine's thread."""
        return own_attributes(self._model)

    @cached_property
    def _widest(self) -> int:
        weights: Any = tree_flatten(self._model.parameters())
        shapes = [w.shape for name, w in weights if not name.startswith(LANGUAGE_MODEL)]
        return max((shape[0] for shape in shapes if len(shape) > 1), default=1)

    @cached_property
    def _table_bytes(self) -> int:
        """Bytes of position tables that some towers compute for each image."""
        modules: list[Any] = self._model.modules()
        sides = [(m.max_height, m.max_width, m.dim) for m in modules if hasattr(m, "max_height")]
        numbers = sum(int(h * w * dim) // 2 for h, w, dim in sides)
        return TABLE_COPIES * mx.complex64.size * numbers

    def embed_bytes(self, span: InputSpan) -> tuple[int, int]:
        source: ImageSource = span.source
        vision, text = self._config.vision_config, self._config.text_config
        layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
        kept = span.tokens * text.hidden_size * layers * 4
        shape, side = source.grid.pixel_shape, int(getattr(vision, "patch_size", 14))
        tiles = prod(shape[:-3]) if len(shape) > 3 and shape[-1] > side else 1
        patches = -(-prod(shape) // (3 * side * side))
        heads = int(
            getattr(vision, "num_heads", None) or getattr(vision, "num_attention_heads", None) or 16
        )
        scores = SCORE_COPIES * 4 * heads * patches * -(-patches // tiles)
        activations = ACTIVATION_COPIES * 4 * patches * self._widest
        decoded = PIXEL_BYTES * source.image.width * source.image.height
        pixels = PIXEL_COPIES * (decoded + 4 * prod(shape))
        states = 0
        if self._config.model_type in RETURNS_STATES:
            states = 4 * patches * vision.hidden_size * (vision.num_hidden_layers + 2)
        return kept, kept + scores + activations + states + pixels + self._table_bytes

    def embed(self, span: InputSpan) -> SpanEmbeddings:
        source: ImageSource = span.source
        inputs = self._inputs(_decoded(source.image))
        tokens, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values")
        mask = inputs.pop("attention_mask", None)
        features = self._tower.get_input_embeddings(tokens, pixels, mask=mask, **inputs)
        ids = np.array(tokens)[0]
        places = np.flatnonzero(ids == self._token)
        first, end = int(places[0]), int(places[-1]) + 1
        # A copy, because a slice would keep the buffer of all rows alive.
        rows = mx.take(features.inputs_embeds[0], mx.arange(first, end), axis=0)
        deep = tuple(features.deepstack_visual_embeds or ())
        marked = None
        if deep:
            marked = np.array(features.visual_pos_masks).reshape(-1)[first:end].astype(bool)
        mx.eval(rows, deep)
        if tuple(ids[first:end].tolist()) != source.grid.tokens:
            raise PenstockError("the processor returned other tokens for an image than before")
        return SpanEmbeddings(rows, deep, marked)

    # ---- positions

    @property
    def _has_axes(self) -> bool:
        return hasattr(self._model.language_model, "get_rope_index")

    def positions(self, prompt: Sequence[int], spans: Sequence[InputSpan]) -> SpanPositions:
        if not self._has_axes:
            return SpanPositions(None)
        ids = np.array(prompt, np.int64)
        inside = np.zeros(len(ids), bool)
        for span in spans:
            inside[span.start : span.end] = True
        # An image token that a user wrote is not an image.
        ids[~inside & (ids == self._token)] = 0
        sources: list[ImageSource] = [span.source for span in spans]
        names = list(sources[0].grid.places)
        grids = {name: mx.concatenate([s.grid.places[name] for s in sources]) for name in names}
        axes, shift = self._tower.language_model.get_rope_index(
            mx.array(ids[None], mx.int32), **grids
        )
        return SpanPositions(np.array(axes[:, 0], np.int32), int(shift.reshape(-1)[0].item()))

    def arguments(
        self,
        tokens: Sequence[int],
        start: int,
        positions: SpanPositions,
        embedded: Sequence[tuple[InputSpan, SpanEmbeddings]],
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if positions.prompt is not None:
            arguments["position_ids"] = _position_ids(positions, start, len(tokens))
        if not embedded:
            return arguments
        text = self._text.get_input_embeddings(mx.array([list(tokens)]), None)
        pieces, at = [], start
        marked = np.zeros(len(tokens), bool)
        deep: list[list[mx.array]] = []
        for span, embeddings in embedded:
            first, end = max(span.start, start), min(span.end, start + len(tokens))
            pieces.append(text.inputs_embeds[0, at - start : first - start])
            rows = embeddings.rows[first - span.start : end - span.start]
            pieces.append(rows.astype(text.inputs_embeds.dtype))
            at = end
            if embeddings.marked is not None:
                seen = embeddings.marked[first - span.start : end - span.start]
                before = int(embeddings.marked[: first - span.start].sum())
                marked[first - start : end - start] = seen
                count = int(seen.sum())
                deep.append([layer[before : before + count] for layer in embeddings.deep])
        pieces.append(text.inputs_embeds[0, at - start :])
        arguments["inputs_embeds"] = mx.concatenate(pieces)[None]
        if text.per_layer_inputs is not None:
            arguments["per_layer_inputs"] = text.per_layer_inputs
        if deep:
            arguments["visual_pos_masks"] = mx.array(marked[None])
            layers = zip(*deep, strict=True)
            arguments["deepstack_visual_embeds"] = [mx.concatenate(list(of)) for of in layers]
        return arguments

    def step_arguments(self, positions: Sequence[int], width: int) -> dict[str, Any]:
        rows = mx.array(list(positions))[:, None] + mx.arange(width)
        return {"position_ids": mx.broadcast_to(rows, (3, *rows.shape))}


def own_attributes(model: Any) -> Any:
    """Return a copy that shares the weights but not the attributes, which other threads set."""
    whole = copy.copy(model)
    language_model = copy.copy(model.language_model)
    whole.language_model = language_model
    return whole


def marker_of(config: Any) -> str | None:
    """Return the text that marks an image for a model; None if its images are not supported."""
    text = getattr(config, "text_config", None)
    if getattr(text, SEES_AHEAD, None) == "vision":
        return None
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def tower_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its language model; its layers are evaluated one by one.

    MLX holds up all threads while one of them has more than ten tasks waiting, so a whole tower in
    one evaluation would stop running answers until it ends.
    """
    tower: nn.Module = copy.copy(model)
    tower.pop(LANGUAGE_MODEL)
    modules: list[nn.Module] = tower.modules()  # type: ignore[no-untyped-call]
    lists = [value for module in modules for value in module.values() if isinstance(value, list)]
    for layer in (layer for layers in lists for layer in layers):
        if isinstance(layer, nn.Module):
            layer.__class__ = _evaluated(type(layer))
    return tower


@cache
def _evaluated(kind: type[Any]) -> type[Any]:
    """Return a subclass of a layer's class that evaluates what the layer returns."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        mx.eval(result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _position_ids(positions: SpanPositions, start: int, count: int) -> mx.array:
    """Return positions of a chunk, (axes, 1, count), which may extend past the prompt."""
    assert positions.prompt is not None
    inside = positions.prompt[:, start : start + count]
    behind = np.arange(start + inside.shape[1], start + count, dtype=np.int32) + positions.shift
    whole = np.concatenate([inside, np.tile(behind, (len(inside), 1))], axis=1)
    return mx.array(whole[:, None])


def _shape(pixels: Any) -> tuple[int, ...]:
    """Return the shape of pixels; for a list, its length and the shape of the largest array."""
    if hasattr(pixels, "shape"):
        return tuple(pixels.shape)
    shapes = [_shape(part) for part in pixels]
    return (len(shapes), *max(shapes, key=prod))


def _decoded(image: ImageFile) -> Image.Image:
    try:
        with Image.open(BytesIO(image.data), formats=[image.format]) as opened:
            if opened.size != (image.width, image.height):
                raise ImageError("its header gives two sizes")
            opened.load()
            picture = ImageOps.exif_transpose(opened)
            return picture.convert("RGB")
    except ImageError:
        raise
    # A boundary: decoders raise many kinds of errors for invalid images.
    except Exception as error:
        raise ImageError(f"{type(error).__name__}: {error}") from error


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > REMEMBERED:
        known.popitem(last=False)
