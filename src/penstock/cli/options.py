"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from penstock import config
from penstock.blas import Blas
from penstock.cli.settings_options import Fields, option_of, size_text
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded

WITHOUT_VALUE = {"--kv-cache-quantization": "8"}
"""The values of flags that may stand without one, as vllm-mlx's and its scripts have them."""
MODEL_HELP = (
    "Folder of a model, a .gguf file, a Hugging Face name (owner/model), or smollm2: a small chat "
    "model, fetched once."
)
Model: TypeAlias = Annotated[
    str,
    typer.Option(
        help=MODEL_HELP,
        envvar="PENSTOCK_MODEL",
        show_default="the embedded model",
    ),
]
WeightsDtype: TypeAlias = Annotated[
    config.WeightsDtype,
    typer.Option(
        help="Number type of the weights. native: as stored; float32: converted when loaded; auto: "
        "float32 on a CPU, where MLX is slow with other types, if a quarter of the memory limit "
        "stays free.",
        envvar="PENSTOCK_WEIGHTS_DTYPE",
    ),
]
DraftModel: TypeAlias = Annotated[dict[str, Any], Fields(config.EngineSettings, "draft_model")]
EngineSize: TypeAlias = Annotated[
    dict[str, Any], Fields(config.EngineSettings, "memory_limit", "block_size")
]
KVOptions: TypeAlias = Annotated[dict[str, Any], Fields(config.KVSettings)]
SamplingOptions: TypeAlias = Annotated[dict[str, Any], Fields(config.SamplingSettings)]
System: TypeAlias = Annotated[
    str | None,
    typer.Option(help="System prompt before the conversation.", metavar="TEXT"),
]
SERVER_URL = f"http://{config.HOST}:{config.PORT}"
"""Address of a server that was started with the defaults."""


def _url(words: str) -> Any:
    return typer.Option(help=words, envvar="PENSTOCK_URL", metavar="URL")


ServerURL: TypeAlias = Annotated[str, _url("Address of the server.")]
PartnerURL: TypeAlias = Annotated[
    str | None,
    _url(
        "Talk to this server in place of a model here: any that speaks OpenAI's chat completions. "
        "--model is then its name for the model, by default its first."
    ),
]
ServerKey: TypeAlias = Annotated[
    str | None,
    option_of(config.ServerSettings, "api_key", words="Key of the server.", unset="none"),
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


def engine_size(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings with a memory limit; the embedded model has one of its own.

    >>> engine_size(str(MODEL_PATH), {})
    {'memory_limit': '200MB'}
    >>> engine_size("owner/model", {"block_size": 32})
    {'memory_limit': None, 'block_size': 32}

    Raises:
        SettingError: the limit is nothing.
    """
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    limit = config.EMBEDDED_LIMIT if embedded else None
    if given.get("memory_limit", 1) < 1:
        raise SettingError("--memory-limit is 0; give the memory for weights and caches, as 16GB")
    return {"memory_limit": limit} | dict(given)


def load_model(model: str, weights_dtype: config.WeightsDtype, memory_limit: Any = None) -> Loaded:
    """Load a model, and note on standard error a change of its weights.

    Args:
        model: as a command's user named it.
        weights_dtype: see `--weights-dtype`.
        memory_limit: bytes, or a text like "16GB"; None takes the machine's default.
    """
    loaded = load_quietly(model, weights_dtype, memory_limit)
    if loaded.weights_note is not None:
        print(f"penstock: weights {loaded.weights_note}", file=sys.stderr)
    return loaded


def load_quietly(
    model: str, weights_dtype: config.WeightsDtype, memory_limit: Any = None
) -> Loaded:
    """Load a model as `load_model` does, without a word."""
    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.models.within_limit import load_within

    return load_within(model, weights_dtype, memory_limit)


def load_draft(
    name: str | None, weights_dtype: config.WeightsDtype, loaded: Loaded
) -> Loaded | None:
    """Load a draft model for another model; None for no name.

    Raises:
        SettingError: its tokenizer is another.
    """
    if name is None:
        return None
    from penstock.models.vocabulary import check_same_vocabulary

    draft = load_quietly(name, weights_dtype)
    check_same_vocabulary(draft.tokenizer, loaded.tokenizer)
    return draft


def check_folder_limit(limit_bytes: int) -> None:
    """Refuse a `--ssd-cache-limit` with less than a folder must have room for.

    Raises:
        SettingError: says how many bytes there must be.
    """
    from penstock.tiers.disk.limits import payload_bytes

    try:
        payload_bytes(limit_bytes)
    except ValueError as error:
        raise SettingError(
            f"--ssd-cache-limit {size_text(limit_bytes)}: {error}; raise it"
        ) from None


def check_writable(flag: str, folder: Path | None) -> None:
    """Make a folder if it is not there, and refuse one that cannot be written to, or by others too.

    Raises:
        SettingError: it is a file, or the system does not let it be made or written to. Also if it
            or a file in it belongs to another user, or if everybody may write to it.
    """
    if folder is None:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{flag} {folder} is a file; name a folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        _check_own(flag, folder)
    except OSError as error:
        raise SettingError(
            f"{flag} {folder}: {error.strerror}; name a folder that can be written to"
        ) from None


def _check_own(flag: str, folder: Path) -> None:
    """Refuse a folder that another user owns, can write to, or has put something into."""
    if os.name != "posix":
        return
    if folder.stat().st_mode & stat.S_IWOTH:
        raise SettingError(
            f"{flag} {folder}: every user of this machine can write there; take that right away "
            f"(chmod o-w), or name another folder"
        )
    # A link is asked for itself: where it leads was its maker's choice.
    owned = [folder.stat(), *(path.lstat() for path in (folder, *folder.iterdir()))]
    if any(status.st_uid != os.geteuid() for status in owned):
        raise SettingError(
            f"{flag} {folder}: it, or something in it, belongs to another user; name a folder of "
            f"your own"
        )


def check_tiers(settings: config.EngineSettings) -> None:
    """Refuse settings of cold tiers that name none, before a model is loaded.

    Raises:
        SettingError: names the right form, and repeats nothing secret.
    """
    if settings.cold_tiers:
        from penstock.engine.offload import tier_kinds

        tier_kinds.check_tiers(settings)


def check_codec_settings(limits: Mapping[str, Any]) -> None:
    """Refuse an engine's settings of codecs without a codec, and one that does not exist.

    Raises:
        SettingError: names the settings without effect, or the codecs that there are.
    """
    name = limits.get("kv_cache_quantization")
    fields = config.EngineSettings.model_fields
    given = [
        f"--{key.replace('_', '-')}"
        for key, value in limits.items()
        if key.startswith("kv_cache_") and value != fields[key].default
    ]
    if given and name is None:
        raise SettingError(
            f"{', '.join(given)}: no codec is set; name one by --kv-cache-quantization, "
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


def kv_settings(given: Mapping[str, Any]) -> config.KVSettings:
    """Return how a sequence's caches are made, by fields of `KVSettings`.

    Raises:
        SettingError: they contradict each other, or there is no such codec.
    """
    name = given.get("kv_cache_quantization")
    check_codec(name)
    if name is not None and name.strip().lower() == "raw":  # as if none were named
        name = None
    return config.parse(config.KVSettings, **{**given, "kv_cache_quantization": name})


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
        # surrogateescape adds 0xDC00 to the byte; any other is a surrogate of the text itself,
        # and its low byte says nothing.
        code = ord(text[error.start])
        shown = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise SettingError(f"{what} is not UTF-8: {shown} after {error.start} characters") from None
