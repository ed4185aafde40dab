"""Flags that several commands share, each with its unit and its environment variable."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, TypeAlias

import typer

from penstock import config, memory
from penstock.blas import Blas
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH

SSD_CACHE_LIMIT = f"{config.SSD_CACHE_LIMIT // 10**9}GB"
EMBEDDED_LIMIT = "200MB"
"""Eight plain caches would take 330 MB for a prompt of 20,000 tokens."""
WITHOUT_VALUE = {"--kv-cache-quantization": "8"}
"""The values of flags that may stand without one, as vllm-mlx's and its scripts have them."""

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Folder of a model, or its Hugging Face name (owner/model).",
        envvar="PENSTOCK_MODEL",
        show_default="the embedded model",
    ),
]
MaxTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Generate at most this many tokens an answer.",
        envvar="PENSTOCK_MAX_TOKENS",
        metavar="TOKENS",
        min=1,
    ),
]
MemoryLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Memory for everything, the weights included: 16GB is 16 x 10^9 bytes.",
        envvar="PENSTOCK_MEMORY_LIMIT",
        metavar="BYTES",
        show_default=f"{EMBEDDED_LIMIT} for the embedded model, else as penstock doctor shows",
    ),
]
BlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Share and name tokens by blocks of this many.",
        envvar="PENSTOCK_BLOCK_SIZE",
        metavar="TOKENS",
        show_default=f"{config.BLOCK_SIZE}, or as many as the codec takes together",
        min=1,
    ),
]
MaxKVSize: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Hold the keys and values of at most this many tokens.",
        envvar="PENSTOCK_MAX_KV_SIZE",
        metavar="TOKENS",
        min=2,
    ),
]
KeepKVSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Never drop this many first tokens.",
        envvar="PENSTOCK_KEEP_KV_SIZE",
        metavar="TOKENS",
        show_default=f"{config.KEEP}, less in a small window",
        min=0,
    ),
]
KVBits: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Store keys and values in this many bits: 2, 3, 4, 5, 6 or 8.",
        envvar="PENSTOCK_KV_BITS",
        metavar="BITS",
        show_default="the model's precision",
    ),
]
KVCacheQuantization: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Hold keys and values in fewer bits: 8 (meant where no CODEC follows), 4, k8v4, "
        "kivi5/turbo3.5, ... (docs/codecs.md; penstock bench-kv-cache compares them).",
        envvar="PENSTOCK_KV_CACHE_QUANTIZATION",
        metavar="[CODEC]",
        show_default="full precision",
    ),
]
KVCacheMinQuantizeTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        help="First tokens of every prompt that stay in full precision; a --keep-kv-size that is "
        "more counts instead.",
        envvar="PENSTOCK_KV_CACHE_MIN_QUANTIZE_TOKENS",
        metavar="TOKENS",
        min=0,
    ),
]
KVCacheMinTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        "--kv-cache-min-quantize-tokens",
        help="Leave a sequence of fewer tokens in full precision; encode a longer one whole.",
        envvar="PENSTOCK_KV_CACHE_MIN_QUANTIZE_TOKENS",
        metavar="TOKENS",
        min=0,
    ),
]
KVCacheRawFirstTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        help="First tokens of every sequence that stay in full precision; a --keep-kv-size that "
        "is more counts instead.",
        envvar="PENSTOCK_KV_CACHE_RAW_FIRST_TOKENS",
        metavar="TOKENS",
        min=0,
    ),
]
Temp: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Sampling temperature; 0 takes the likeliest token.",
        envvar="PENSTOCK_TEMPERATURE",
        metavar="NUMBER",
        min=0.0,
    ),
]
TopP: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Sample from this share of the probability, above 0 up to 1.",
        envvar="PENSTOCK_TOP_P",
        metavar="SHARE",
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Seed of the sampling.",
        envvar="PENSTOCK_SEED",
        metavar="NUMBER",
        show_default="a new one each time",
        min=0,
    ),
]
System: TypeAlias = Annotated[
    str | None,
    typer.Option(help="System prompt before the conversation.", metavar="TEXT"),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.")
]


