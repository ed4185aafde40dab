"""Command options generated from settings fields: name, help, unit, default, range.

    SamplingOptions: TypeAlias = Annotated[dict[str, Any], Fields(SamplingSettings)]

    @with_settings
    def command(*, sampling: SamplingOptions, as_json: options.Json = False) -> None: ...

has a flag for each field, and receives a dictionary of the fields that are set. For another help
text, a command uses `option_of` with `words`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import typer
from pydantic.fields import FieldInfo

from penstock import memory
from penstock.cli.foreign_names import FOREIGN_VARIABLES
from penstock.config import Setting, Settings, flag_of, setting_of
from penstock.errors import SettingError

PREFIX = "PENSTOCK_"


class Fields:
    """Settings fields offered as options of a command: `names`, or all that have a flag."""

    def __init__(
        self,
        kind: type[Settings],
        *names: str,
        variables: bool = True,
        unset: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.variables = variables
        self.unset = unset or {}
        self.names = names or tuple(n for n in kind.model_fields if setting_of(kind, n).is_flag)

    def options(self) -> Iterator[inspect.Parameter]:
        for name in self.names:
            yield _option(self.kind, name, self.variables, self.unset.get(name))

    def take(self, values: dict[str, Any]) -> dict[str, Any]:
        options = {name: values.pop(_parameter_name(self.kind, name)) for name in self.names}
        return {
            name: _value(self.kind, name, value)
            for name, value in options.items()
            if not _is_unset(self.kind.model_fields[name], value)
        }


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Expand a command's `Fields` parameters into options; a decorator."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Fields] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        fields = next((x for x in get_args(parameter.annotation) if isinstance(x, Fields)), None)
        if fields is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = fields
            parameters += fields.options()

    @wraps(command)
    def called(**values: Any) -> None:
        command(**{name: fields.take(values) for name, fields in groups.items()}, **values)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def size_bytes(flag: str, text: str) -> int:
    try:
        return memory.parse_bytes(text)
    except SettingError as error:
        raise SettingError(f"{flag} {error}") from None


def size_text(count: int) -> str:
    """Format a size exactly, as a flag value.

    >>> size_text(20_000_000_000), size_text(1_500_000), size_text(1_001)
    ('20GB', '1500KB', '1001')
    """
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count and count % unit_bytes == 0:
            return f"{count // unit_bytes}{unit}"
    return str(count)


def folder(flag: str, text: str) -> Path:
    if not text.strip():
        raise SettingError(f"{flag} is empty; set a folder, or remove it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(f"{flag} {text}: {error}") from None


def numbers(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if not word.isdecimal()]:
        raise SettingError(f"{flag} {text}: {wrong[0]!r} is not a number")
    return tuple(map(int, words))


def option_of(
    kind: type[Settings],
    name: str,
    *,
    words: str | None = None,
    unset: str | None = None,
    has_variable: bool = True,
) -> Any:
    """Return the Typer option of a field; `words` replaces its help, `unset` its shown default."""
    field, setting, flag = kind.model_fields[name], setting_of(kind, name), flag_of(kind, name)
    return typer.Option(
        f"--{flag}",
        help=words or setting.help,
        envvar=_variables(flag) if has_variable else None,
        metavar=setting.unit,
        show_default=unset or True,
        **_range(field, _typed(field, setting)),
    )


def _variables(flag: str) -> list[str]:
    variable = PREFIX + flag.upper().replace("-", "_")
    return [variable, *FOREIGN_VARIABLES.get(variable, ())[:1]]


def _option(
    kind: type[Settings], name: str, has_variable: bool, unset: str | None
) -> inspect.Parameter:
    field, setting = kind.model_fields[name], setting_of(kind, name)
    unset = unset or setting.unset
    default = field.default
    if unset is not None or isinstance(default, tuple):
        default = None
    elif setting.unit == "BYTES":
        default = size_text(default)
    read = _typed(field, setting)
    option = option_of(kind, name, unset=unset, has_variable=has_variable)
    return inspect.Parameter(
        _parameter_name(kind, name),
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[read if default is not None else read | None, option],
    )


def _parameter_name(kind: type[Settings], name: str) -> str:
    return flag_of(kind, name).replace("-", "_")


def _typed(field: FieldInfo, setting: Setting) -> Any:
    of = _without_none(field.annotation)
    if setting.unit == "BYTES" or of in (Path, tuple[int, ...]):
        return str
    if of == tuple[str, ...]:
        return list[str]
    if get_origin(of) is Literal and not isinstance(get_args(of)[0], str):
        return type(get_args(of)[0])
    return of


def _without_none(annotation: Any) -> Any:
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return parts[0] if type(None) in get_args(annotation) else annotation


def _range(field: FieldInfo, read: Any) -> dict[str, Any]:
    if read not in (int, float):
        return {}
    lowest = [bound.ge for bound in field.metadata if isinstance(bound, annotated_types.Ge)]
    highest = [bound.le for bound in field.metadata if isinstance(bound, annotated_types.Le)]
    if not lowest:
        return {}
    return {"min": lowest[0], **({"max": highest[0]} if highest else {})}


def _is_unset(field: FieldInfo, value: Any) -> bool:
    return value is None or value == [] or (value == "" and not field.repr)


def _value(kind: type[Settings], name: str, value: Any) -> Any:
    flag = f"--{flag_of(kind, name)}"
    of = _without_none(kind.model_fields[name].annotation)
    if setting_of(kind, name).unit == "BYTES":
        return size_bytes(flag, value)
    if of is Path:
        return folder(flag, value)
    if of == tuple[int, ...]:
        return numbers(flag, value)
    return tuple(value) if isinstance(value, list) else value
