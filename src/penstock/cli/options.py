"""Options shared by several commands, and validation of their values."""

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
from penstock.blas import Blas, has_back_end
from penstock.cli.settings_options import Fields, option_of, size_text
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded

WITHOUT_VALUE = {"--kv-cache-quantization": "8"}
"""Values of flags that may be given without one, as in scripts for vllm-mlx."""
MODEL_HELP = (
    "Model folder, .gguf file, Hugging Face name (owner/model), or a name that penstock models "
    "lists; a name is downloaded once."
)
Model: TypeAlias = Annotated[
    str, typer.Option(help=MODEL_HELP, envvar="PENSTOCK_MODEL", show_default="the embedded model")
]
WeightsDtype: TypeAlias = Annotated[
    config.WeightsDtype,
    typer.Option(
        help="Data type of the weights. native: as stored; float32: converted when loaded; "
        "packed: codes of 4 to 8 bits are kept and multiplied by activations in 16 "
        "bits, on a CPU; packed-exact: as packed, with activations in 24 bits; auto: on a "
        "CPU, packed if the weights are quantized and Numba is installed. Other "
        "weights become float32 there if a quarter of the memory limit stays free.",
        envvar="PENSTOCK_WEIGHTS_DTYPE",
    ),
]
ModelSource: TypeAlias = Annotated[
    config.ModelSource,
    typer.Option(
        help="Library whose classes load a model folder. auto: mlx-lm; if it is installed, mlx-vlm "
        "for a model type that only that has, and for models whose images it reads.",
        envvar="PENSTOCK_MODEL_SOURCE",
    ),
]
DraftModel: TypeAlias = Annotated[dict[str, Any], Fields(config.EngineSettings, "draft_model")]
LOCAL_FIELDS = (
    "memory_limit",
    "max_kv_size",
    "keep",
    "draft_model",
    "speculative_tokens",
    "kv_cache_quantization",
    "kv_cache_min_quantize_tokens",
    "kv_cache_raw_first_tokens",
)
LocalEngine: TypeAlias = Annotated[dict[str, Any], Fields(config.EngineSettings, *LOCAL_FIELDS)]
SamplingOptions: TypeAlias = Annotated[dict[str, Any], Fields(config.SamplingSettings)]
System: TypeAlias = Annotated[dict[str, str], Fields(config.ServerSettings, "system")]
Adapter: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a LoRA or DoRA adapter in mlx-lm's form, with which the model answers.",
        metavar="FOLDER",
        show_default="none",
    ),
]
SERVER_URL = f"http://{config.HOST}:{config.PORT}"


def _url(words: str) -> Any:
    return typer.Option(help=words, envvar="PENSTOCK_URL", metavar="URL")


ServerURL: TypeAlias = Annotated[str, _url("Address of the server.")]
PartnerURL: TypeAlias = Annotated[
    str | None,
    _url(
        "Chat with this server, which needs OpenAI's chat completions, instead of a local model. "
        "--model is then the server's name for the model, by default its first model."
    ),
]
ServerKey: TypeAlias = Annotated[
    str | None,
    option_of(config.ServerSettings, "api_key", words="API key of the server.", unset="none"),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.")
]


def with_values(arguments: Sequence[str]) -> list[str]:
    """Insert the default values of flags given without a value.

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


def engine_size(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default memory limit, which depends on the model; SettingError for a limit of 0.

    >>> engine_size(str(MODEL_PATH), {})
    {'memory_limit': '200MB'}
    >>> engine_size("owner/model", {"block_size": 32})
    {'memory_limit': None, 'block_size': 32}
    """
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    limit = config.EMBEDDED_LIMIT if embedded else None
    if settings.get("memory_limit", 1) < 1:
        raise SettingError(
            "--memory-limit is 0; set it to the memory for weights and caches, such as 16GB"
        )
    return {"memory_limit": limit} | dict(settings)


def load_model(
    model: str,
    weights_dtype: config.WeightsDtype,
    memory_limit: Any = None,
    model_source: config.ModelSource = "auto",
    adapters: Mapping[str, Path] | None = None,
    *,
    mtp: str | None = None,
) -> Loaded:
    """Load a model, and report a conversion of its weights on standard error."""
    loaded = load_quietly(model, weights_dtype, memory_limit, model_source, adapters, mtp=mtp)
    if loaded.weights_note is not None:
        print(f"penstock: weights {loaded.weights_note}", file=sys.stderr)
    return loaded


def load_quietly(
    model: str,
    weights_dtype: config.WeightsDtype,
    memory_limit: Any = None,
    model_source: config.ModelSource = "auto",
    adapters: Mapping[str, Path] | None = None,
    *,
    mtp: str | None = None,
) -> Loaded:
    # mlx-lm takes a second to import, and --help and wrong flags do not need it.
    from penstock.models.loading import load_within

    return load_within(model, weights_dtype, memory_limit, model_source, adapters, mtp=mtp)


def head_of(settings: Mapping[str, Any]) -> str | None:
    """Return the multi-token head that an engine's settings name; None without one."""
    from penstock.models import head_source

    return head_source.head_of(settings)


