"""Tiny random language models of mlx-vlm, built as in `tiny_families`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import typing
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm.models
import tiny_families
from mlx_vlm.models import cache as theirs
from model_matrix import Zoo
from tiny_families import DEFAULT, SEED, WINDOW, Place, Unbuildable, silence_few

from penstock.plugins.vlm.vlm_reader import UNSAFE, TextModel

PACKAGE = mlx_vlm.models.__name__
OTHERS = {
    "bert": "an encoder",
    "florence2": "an encoder and a decoder",
    "diffusion_gemma": "a diffusion model",
    "llada2_moe": "a diffusion model",
    "nemotron_labs_diffusion": "a diffusion model",
    "colidefics3": "an embedder",
    "colqwen2_5": "an embedder",
    "qwen3_vl_embedding": "an embedder",
    "nemotron_parse": "an encoder and a decoder",
    "falcon_perception": "a detector",
    "lfm2_encoder": "an encoder",
    "llama_nemotron_vl_embedding": "an embedder",
    "clef": "a classifier",
    "d1": "a classifier",
    "rfdetr": "a detector",
    "rt_detr_v2": "a detector",
    "sam3": "a segmenter",
    "sam3_1": "a segmenter",
    "sam3d_body": "a body model",
}
"""Packages with a class `LanguageModel` that is no language model by itself."""

MROPE = {
    "type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}
EXCEPTIONS: dict[tuple[str, str], Any] = {
    **tiny_families.EXCEPTIONS,
    ("qwen3_5.config", "rope_parameters"): MROPE,
    ("qwen3_5_moe.config", "rope_parameters"): MROPE,
    ("qwen4_exp.config", "rope_parameters"): MROPE,
    ("qwen4_exp.config", "indexer_kv_heads"): 1,
    ("qwen4_exp.config", "eos_token_id"): 1,
    ("qwen4_exp.config", "indexer_n_heads"): 2,
    ("qwen4_exp.config", "indexer_budget"): 16,
    ("qwen4_exp.config", "ple_layer_ids"): [3],
    ("qwen4_exp.config", "ngram_vocab_size_base"): 50,
    ("qwen4_exp.config", "heads_per_ngram"): 2,
    ("qwen4_exp.config", "hc_lowrank"): 8,
    ("qwen4_exp.config", "split_ngram_parts"): 4,
    ("deepseek_v4.config", "scoring_func"): "sqrtsoftplus",
    ("deepseek_v4.config", "compress_ratios"): [0, 4, 128, 4],
    ("deepseek_v4.config", "num_key_value_heads"): 1,
    ("deepseek_v4.config", "num_hash_layers"): 0,
    ("deepseek_v4.config", "index_n_heads"): 2,
    ("deepseek_v41.config", "scoring_func"): "sqrtsoftplus",
    ("deepseek_v41.config", "engram_vocab_size"): 64,
    ("deepseek_v41.config", "engram_compressed_vocab_size"): 64,
    ("deepseek_v41.config", "engram_num_embeddings"): [64, 64],
    ("deepseek_v41.config", "engram_layer_ids"): [],
    ("ernie4_5_moe_vl.config", "mrope_section"): [3, 3, 2],
    ("ernie4_5_moe_vl.config", "head_dim"): 16,
    ("paddleocr_vl.config", "rope_parameters"): {"type": "mrope", "mrope_section": [4, 2, 2]},
    ("glm4v_moe.config", "rope_parameters"): {**MROPE, "mrope_section": [2, 1, 1]},
    ("gemma3n.config", "intermediate_size"): [96] * 4,
    ("glm5_next.config", "num_key_value_heads"): 4,
    ("glm5_next.config", "qk_rope_head_dim"): 0,
    ("glm5_next.config", "index_kpool"): 4,
    ("glm5_next.config", "qk_nope_head_dim"): 16,
    ("glm5_next.config", "qk_head_dim"): 16,
    ("moondream3.config", "rope_dim"): 8,
    ("moondream3.config", "num_key_value_heads"): 4,
    ("nemotron_nas.config", "block_configs"): tiny_families.EXCEPTIONS[
        "nemotron-nas", "block_configs"
    ],
    ("llava.config", "model_type"): "llama",
    ("llava_next.config", "model_type"): "llama",
    ("multi_modality.config", "model_type"): "llama",
    ("phi4mm", "text_config"): DEFAULT,
    ("hunyuan_vl", "text_config"): {
        "vocab_size": 96,
        "org_vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_head_dim": 16,
        "intermediate_size": 96,
        "rope_scaling": {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [2, 2, 2, 2]},
    },
    ("phi3_v", "text_config"): DEFAULT,
    ("limite.config", "rope_n_pairs"): 4,
    ("limite.config", "attn_gate_channels"): 16,
    ("limite.config", "ve_gate_channels"): 8,
    ("limite.config", "ve_dim"): 16,
}
"""As `tiny_families.EXCEPTIONS`, whose families of the same names have them here, too."""


@functools.cache
def families() -> list[str]:
    """Return the packages of mlx-vlm that have a language model, by name."""
    return sorted(path.parent.name for path in _folder().glob("*/__init__.py") if _speaks(path))


def _folder() -> Path:
    return Path(mlx_vlm.models.__path__[0])


def _speaks(init: Path) -> bool:
    """Return whether a package has a language model, from its source."""
    if init.parent.name in OTHERS:
        return False
    texts = [file.read_text() for file in init.parent.glob("*.py")]
    return any("class LanguageModel(" in text for text in texts) or any(
        "import LanguageModel" in text or "LanguageModel," in text for text in texts
    )


def _language_model(name: str) -> tuple[Any, Any]:
    package = importlib.import_module(f"{PACKAGE}.{name}")
    for module in (package, *_submodules(name)):
        found = getattr(module, "LanguageModel", None)
        if inspect.isclass(found):
            return package, found
    raise Unbuildable(name, "it has no LanguageModel")


def _submodules(name: str) -> list[Any]:
    files = [_folder() / name / f"{stem}.py" for stem in ("language", name)]
    return [importlib.import_module(f"{PACKAGE}.{name}.{f.stem}") for f in files if f.exists()]


def _parameters(language_model: type) -> list[tuple[str, Any]]:
    """Return the names and classes of the arguments that a language model is made from."""
    hints = typing.get_type_hints(language_model.__init__)
    return [(name, hints.get(name)) for name in inspect.signature(language_model).parameters]


def arguments_of(name: str, window: int = WINDOW) -> tuple[Any, list[Any]]:
    """Return the class of a family's language model, and its arguments."""
    package, language_model = _language_model(name)
    (_, args), *others = _parameters(language_model)
    if not dataclasses.is_dataclass(args):
        args = package.ModelConfig
    place = Place(name, args, language_model, window, PACKAGE, EXCEPTIONS)
    fields = tiny_families.values(place)
    arguments = args.from_dict(fields)
    if not others or others[0][0] not in ("config", "model_config"):
        return language_model, [arguments]
    whole = others[0][1] if dataclasses.is_dataclass(others[0][1]) else package.ModelConfig
    if "text_config" not in {field.name for field in dataclasses.fields(whole)}:
        return language_model, [arguments]
    return language_model, [arguments, _whole_config(whole, name, fields, arguments)]


