"""Translation of flags and environment variables of other servers.

`translated` applies the table `FOREIGN_FLAGS` to a command line; docs/migrate.md shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from penstock.errors import SettingError

VLLM, VLLM_MLX = "vLLM", "vllm-mlx"
MODEL = "MODEL"
CODEC = "--kv-cache-quantization"
DEFAULT_GROUP = "64"
"""Group size of codecs whose names do not include one."""
Meaning: TypeAlias = Literal["same", "always", "other"]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    names: tuple[str, ...]
    programs: tuple[str, ...]
    meaning: Meaning
    """Whether the flag takes the same value as `ours` (same), has no effect (always), or is an
    error (other)."""
    ours: str
    """Flag with the same effect, or an explanation; {} stands for the value."""
    has_value: bool = True
    harmless: tuple[str, ...] = ()
    """Values that are accepted and ignored, unlike other values."""

    def note(self, name: str, value: str) -> str:
        here = self.ours.format(value) if "{}" in self.ours or not value else self._with(value)
        return f"{name} is a flag of {', '.join(self.programs)}; here it is {here.replace('`', '')}"

    def _with(self, value: str) -> str:
        return f"{self.ours} {value}" if self.meaning == "same" else self.ours


_TABLE = """
same | --model -m | MODEL | mlx-lm, vLLM, llama.cpp
same | --served-model-name --alias -a | --model-name | vLLM, vllm-mlx, llama.cpp
same | --chat-template-file | --chat-template | llama.cpp
same | --tool-call-parser | --tool-parser | vLLM, vllm-mlx | auto
same | --temp --default-temperature | --temperature | mlx-lm, llama.cpp, vllm-mlx
same | --default-top-p | --top-p | vllm-mlx
same | --default-top-k | --top-k | vllm-mlx
same | --default-min-p | --min-p | vllm-mlx
same | --repeat-penalty --default-repetition-penalty | --repetition-penalty | llama.cpp, vllm-mlx
same | --n-predict --predict -n | --max-tokens | llama.cpp | -1
same | --system-prompt | --system | mlx-lm, llama.cpp
same- | --ignore-chat-template | --raw | mlx-lm
same | --max-num-seqs | --max-batch-size | vLLM, vllm-mlx
same | --parallel -np | --max-batch-size | llama.cpp
same | --decode-concurrency --completion-batch-size | --max-batch-size | mlx-lm, vllm-mlx
same | --max-concurrent-requests | --max-batch-size | oMLX
same | --prefill-step-size --chunked-prefill-tokens | --prefill-chunk | mlx-lm, vllm-mlx
same | --num-draft-tokens | --speculative-tokens | mlx-lm, vllm-mlx
same | --draft-max --draft-n --draft | --speculative-tokens | llama.cpp
same | --model-draft -md | --draft-model | llama.cpp
same | --paged-cache-block-size | --block-size | vllm-mlx
same | --paged-ssd-cache-dir | --ssd-cache-dir | oMLX
same | --paged-ssd-cache-max-size | --ssd-cache-limit | oMLX
same | --kv-cache-quantization-bits --kv-bits | --kv-cache-quantization | vllm-mlx, mlx-lm
same | --kv-cache-quantization-group-size --kv-group-size |
    --kv-cache-quantization affine<bits>g{} | vllm-mlx, mlx-lm
same | --quantized-kv-start | --kv-cache-min-quantize-tokens | mlx-lm
same | --timeout | --request-timeout | vllm-mlx
same | --allowed-origins | --cors-origin | mlx-lm
always | --continuous-batching --cont-batching -cb | always on | vllm-mlx, llama.cpp
always | --enable-prefix-caching --enable-prefix-cache --use-paged-cache --cache-prompt |
    always on: prefixes are shared in blocks | vLLM, vllm-mlx, llama.cpp
always+ | --cache-reuse | always on, in whole blocks | llama.cpp
always | --enable-chunked-prefill | always on; `--prefill-chunk` sets its size | vLLM
always | --enable-auto-tool-choice --jinja |
    always on: the chat template says whether a model calls tools | vLLM, vllm-mlx, llama.cpp
always | --enable-metrics --metrics | always on, at /metrics | vllm-mlx, llama.cpp
always | --use-default-chat-template | not needed; see `--chat-template` | mlx-lm
always | --trust-remote-code | not needed: no code of a model is run | mlx-lm, vLLM
always+ | --n-gpu-layers --gpu-layers -ngl | not needed: all layers are on the device | llama.cpp
always+ | --flash-attn -fa | not needed: `--kernels auto` takes the quickest way | llama.cpp
other | --kv-cache-dtype | `--kv-cache-quantization 8`: codes of 8 bits in place of fp8 |
    vLLM | auto
