"""Models of `penstock serve MODEL MODEL ...` and of `--models FILE`, with their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path
from typing import Any

from penstock import config
from penstock.cli.options import adapter_folders
from penstock.cli.settings_file import toml_of
from penstock.errors import SettingError
from penstock.models.encoder_types import kinds_of

OWN = (
    *("name", "path", "aliases", "adapters", "pin", "ttl"),
    *("weights_dtype", "model_source", "chat_template"),
)
ANSWERING = (*config.SAMPLED, "max_tokens", "system", "tool_parser", "reasoning_parser")
"""Server settings that can be set per model."""
COMMON = ("memory_limit", "memory_threshold", "ssd_cache_dir", "ssd_cache_limit")
"""Engine settings that all models share, so cannot be set per model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    name: str
    path: str
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of adapters by name."""
    pin: bool = False
    ttl_seconds: float | None = None
    weights_dtype: config.WeightsDtype
    model_source: config.ModelSource
    chat_template: str | None = None
    answering: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of requests that the model answers, according to its config."""
        return kinds_of(self.path)


def name_of(model: str) -> str:
    """Return the name of a model in the APIs: that of its folder or file, or its hub name."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return Path(normpath(path.absolute())).name if path.is_dir() else model  # keeps a link's name


def table_models(paths: Sequence[str], file: Path | None, **usual: Any) -> list[TableModel]:
    """Return the models of a `--models` file, then those of `paths`.

    Args:
        usual: default `weights_dtype`, `model_source` and `chat_template`.
    """
    models = [] if file is None else read_table(file, **usual)
    models += [TableModel(name=name_of(path), path=path, **usual) for path in paths]
    seen: set[str] = set()
    for name in (name for model in models for name in (model.name, *model.aliases)):
        if name in seen:
            raise SettingError(
                f"two models have the name {name}; set other names in a file (--models FILE)"
            )
        seen.add(name)
    return models


def read_table(file: Path, **usual: Any) -> list[TableModel]:
    content = toml_of("--models", file)
    tables = content.get("model")
    if set(content) != {"model"} or not isinstance(tables, list) or not tables:
        raise SettingError(
            f'--models {file}: write a table [[model]] with path = "..." for each model'
        )
    return [_model(file, number, table, usual) for number, table in enumerate(tables, 1)]


def _model(file: Path, number: int, table: Any, usual: dict[str, Any]) -> TableModel:
    where = f"--models {file}, model {number}"
    values = {key.replace("-", "_"): value for key, value in dict(table).items()}
    if not isinstance(values.get("path"), str):
        raise SettingError(f"{where} has no path")
    own = {key: values.pop(key) for key in OWN if key in values}
    answering = {key: values.pop(key) for key in ANSWERING if key in values}
    for key in values:
        if key in COMMON or key not in config.EngineSettings.model_fields:
            why = "is the same for all models: a flag" if key in COMMON else "is not a setting"
            raise SettingError(f"{where}: {key.replace('_', '-')} {why}")
    try:
        config.parse(config.ServerSettings, **answering)
        config.parse(config.EngineSettings, **{**values, "memory_limit": 1})
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None
    ttl = own.pop("ttl", None)
    aliases = own.pop("aliases", [])
    adapters = own.pop("adapters", {})
    if not isinstance(adapters, dict):
        raise SettingError(f'{where}: adapters is a table of folders, as {{ pirate = "FOLDER" }}')
    try:
        folders = adapter_folders([f"{name}={folder}" for name, folder in adapters.items()])
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None
    path = str(Path(own["path"]).expanduser())
    right = isinstance(own.get("pin", False), bool) and isinstance(aliases, list)
    if not right or not all(isinstance(alias, str) for alias in aliases):
        raise SettingError(f"{where}: pin is true or false, and aliases a list of names")
    if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
        raise SettingError(f"{where}: ttl {ttl}: must be seconds, more than 0")
    own = {**usual, "name": name_of(path), **own, "path": path}
    return TableModel(
        **own,
        aliases=tuple(aliases),
        adapters=folders,
        ttl_seconds=ttl,
        answering=answering,
        engine=values,
    )
