"""Stand-ins for mlx-lm's tests: a model, a tokenizer and caches."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CACHES = (
    "KVCache",
    "RotatingKVCache",
    "QuantizedKVCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
)
FUNCTIONS = ("save_prompt_cache", "load_prompt_cache")
HOMES = {"mlx-lm": "mlx_lm.models.cache", "penstock": "penstock.caches"}

# Old name -> new name in mlx_lm.generate, so that the tests of a neighboring version import.
RENAMED = {"StopSequenceMatcher": "StopSequences"}

VOCABULARY_TOKENS = 1_024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_model(seed: int = 0) -> Any:
    """Make a random float32 qwen2, the architecture of the hub model it stands for."""
    from mlx_lm.models import qwen2

    mx.random.seed(seed)
    args = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=256,  # heads of 64, which mlx-lm's own quantized cache needs
        num_hidden_layers=2,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY_TOKENS,
    )
    model = qwen2.Model(args)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def byte_tokenizer() -> Any:
    """Make a byte-level tokenizer in memory, wrapped as mlx-lm wraps those it loads.

    Token 0 is "!", as in the vocabulary of the hub model; ids past the bytes decode to words,
    so that every id a model of `VOCABULARY_TOKENS` may choose has a text.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable]
    alphabet += [chr(0x100 + rank) for rank in range(256 - len(printable))]
    words = [f"w{rank}" for rank in range(VOCABULARY_TOKENS - 2 - len(alphabet))]
    vocabulary = {text: rank for rank, text in enumerate(alphabet + words)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def load(_path: str, *_: Any, return_config: bool = False, **__: Any) -> tuple[Any, ...]:
    """Stand for `mlx_lm.utils.load`: no hub, the same small model every time."""
    model, tokenizer = small_model(), byte_tokenizer()
    return (model, tokenizer, {}) if return_config else (model, tokenizer)


def rebind(replacements: dict[int, Any], modules: list[ModuleType]) -> int:
    """Put `replacements` (by the id of the original) in every module that holds an original."""
    rebound = 0
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
                rebound += 1
    return rebound


def mlx_lm_modules() -> list[ModuleType]:
    """Return the modules of mlx-lm that are loaded now."""
    return [m for name, m in sys.modules.items() if name.split(".")[0] == "mlx_lm"]


def add_renamed() -> None:
    """Give mlx-lm's generate module the names by which older tests know its classes."""
    generate = importlib.import_module("mlx_lm.generate")
    for old, new in RENAMED.items():
        if not hasattr(generate, old):
            setattr(generate, old, getattr(generate, new))


class Calls:
    """Count the calls that come from outside into a set of classes and functions.

    A call that one of them makes while it works (a merge that builds a batch) is not counted.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._depth = 0

    def counted(self, owner: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self.counts[owner, name] += 1
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def watch(self, cls: type) -> None:
        """Wrap every public method and property of `cls`, inherited ones too, and `__init__`."""
        for name in dir(cls):
            if name.startswith("_") and name != "__init__":
                continue
            wrapped = self._wrap(cls, name)
            if wrapped is not None:
                setattr(cls, name, wrapped)

    def _wrap(self, cls: type, name: str) -> Any:
        holder = next(c for c in cls.__mro__ if name in vars(c))
        raw = vars(holder)[name]
        owner = cls.__name__
        if isinstance(raw, property):
            parts = (
                self.counted(owner, name, part) if part else None for part in (raw.fget, raw.fset)
            )
            return property(*parts)
        if isinstance(raw, classmethod):
            return classmethod(self.counted(owner, name, raw.__func__))
        if isinstance(raw, staticmethod):
            return staticmethod(self.counted(owner, name, raw.__func__))
        if callable(raw) and not isinstance(raw, type):
            return self.counted(owner, name, raw)
        return None

    def report(self) -> dict[str, dict[str, int]]:
        """Return calls as {class or "functions": {method: calls}}."""
        table: dict[str, dict[str, int]] = {}
        for (owner, name), calls in sorted(self.counts.items()):
            table.setdefault(owner, {})[name] = calls
        return table


def forget_first_token(cls: type) -> None:
    """Break a cache class on purpose: attention no longer sees the keys of the oldest column."""
    update = cls.update_and_fetch  # type: ignore[attr-defined]

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        fetched, values = update(self, keys, values)
        return mx.concatenate([mx.zeros_like(fetched[..., :1, :]), fetched[..., 1:, :]], 2), values

    cls.update_and_fetch = update_and_fetch  # type: ignore[attr-defined]


def install(home: str, *, broken: bool, test_module: ModuleType) -> Calls:
    """Put the caches of `home` and the stand-in `load` in place of mlx-lm's own; count calls."""
    theirs = importlib.import_module(HOMES["mlx-lm"])
    ours = importlib.import_module(HOMES[home])
    calls = Calls()
    originals = {name: getattr(theirs, name) for name in CACHES + FUNCTIONS}
    replacements = {id(importlib.import_module("mlx_lm.utils").load): load}
    for name in CACHES:
        cls = getattr(ours, name)
        if broken and name == "KVCache":
            forget_first_token(cls)
        calls.watch(cls)
        replacements[id(originals[name])] = cls
    for name in FUNCTIONS:
        function = calls.counted("functions", name, getattr(ours, name))
        replacements[id(originals[name])] = function
    rebind(replacements, [*mlx_lm_modules(), test_module])
    return calls
