"""Model folder for two servers, and their messages: a system prompt and lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from penstock import config, memory
from penstock.models import named
from penstock.models.loading import load
from penstock.models.source import checked_source
from penstock.plugins.gguf import weights
from penstock.plugins.gguf.header import is_gguf, read_header
from penstock.plugins.gguf.loaded_bytes import activation_dtype
from penstock.plugins.gguf.tokenizer import write_tokenizer
from penstock.recall import MODEL_PATH
from penstock_bench.models import LlamaShape, ModelChoice, bench_model
from penstock_bench.recall import count_tokens, dialogue, vocabulary

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_SAID = "You are a helpful assistant. Remember these facts."
_FACT_TOKENS = 32
"""Maximum tokens of a fact."""


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """Model that both servers load, with its entry in a record."""

    path: Path
    """Folder that mlx-lm's server loads, and ours without a GGUF file."""
    name: str
    parameters: int
    kv_bytes_per_token: int
    dtype: str = "float32"
    codec_settings: dict[str, Any] = field(default_factory=dict)
    """Codec settings of our engine, by name."""
    gguf: Path | None = None
    """GGUF file that the folder was converted from."""

    def as_object(self) -> dict[str, Any]:
        """Return the model's entry in a record."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "dtype": self.dtype,
        }


@contextmanager
def real_folder(name: str) -> Iterator[ServedFolder]:
    """Yield a folder with real weights; a GGUF file is converted to float32.

    Args:
        name: a folder, a GGUF file, or a short name of `penstock.models.named`.

    Raises:
        ModelError: the model cannot be read or downloaded.
    """
    file = model_source(name)
    if not is_gguf(file):
        folder = Path(checked_source(file))
        yield _real(folder, folder.name, None)
        return
    with TemporaryDirectory(prefix="penstock-bench-") as place:
        write_gguf(file, Path(place), float32=True)
        yield _real(Path(place), file.stem, file)


def model_source(name: str) -> Path:
    """Return the path of a folder, a GGUF file, or a short name of `penstock.models.named`.

    Raises:
        ModelError: the model cannot be downloaded.
    """
    return named.fetch(name) if name in named.MODELS else Path(name).expanduser()


def write_gguf(file: Path, folder: Path, *, float32: bool) -> None:
    """Convert a GGUF file to a model folder, in float32 or with its codes."""
    header = read_header(file)
    dtype = "float32" if float32 else activation_dtype(header)
    weights.write_config(header, folder, float32=float32, dtype=dtype)
    write_tokenizer(header, folder)
    tensors = weights.tensors(header, float32=float32, dtype=dtype)
    arrays = dict(pair for tensor in tensors for pair in tensor.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})


def _real(folder: Path, name: str, file: Path | None) -> ServedFolder:
    """Describe a folder by its config and the sizes of its weights, which are not read."""
    spec = memory.read_model_spec(folder)
    parts: list[Any] = [mx.load(str(part)) for part in sorted(folder.glob("*.safetensors"))]
    parameters = sum(array.size for part in parts for array in part.values())
    token_bytes = memory.bytes_per_token(spec)
    return ServedFolder(folder, name, parameters, token_bytes, gguf=file)


@contextmanager
def model_folder(choice: ModelChoice, shape: LlamaShape | None = None) -> Iterator[ServedFolder]:
    """Yield the embedded model's folder, or a temporary one with the random llama."""
    if choice is ModelChoice.EMBEDDED:
        yield _described(MODEL_PATH, choice, None)
        return
    with TemporaryDirectory(prefix="penstock-bench-") as place:
        folder = Path(place) / "random-llama"
        write_random(folder, shape)
        yield _described(folder, choice, shape)


def write_random(folder: Path, shape: LlamaShape | None = None) -> None:
    """Write the random llama in mlx-lm's format, with the embedded model's tokenizer.

    It generates only words: the head's rows of all other tokens, including the end of sequence, are
    zero, and the largest logit of a word is positive. So every answer has its full length, and its
    text is tokenized to the same tokens when it is sent back with the next turn.
    """
    model = bench_model(ModelChoice.RANDOM, shape)
    folder.mkdir(parents=True)
    arrays = dict(tree_flatten(model.model.parameters()))
    said = mx.array(_word_mask(model.tokenizer, model.model.args.vocab_size))
    arrays["lm_head.weight"] = arrays["lm_head.weight"] * said[:, None]
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    _, tokenizer = load(MODEL_PATH)
    settings = {
        **asdict(model.model.args),
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "max_position_embeddings": config.MAX_KV_SIZE,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for name in _TOKENIZER:
        shutil.copy(MODEL_PATH / name, folder / name)


def _word_mask(tokenizer: Any, vocabulary_size: int) -> list[float]:
    """Return 1 for every token of a space and a word, 0 for all others."""
    mask = [0.0] * vocabulary_size
    for text in vocabulary():
        if text[0] == " " and text[1:].isalpha():
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) == 1:
                mask[tokens[0]] = 1.0
    return mask


def _described(path: Path, choice: ModelChoice, shape: LlamaShape | None) -> ServedFolder:
    model = bench_model(choice, shape)
    return ServedFolder(path, model.name, model.parameters, model.kv_bytes_per_token)


# ---------------------------------------------------------------- messages


def system_prompt(tokens: int) -> str:
    """Return facts of a seeded dialogue as a system message of at most `tokens` tokens.

    >>> 980 < count_tokens([{"role": "system", "content": system_prompt(1_000)}]) <= 1_000
    True
    """
    text = _SAID
    used = count_tokens([{"role": "system", "content": text}])
    for fact in _lines(0, tokens):
        used += count_tokens([{"role": "", "content": fact}]) - 3  # no role, no end, one start
        if used > tokens:
            break
        text += f" {fact}"
    return text


def lines(seed: int, count: int, tokens: int) -> list[str]:
    """Return `count` user messages of about `tokens` tokens each, determined by the seed."""
    facts = _lines(seed + 1_000, (count + 1) * (tokens + _FACT_TOKENS))
    messages = []
    for _ in range(count):
        line = next(facts)
        while count_tokens([{"role": "user", "content": line}]) < tokens:
            line += f" {next(facts)}"
        messages.append(line)
    return messages


def _lines(seed: int, tokens: int) -> Iterator[str]:
    """Yield user lines of a seeded dialogue, long enough for `tokens` tokens."""
    talk = dialogue(seed, tokens=4 * tokens + 256, facts=tokens // _FACT_TOKENS)
    return (said["content"] for said in talk.messages if said["role"] == "user")


def poisson_times(rate: float, count: int) -> list[float]:
    """Return arrival times of `count` requests, in seconds, at `rate` requests per second.

    >>> times = poisson_times(2.0, 1_000)
    >>> 400 < times[-1] < 600 and times == sorted(times)
    True
    """
    pick = Random(0)
    times, now = [], 0.0
    for _ in range(count):
        now += pick.expovariate(rate)
        times.append(now)
    return times