def adapter_folders(values: Sequence[str] | None) -> dict[str, Path]:
    """Return the folders of adapters by name; SettingError if a name is repeated or has a plus.

    >>> adapter_folders(["pirate=adapters/one", "adapters/legal"])
    {'pirate': PosixPath('adapters/one'), 'legal': PosixPath('adapters/legal')}
    """
    folders: dict[str, Path] = {}
    for value in values or ():
        name, equals, folder = value.partition("=")
        path = Path(folder if equals else value).expanduser()
        name = name if equals else path.resolve().name
        if not name or "+" in name or name in folders:
            raise SettingError(
                f"--adapter {value}: write NAME=FOLDER, with a unique name without a plus"
            )
        folders[name] = path
    return folders


def check_weights(
    model: str,
    weights_dtype: config.WeightsDtype,
    memory_limit: Any = None,
    parts: int = 1,
    model_source: config.ModelSource = "auto",
    *,
    mtp: str | None = None,
) -> None:
    """Raise NeverFits if weights to be loaded by other processes exceed the memory limit."""
    from penstock.models.loading import check_fits

    check_fits(model, weights_dtype, memory_limit, parts, model_source, mtp=mtp)


def check_template(template: str | None) -> None:
    """Raise SettingError for a missing template file; identifiers may be the model's templates."""
    if template is not None and not template.isidentifier():
        from penstock.models.chat_template import template_text

        template_text(template)


def use_template(loaded: Loaded, template: str | None) -> None:
    if template is not None:
        from penstock.models.chat_template import use_template

        use_template(loaded, template)


def check_folder_limit(limit_bytes: int) -> None:
    from penstock.tiers.disk.limits import payload_bytes

    try:
        payload_bytes(limit_bytes)
    except ValueError as error:
        raise SettingError(
            f"--ssd-cache-limit {size_text(limit_bytes)}: {error}; raise it"
        ) from None


def check_writable(flag: str, folder: Path | None) -> None:
    """Create a folder if needed; SettingError if it is not writable, or unsafe.

    A folder is unsafe if it is world-writable, or if it or a file in it belongs to another user.
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
        raise SettingError(f"{flag} {folder}: {error.strerror}; use a writable folder") from None


def _check_own(flag: str, folder: Path) -> None:
    if os.name != "posix":
        return
    if folder.stat().st_mode & stat.S_IWOTH:
        raise SettingError(
            f"{flag} {folder}: the folder is world-writable; remove that permission "
            f"(chmod o-w), or name another folder"
        )
    # Of a symbolic link the owner is checked, not the target.
    owned = [folder.stat(), *(path.lstat() for path in (folder, *folder.iterdir()))]
    if any(status.st_uid != os.geteuid() for status in owned):
        raise SettingError(
            f"{flag} {folder}: it, or a file in it, belongs to another user; use a folder of "
            f"your own"
        )


def check_tiers(settings: config.EngineSettings) -> None:
    """Validate the settings of cold tiers before a model is loaded; errors contain no secrets."""
    if settings.cold_tiers:
        from penstock.engine.offload import tier_kinds

        tier_kinds.check_tiers(settings)


def check_codec_settings(limits: Mapping[str, Any]) -> None:
    """Raise SettingError for an unknown codec, or for codec settings without a codec."""
    name = limits.get("kv_cache_quantization")
    fields = config.EngineSettings.model_fields
    flags = [
        f"--{key.replace('_', '-')}"
        for key, value in limits.items()
        if key.startswith("kv_cache_") and value != fields[key].default
    ]
    if flags and name is None:
        raise SettingError(
            f"{', '.join(flags)}: no codec is set; set one with --kv-cache-quantization, "
            f"or remove this"
        )
    check_codec(name)


def check_codec(name: str | None) -> None:
    if name is None:
        return
    from penstock.kv.codecs.names import parse_scheme

    try:
        parse_scheme(name)
    except ValueError as error:
        raise SettingError(
            f"--kv-cache-quantization: {error}; without a value it means 8"
        ) from None


def local_limits(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    check_codec_settings(settings)
    config.parse(config.EngineSettings, **{**settings, "memory_limit": 1})
    return engine_size(model, settings)


def warn_of_slow_blas(blas: Blas) -> None:
    if blas.advice is not None and has_back_end():
        print(f"penstock: {blas.advice}", file=sys.stderr)


def lenient_input() -> None:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def lenient_output() -> None:
    """Print `?` for characters that the output's encoding cannot represent."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def check_text(what: str, text: str) -> None:
    r"""Raise SettingError for text with surrogates, which stand for bytes that are not UTF-8.

    >>> check_text("the prompt", b"caf\xe9".decode(errors="surrogateescape"))
    Traceback (most recent call last):
    penstock.errors.SettingError: the prompt is not UTF-8: byte 0xe9 after 3 characters
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # surrogateescape adds 0xDC00 to a byte; other surrogates were in the text itself.
        code = ord(text[error.start])
        shown = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise SettingError(
            f"{what} is not UTF-8: {shown} after {counted(error.start, 'character')}"
        ) from None
