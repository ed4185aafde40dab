"""Settings that `penstock eval` measures: codecs and windows, and the goals."""

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
"""Blocks of a piece of text, at least: in the first block no codec is read."""
GOAL_CODECS = ("turbo4", "k8v4")
GOAL_FORMS = (KeyForm.PLAIN, KeyForm.OUTLIERS)
GOAL_POINTS = 0.5
CONTROL_CODEC = "affine2"
CONTROL_POINTS = 10.0


@dataclass(frozen=True, slots=True)
class KVSetting:
    """A codec, a window and a choice of KV; None is the engine's default."""

    codec: str
    max_kv_size: int | None = None
    keep: int | None = None
    attend: int | None = None

    @property
    def scheme(self) -> Scheme:
        """The codecs. Raises ValueError if there is none of this name."""
        return parse_scheme(self.codec)

    def __str__(self) -> str:
        window = "" if self.max_kv_size is None else f", window {self.max_kv_size:,}"
        keep = "" if self.keep is None else f", keep {self.keep}"
        choice = "" if self.attend is None else f", {counted(self.attend, 'token')} read"
        return f"{self.codec}{window}{keep}{choice}"


UNCHANGED = KVSetting(RAW)
EVALUATED_BLOCK_SIZE = 64
"""Least block size, in tokens, that all codecs can hold."""
SETTINGS = (
    *map(KVSetting, ("8", "k8v4", "kivi5/turbo3.5", "turbo4", "2")),
    KVSetting(RAW, 1_024, 256),
    KVSetting("k8v4", 1_024, 256),
)


class EvalLoad(EvalSettings):
    """Settings to measure, and the size of the measurement. Sizes in tokens."""

    model: str = str(MODEL_PATH)
    settings: tuple[KVSetting, ...] = SETTINGS
    """Raw KV without a window is measured in any case: all others are compared with it."""
    windows_once: bool = True
    """Whether settings with a window are measured on the first form alone."""
    forms: tuple[KeyForm, ...] = tuple(KeyForm)
    lengths: tuple[int, ...] = (250, 1_000, 4_000)
    """Lengths of the dialogues, or of the texts of the tasks, before the questions."""
    tasks: tuple[LongTask, ...] = ()
    """Tasks on real text, for other models than the embedded one."""
    per_dialogue: int = 16
    """Most questions about a dialogue."""
    texts: tuple[str, ...] = ()
    """Texts that are read, a piece of each in turn; none: dialogues of the embedded model's."""
    attend_rest: bool = False
    """Whether steps of a choice read the other tokens from the index."""
    continued_tokens: int = 32
    """Tokens of a continuation, at most; an answer may end before."""
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