def with_values(arguments: Sequence[str]) -> list[str]:
    """Return arguments with a value behind each flag that may stand without one, and does.

    >>> with_values(["serve", "--kv-cache-quantization", "--port", "0"])
    ['serve', '--kv-cache-quantization', '8', '--port', '0']
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    filled = []
    for word, following in zip(words[:end], [*words[1:end], "-"], strict=False):
        filled.append(word)
        if word in WITHOUT_VALUE and following.startswith("-"):
            filled.append(WITHOUT_VALUE[word])
    return filled + words[end:]


def engine_limit(model: str, memory_limit: str | None) -> str | None:
    """Return an engine's memory limit; the embedded model has a default of its own.

    >>> engine_limit(str(MODEL_PATH), None), engine_limit("owner/model", "2GB")
    ('200MB', '2GB')

    Raises:
        SettingError: the limit is no size, or nothing.
    """
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    if memory_limit is None and embedded:
        memory_limit = EMBEDDED_LIMIT
    if memory_limit is not None and size("--memory-limit", memory_limit) < 1:
        raise SettingError(f"--memory-limit {memory_limit}: nothing fits in it")
    return memory_limit


def size(flag: str, text: str) -> int:
    """Return the bytes that a flag's text names.

    Raises:
        SettingError: it names none; says which flag.
    """
    try:
        return memory.parse_bytes(text)
    except SettingError as error:
        raise SettingError(f"{flag} {error}") from None


def folder_limit(text: str) -> int:
    """Return the bytes that `--ssd-cache-limit` names.

    Raises:
        SettingError: it names none, or fewer than there must be; says how many.
    """
    from penstock.tiers.disk.limits import payload_bytes

    limit_bytes = size("--ssd-cache-limit", text)
    try:
        payload_bytes(limit_bytes)
    except ValueError as error:
        raise SettingError(f"--ssd-cache-limit {text}: {error}; raise it") from None
    return limit_bytes


def folder(flag: str, text: str | None) -> Path | None:
    """Return the folder that a flag names; None if the flag is not given.

    Raises:
        SettingError: the name is empty, or that of no user's home.
    """
    if text is None:
        return None
    if not text.strip():
        raise SettingError(f"{flag} is empty; name a folder, or leave it out")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(f"{flag} {text}: {error}") from None


def check_writable(flag: str, folder: Path | None) -> None:
    """Make a folder if it is not there, and refuse one in which no file can be made.

    Raises:
        SettingError: it is a file, or the system does not let it be made or written to.
    """
    if folder is None:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{flag} {folder} is a file; name a folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingError(
            f"{flag} {folder}: {error.strerror}; name a folder that can be written to"
        ) from None


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas between.

    Raises:
        SettingError: something there is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if not word.isdecimal()]:
        raise SettingError(f"{flag} {text}: {wrong[0]!r} is no number")
    return tuple(map(int, words))


def check_remote(url: str | None) -> None:
    """Refuse a URL that names no store, before a model is loaded.

    Raises:
        SettingError: says what it should be, and repeats nothing of it.
    """
    if url:
        from penstock.tiers.remote.objects import check_url

        check_url(url)


def check_codec_settings(limits: Mapping[str, Any]) -> None:
    """Refuse an engine's settings of codecs without a codec, and one that does not exist.

    Raises:
        SettingError: says what says nothing, or which there are.
    """
    name = limits["kv_cache_quantization"]
    fields = config.EngineSettings.model_fields
    given = [
        f"--{key.replace('_', '-')}"
        for key, value in limits.items()
        if key.startswith("kv_cache_") and value != fields[key].default
    ]
    if given and name is None:
        raise SettingError(
            f"{', '.join(given)}: nothing is held in a codec; name one by --kv-cache-quantization, "
            f"or leave this out"
        )
    check_codec(name)


def check_codec(name: str | None) -> None:
    """Refuse a codec that does not exist, before a model is loaded.

    Raises:
        SettingError: says which there are.
    """
    if name is None:
        return
    from penstock.kv.codecs import parse_scheme

    try:
        parse_scheme(name)
    except ValueError as error:
        raise SettingError(
            f"--kv-cache-quantization: {error}; 8 is meant where a flag follows, or nothing"
        ) from None


def kv_settings(**given: Any) -> config.KVSettings:
    """Return how a sequence's caches are made, by flags of `KVSettings`.

    Raises:
        SettingError: they contradict each other, or there is no such codec.
    """
    name = given["kv_cache_quantization"]
    check_codec(name)
    if name is not None and name.strip().lower() == "raw":  # as if none were named
        given["kv_cache_quantization"] = None
    return config.parse(config.KVSettings, **given)


def warn_of_slow_blas(blas: Blas) -> None:
    """Print the one line of advice on standard error, if there is any."""
    if blas.advice is not None:
        print(f"penstock: {blas.advice}", file=sys.stderr)


def lenient_input() -> None:
    """Let standard input pass bytes that are no text as surrogates, for `check_text` to name."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def check_text(what: str, text: str) -> None:
    r"""Refuse text with bytes in it that are not UTF-8; Python hands them on as surrogates.

    >>> check_text("the prompt", b"caf\xe9".decode(errors="surrogateescape"))
    Traceback (most recent call last):
    penstock.errors.SettingError: the prompt is not UTF-8: byte 0xe9 after 3 characters

    Raises:
        SettingError: With the first such byte and where it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # surrogateescape adds 0xDC00 to the byte; what else cannot be encoded is a surrogate
        # itself, of which the low byte says nothing.
        code = ord(text[error.start])
        found = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise SettingError(f"{what} is not UTF-8: {found} after {error.start} characters") from None
