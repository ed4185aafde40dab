"""Folders of tiny random image models, made from mlx-vlm's own config classes.

The tokenizer is the embedded model's, with the marks of the family.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm.utils
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import prepare_inputs
from PIL import Image
from tiny_image_families import FAMILIES, VOCABULARY, ImageFamily
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.llava.processing_llava import LlavaProcessor

from penstock.engine.request import Request
from penstock.models.loading import load_all
from penstock.models.mlx_lm import Loaded
from penstock.recall import MODEL_PATH
from penstock.server.images import Images, file_of, sign_of

CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Template as those of Qwen: content as text, or as a list of parts."""


def write_model(model_type: str, folder: Path, seed: int = 7) -> Path:
    """Write a family's folder with random weights, and return it."""
    family = FAMILIES[model_type]
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    (folder / "model.safetensors").unlink()
    numbers = _add_marks(folder, family)
    config = _numbered(family.config, numbers)
    config = {"model_type": model_type, "vocab_size": VOCABULARY, "eos_token_id": 2, **config}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in family.files.items():
        (folder / name).write_text(json.dumps(content))
    _write_weights(folder, seed)
    return folder


def _add_marks(folder: Path, family: ImageFamily) -> dict[str, int]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = 3_025
    numbers = {mark: first + number for number, mark in enumerate(family.marks)}
    for mark, number in numbers.items():
        tokenizer["added_tokens"].append(
            {
                **tokenizer["added_tokens"][0],
                "id": number,
                "content": mark,
            }
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = CHATML.replace("IMAGE", family.marker)
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {**family.tokens, "chat_template": template}
    if family.tokens:
        settings["extra_special_tokens"] = dict(family.tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return numbers


def _numbered(value: Any, numbers: Mapping[str, int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _numbered(part, numbers) for name, part in value.items()}
    return numbers.get(value, value) if isinstance(value, str) else value


def _write_weights(folder: Path, seed: int) -> None:
    config = mlx_vlm.utils.load_config(folder)
    model_class, _ = mlx_vlm.utils.get_model_and_args(config)
    made = model_class.ModelConfig.from_dict(config)
    for name in ("text", "vision", "projector"):
        kind = getattr(model_class, f"{name.title()}Config", None)
        if kind is not None and isinstance(getattr(made, f"{name}_config", None), dict):
            setattr(made, f"{name}_config", kind.from_dict(getattr(made, f"{name}_config")))
    model = model_class.Model(made)
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(array.shape) * (0.3 if array.ndim > 1 else 0.05) + (array.ndim < 2)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def picture(seed: int, width: int = 84, height: int = 56, form: str = "PNG") -> bytes:
    """Return a random image file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Pair:
    """A family as run by mlx-vlm, and as loaded by penstock."""

    family: ImageFamily
    theirs: Any
    processor: Any
    loaded: Loaded

    @classmethod
    def of(cls, model_type: str, folder: Path) -> Pair:
        write_model(model_type, folder)
        return cls(
            FAMILIES[model_type],
            mlx_vlm.utils.load_model(folder),
            _processor(folder, model_type),
            load_all(folder, model_source="mlx-vlm", weights_dtype="native"),
        )

    def inputs(self, text: str, files: Sequence[bytes]) -> dict[str, Any]:
        pictures = [Image.open(BytesIO(file)).convert("RGB") for file in files]
        if isinstance(self.processor, LlavaProcessor):
            prompt = text.replace("IMAGE", self.family.marker)
            inputs = self.processor(images=pictures or None, text=[prompt], return_tensors="np")
            return {name: mx.array(array) for name, array in inputs.items()}
        config = self.theirs.config
        token = getattr(config, "image_token_index", None) or config.image_token_id
        prepared: dict[str, Any] = prepare_inputs(
            self.processor,
            images=pictures or None,
            prompts=[text.replace("IMAGE", self.family.marker)],
            image_token_index=token,
        )
        return prepared

    def own_answer(self, text: str, files: Sequence[bytes], count: int) -> list[int]:
        """Generate greedily as `mlx_vlm.generate` does; IMAGE in a text stands for each file."""
        inputs = self.inputs(text, files)
        tokens, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
        mask = inputs.pop("attention_mask", None)
        for name in ("_position_ids", "_rope_deltas"):
            if hasattr(self.theirs.language_model, name):
                setattr(self.theirs.language_model, name, None)
        steps = generate_step(
            tokens, self.theirs, pixels, mask, max_tokens=count, temperature=0.0, **inputs
        )
        return [token for token, _ in steps]

    def request(self, text: str, files: Sequence[bytes], count: int, **settings: Any) -> Request:
        """Return the same prompt as a request of the engine."""
        assert self.loaded.model.image_reader is not None
        placed = [self.loaded.model.image_reader.place(file_of(file)) for file in files]
        images = Images(self.loaded.model.image_reader, placed)
        for number in range(len(files)):
            text = text.replace("IMAGE", sign_of(number), 1)
        tokens = self.loaded.tokenizer.encode(images.in_text(text), add_special_tokens=False)
        spans = tuple(images.spans(tokens))
        limits = {"max_tokens": count, "ignore_eos": True, **settings}
        return Request(prompt=tuple(tokens), spans=spans, **limits)


def _processor(folder: Path, model_type: str) -> Any:
    """Return the processor of mlx-vlm, or of transformers where that of mlx-vlm raises."""
    if model_type != "llava":
        return mlx_vlm.utils.load_processor(folder, add_detokenizer=False, trust_remote_code=False)
    parts = (kind.from_pretrained(folder) for kind in (AutoImageProcessor, AutoTokenizer))
    settings = json.loads((folder / "processor_config.json").read_text())
    del settings["processor_class"], settings["image_token"]
    return LlavaProcessor(*parts, **settings)


SIZES = ((84, 56), (56, 56), (140, 56), (112, 84), (200, 160))
WORDS = ("heron", "river", "tide", "looked", "at", "the", "left", "there", ".")


def prompts(count: int, seed: int = 3) -> list[tuple[str, list[bytes]]]:
    """Return prompts with 0 to 3 images of several sizes, some of them repeated."""
    draw, made = random.Random(seed), []
    for number in range(count):
        files = []
        parts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 30)))]
        for _ in range(number % 4):
            size = draw.choice(SIZES)
            files.append(picture(draw.randrange(4), *size))
            parts.append(" ".join(draw.choices(WORDS, k=draw.randrange(0, 12))))
        made.append(("IMAGE".join(parts) + " What is it ?", files))
    return made