other | --cache-type-k -ctk --cache-type-v -ctv | `--kv-cache-quantization 8` (for q8_0) or 4 (for
    q4_0), for keys and values together | llama.cpp | f16 f32 bf16
other | --max-model-len | `--max-kv-size {}`: past it the oldest tokens are dropped, not refused |
    vLLM
other | --ctx-size -c | `--max-kv-size {}`: of each sequence, not of all together | llama.cpp | 0
other | --max-num-batched-tokens --batch-size -b --ubatch-size -ub | `--prefill-chunk {}`: tokens of
    prompts alone; `--max-batch-size` counts sequences | vLLM, llama.cpp
other | --gpu-memory-utilization | `--memory-limit 16GB`: bytes for everything, not the share {} |
    vLLM, vllm-mlx
other | --cache-memory-mb |
    `--memory-limit 16GB`: one limit for weights and caches, not {} MB for caches | vllm-mlx
other | --cache-memory-percent |
    `--memory-limit 16GB`: one limit for weights and caches, not the share {} for caches | vllm-mlx
other | --prompt-cache-bytes --max-model-memory --max-process-memory --hot-cache-max-size |
    `--memory-limit 16GB`: one limit for weights and caches; {} was meant for a part | mlx-lm, oMLX
other | --prompt-cache-size --max-cache-blocks --prefix-cache-size |
    `--memory-limit 16GB`: prefixes are bounded by bytes, not by a count of {} | mlx-lm, vllm-mlx
other | --prompt-concurrency --prefill-batch-size |
    `--prefill-chunk 2048`: tokens of all prompts in a step, not {} prompts | mlx-lm, vllm-mlx
other | --swap-space --cpu-offload-gb |
    `--ssd-cache-dir FOLDER --ssd-cache-limit {}GB`: prefixes on a disk; weights stay | vLLM
other | --slot-save-path |
    `--session-dir {} --ssd-cache-dir FOLDER`: conversations are kept as blocks | llama.cpp
other | --speculative-config | `--draft-model MODEL --speculative-tokens 4` in place of JSON | vLLM
other | --tensor-parallel-size -tp |
    `mlx.launch -n {} -- penstock serve MODEL`: MLX starts the ranks | vLLM | 1
other | --pipeline-parallel-size -pp |
    `mlx.launch -n {} -- penstock serve MODEL --pipeline`: MLX starts the ranks | vLLM | 1
other | --data-parallel-size -dp | `--ray --replicas {}`: replicas in Ray Serve | vLLM | 1
other | --dtype | `--weights-dtype native`: the type that is stored, or float32 | vLLM | auto
other | --chat-template-args --chat-template-kwargs --default-chat-template-kwargs |
    `chat_template_kwargs` of a request | mlx-lm, vllm-mlx, llama.cpp
other | --threads -t | `OPENBLAS_NUM_THREADS={}` in the environment | llama.cpp
other- | --no-enable-prefix-caching --disable-prefix-cache --no-cache-prompt | `cache_prompt: false`
    of a request, whose prompt the cache leaves out | vLLM, vllm-mlx, llama.cpp
other | --hf-repo -hf |
    `penstock serve OWNER/MODEL` for MLX's models; fetch a .gguf file and name it | llama.cpp
"""
"""Lines of meaning, flags, `ours`, programs and harmless values; indented lines are continuations.

Flags take a value, except those marked `always`; + (value) and - (none) mark exceptions.
"""


def _flags() -> Iterator[ForeignFlag]:
    for line in _TABLE.strip().replace("\n    ", " ").split("\n"):
        meaning, names, ours, programs, *harmless = line.split(" | ")
        kind = cast(Meaning, meaning.rstrip("+-"))
        has_value = meaning.endswith("+") or meaning in ("same", "other")
        values = tuple(" ".join(harmless).split())
        yield ForeignFlag(
            tuple(names.split()), tuple(programs.split(", ")), kind, ours, has_value, values
        )


FOREIGN_FLAGS = tuple(_flags())
FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = {
    "--reasoning-parser": {
        "qwen3": "think",
        "deepseek_r1": "think",
        "glm45": "think",
        "openai_gptoss": "harmony",
        "gpt_oss": "harmony",
    },
    "--tool-parser": {
        "qwen": "hermes",
        "openai": "harmony",
        "llama3_json": "llama",
        "deepseek_v3": "deepseek",
        "kimi": "kimi_k2",
        "qwen3_xml": "qwen3_coder",
    },
}
"""Values of vLLM's and vllm-mlx's flags by flag, with penstock's equivalents."""
FOREIGN_VARIABLES: Mapping[str, tuple[str, str]] = {
    "PENSTOCK_MEMORY_THRESHOLD": ("EXO_MEMORY_THRESHOLD", "exo")
}
"""Environment variables of penstock, each with that of another program and its name."""


