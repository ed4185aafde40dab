"""Settings of `penstock eval`: codecs, windows, and the goals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scheme import Scheme
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.bench_settings import EvalSettings
from penstock_bench.key_forms import KeyForm
from penstock_bench.long_tasks import LongTask

CLAIM = "Recall with quantized keys and values is that of raw ones"
RAW = "raw"
FIRST_SEED = 10_000_000
"""Seed of the first dialogue; the embedded model was trained on others."""
ANSWER_TOKENS = 8
LEAST_BLOCKS = 2
"""Minimum blocks of a piece of text; the first block reads no quantized KV."""
GOAL_CODECS = ("turbo4", "k8v4")
GOAL_FORMS = (KeyForm.PLAIN, KeyForm.OUTLIERS)
GOAL_POINTS = 0.5
CONTROL_CODEC = "affine2"
CONTROL_POINTS = 10.0


@dataclass(frozen=True, slots=True)
class KVSetting:
    """Codec, window and selection of KV; None is the engine's default."""

    codec: str
    max_kv_size: int | None = None
    keep: int | None = None
    attend: int | None = None

    @property
    def scheme(self) -> Scheme:
        """Parsed codec; raises ValueError if it is unknown."""
        return parse_scheme(self.codec)

    def __str__(self) -> str:
        window = "" if self.max_kv_size is None else f", window {self.max_kv_size:,}"
        keep = "" if self.keep is None else f", keep {self.keep}"
        choice = "" if self.attend is None else f", {counted(self.attend, 'token')} read"
        return f"{self.codec}{window}{keep}{choice}"


UNCHANGED = KVSetting(RAW)
EVALUATED_BLOCK_SIZE = 64
"""Smallest block size, in tokens, that fits all codecs."""
SETTINGS = (
    *map(KVSetting, ("8", "k8v4", "kivi5/turbo3.5", "turbo4", "2")),
    KVSetting(RAW, 1_024, 256),
    KVSetting("k8v4", 1_024, 256),
)


class EvalLoad(EvalSettings):
    """Settings to measure, and the size of the measurement, in tokens."""

    model: str = str(MODEL_PATH)
    settings: tuple[KVSetting, ...] = SETTINGS
    """Settings to measure. Raw KV without a window is always included as the reference."""
    windows_once: bool = True
    """Whether settings with a window are measured only on the first form."""
    forms: tuple[KeyForm, ...] = tuple(KeyForm)
    lengths: tuple[int, ...] = (250, 1_000, 4_000)
    """Lengths of the dialogues, or of the texts of tasks, before the questions."""
    tasks: tuple[LongTask, ...] = ()
    """Tasks on real text, for models other than the embedded one."""
    per_dialogue: int = 16
    """Maximum questions per dialogue."""
    texts: tuple[str, ...] = ()
    """Texts to read, a piece of each in turn; empty for dialogues of the embedded model."""
    attend_rest: bool = False
    """Whether selective steps approximate the other tokens by the index."""
    continued_tokens: int = 32
    """Maximum tokens of a continuation."""
    block_size: int = EVALUATED_BLOCK_SIZE
    memory_limit: int | str | None = "200MB"

    def engine(self, setting: KVSetting) -> dict[str, Any]:
        """Return the settings of an engine."""
        return {
            "memory_limit": self.memory_limit,
            "block_size": self.block_size,
            "max_kv_size": setting.max_kv_size,
            "keep": setting.keep,
            "attend_tokens": setting.attend,
            "attend_rest": self.attend_rest and setting.attend is not None,
            "max_batch_size": self.per_dialogue,
            "kv_cache_quantization": setting.codec,
            "kv_cache_min_quantize_tokens": 0,
            "kv_cache_raw_first_tokens": self.raw_first_tokens,
            "kv_cache_quantize_when": "active",
        }