def _whole_config(whole: Any, name: str, fields: dict[str, Any], text: Any) -> Any:
    """Return a config with these text arguments and placeholder values elsewhere."""
    hints = typing.get_type_hints(whole)
    sections = {"text_config": fields}
    for section in ("vision_config", "audio_config"):
        kind = hints.get(section)
        sections[section] = _anything(kind) if dataclasses.is_dataclass(kind) else {}
    config = whole.from_dict({"model_type": name, "eos_token_id": 1, **sections})
    config.text_config = text
    for section, kind in hints.items():
        found = getattr(config, section, None)
        if isinstance(found, dict) and dataclasses.is_dataclass(kind):
            setattr(config, section, kind.from_dict(found))
    return config


def _anything(kind: type) -> dict[str, Any]:
    """Return a placeholder value for each field without a default."""
    values = {"int": 1, "float": 1.0, "str": "", "bool": False}
    return {
        field.name: values.get(getattr(field.type, "__name__", str(field.type)))
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    }


SEEDS = {"kimi_linear": 3}
"""Seeds of families in which two experts are equally good for a prompt of the tests: which of them
is chosen would depend on the CPU's rounding, in mlx-vlm's own loop, too."""


def build(name: str, *, window: int = WINDOW) -> Any:
    """Return a tiny random language model of a family, as `tiny_families.build` does.

    Raises:
        Unbuildable: it cannot be made here, or cannot run here.
    """
    mx.random.seed(zlib.crc32(f"{SEEDS.get(name, SEED)} {name}".encode()))
    if name in UNSAFE:
        raise Unbuildable(name, "it writes outside of its logits: it takes tokens for rows")
    # A boundary, as in `tiny_families.build`.
    try:
        language_model, arguments = arguments_of(name, window)
        made = language_model(*arguments)
        silence_few(made)
        model = TextModel(made, arguments[0])
        tiny_families.randomize(model)
        model.eval()
        mx.eval(model.parameters())
        with tiny_families.uncompiled():
            mx.eval(model(mx.array([[1]]), cache=model.make_cache()))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        kernel = "metal" in text.lower() or "kernel" in text.lower()
        raise Unbuildable(name, f"it needs a GPU kernel ({text})" if kernel else text) from error
    return model


MLX_VLM = Zoo("mlx-vlm", build, theirs)