@dataclass(frozen=True, slots=True)
class Translation:
    words: list[str]
    notes: list[str]


def translated(
    words: Sequence[str], known: Collection[str], environment: Mapping[str, str]
) -> Translation:
    """Translate other programs' flags; SettingError if a flag has no equivalent.

    >>> translated(["--max-num-seqs", "4"], {"--max-batch-size"}, {}).words
    ['--max-batch-size', '4']
    """
    table = {name: flag for flag in FOREIGN_FLAGS for name in flag.names if name not in known}
    end = words.index("--") if "--" in words else len(words)
    taken: list[str] = []
    notes = list(_variable_notes(words, known, environment))
    codec: dict[str, str] = {}
    rest = deque(words[:end])
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        flag = table.get(name)
        if flag is None or not _is_offered(flag, known):
            taken.append(word)
            continue
        if flag.has_value and not equals and rest and not _is_flag(rest[0]):
            value = rest.popleft()
        notes.append(flag.note(name, value))
        if flag.ours.startswith(CODEC):
            codec["bits" if flag.ours == CODEC else "group"] = value
        elif flag.meaning == "other" and value not in flag.harmless:
            raise SettingError(notes[-1])
        elif flag.meaning == "same" and value not in flag.harmless:
            taken += _own_words(flag, value, known)
    taken = _with_codec(taken, **codec)
    return Translation([*_own_values(taken, notes), *words[end:]], notes)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdecimal()


def _is_offered(flag: ForeignFlag, known: Collection[str]) -> bool:
    if flag.ours == MODEL:
        return "model" in known
    return flag.meaning != "same" or flag.ours.split()[0] in known


def _own_words(flag: ForeignFlag, value: str, known: Collection[str]) -> list[str]:
    if flag.ours == MODEL:
        return ["--model", value] if "--model" in known else [value]
    if not flag.has_value:
        return [flag.ours]
    values = value.split(",") if flag.ours == "--cors-origin" else [value]
    return [word for part in values for word in (flag.ours, part)]


def _with_codec(words: list[str], bits: str = "", group: str = "") -> list[str]:
    """Combine bits and group size into one codec flag; SettingError for a group without bits."""
    followed = zip(words, [*words[1:], "-"], strict=False)
    bare = [i for i, (word, next_) in enumerate(followed) if word == CODEC and next_[:1] == "-"]
    if not bits and not bare:
        if group not in ("", DEFAULT_GROUP):
            raise SettingError(f"a codec's group is part of its name: {CODEC} affine8g{group}")
        return words
    kept = [word for index, word in enumerate(words) if index not in bare]
    if group in ("", DEFAULT_GROUP):
        return [*kept, CODEC, bits] if bits else words
    return [*kept, CODEC, f"affine{bits or 8}g{group}"]


def _own_values(words: Iterable[str], notes: list[str]) -> Iterator[str]:
    before = ""
    for word in words:
        flag, equals, value = word.partition("=") if "=" in word else (before, "", word)
        ours = FOREIGN_VALUES.get(flag, {}).get(value)
        if ours is not None:
            notes.append(f"{flag} {value} is a value of {VLLM}, {VLLM_MLX}; here it is {ours}")
        yield word if ours is None else f"{flag}={ours}" if equals else ours
        before = word


def _variable_notes(
    words: Sequence[str], known: Collection[str], environment: Mapping[str, str]
) -> Iterator[str]:
    for ours, (theirs, program) in FOREIGN_VARIABLES.items():
        flag = "--" + ours.removeprefix("PENSTOCK_").lower().replace("_", "-")
        is_given = any(word.partition("=")[0] == flag for word in words)
        if flag in known and not is_given and not environment.get(ours) and environment.get(theirs):
            yield f"{theirs} is a variable of {program}; here it is {ours}, or {flag}"
