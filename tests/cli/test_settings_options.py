"""Options generated from settings: each setting is declared once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.main import get_command

from penstock import config
from penstock.cli import options
from penstock.cli.commands import app
from penstock.cli.settings_options import Fields, size_bytes, size_text, with_settings
from penstock.config import Setting, Settings, setting_of
from penstock.errors import SettingError

KINDS = {
    config.SamplingSettings: "generate",
    config.EngineSettings: "serve",
    config.ServerSettings: "serve",
    config.FleetSettings: "serve",
}
"""All settings, with a command that has their flags."""


CLIENT_KEY = "a client's key, which opens a server and is not shown to one"
OWN_OPTIONS = {
    ("cache", "--ssd-cache-dir"): "must be there, and nothing is kept in it",
    ("chat", "--api-key"): CLIENT_KEY,
    ("explain", "--api-key"): CLIENT_KEY,
    ("launch", "--api-key"): CLIENT_KEY,
    ("top", "--api-key"): CLIENT_KEY,
}
"""Options with the name of a setting and words of their own: command, flag, and the reason."""


def fields() -> Iterator[tuple[type[Settings], str]]:
    for kind in KINDS:
        for name in kind.model_fields:
            yield kind, name


def test_all_settings_classes_are_tested() -> None:
    kinds = {
        each
        for each in vars(config).values()
        if isinstance(each, type) and issubclass(each, Settings) and each is not Settings
    }
    assert kinds == set(KINDS)


@pytest.mark.parametrize(("kind", "name"), list(fields()), ids=str)
def test_every_setting_has_help(kind: type[Settings], name: str) -> None:
    setting = setting_of(kind, name)
    assert setting.help[0].isupper() and setting.help.endswith("."), setting.help
    required = kind.model_fields[name].is_required()
    assert setting.unset or not required, "a flag without a default says what happens without it"


def test_setting_without_help_is_refused() -> None:
    class Silent(Settings):
        rooms: int = 3

    with pytest.raises(TypeError, match=r"Silent\.rooms has no Setting: add its help and unit"):
        Fields(Silent)


@pytest.mark.parametrize(
    ("kind", "name"), [each for each in fields() if setting_of(*each).is_flag], ids=str
)
def test_every_setting_has_flag_help_and_variable(kind: type[Settings], name: str) -> None:
    command = get_command(app).commands[KINDS[kind]]  # type: ignore[attr-defined]
    flag = config.flag_of(kind, name)
    (option,) = [each for each in command.params if f"--{flag}" in each.opts]
    assert option.help == setting_of(kind, name).help
    assert own_variable(option) == f"PENSTOCK_{flag.upper().replace('-', '_')}"
    assert option.name == flag.replace("-", "_"), "its key in a TOML file"


def own_variable(option: Any) -> str | None:
    """Return the first variable of an option; those of other programs follow it."""
    names = option.envvar
    return names[0] if isinstance(names, list) else names


def own_options(
    package: str, command: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield each option of a package's commands with the command's first word."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from own_options(package, inner, (*path, name))
    module = getattr(command.callback, "__module__", "")
    if path and module.split(".")[: package.count(".") + 1] == package.split("."):
        yield from ((path[0], one) for one in command.params if one.param_type_name == "option")


def settings_with(flag: str) -> list[tuple[Setting, str]]:
    """Return the settings that have a flag, each with its environment variable."""
    return [
        (setting_of(kind, name), f"PENSTOCK_{flag[2:].upper().replace('-', '_')}")
        for kind, name in fields()
        if setting_of(kind, name).is_flag and f"--{config.flag_of(kind, name)}" == flag
    ]


def twins(package: str, command: Any) -> set[tuple[str, str]]:
    """Return the options with a setting's name but different help, variable or unit."""
    return {
        (name, flag)
        for name, option in own_options(package, command)
        for flag in option.opts
        if (known := settings_with(flag))
        and not any(
            (option.help, own_variable(option), option.metavar)
            == (setting.help, variable, setting.unit)
            for setting, variable in known
        )
    }


def test_no_option_duplicates_a_setting() -> None:
    assert twins("penstock.cli", get_command(app)) == set(OWN_OPTIONS)


def test_overridden_options_keep_setting_variable() -> None:
    for name, option in own_options("penstock.cli", get_command(app)):
        for flag in option.opts:
            if (name, flag) in OWN_OPTIONS:
                named = {(variable, setting.unit) for setting, variable in settings_with(flag)}
                assert (own_variable(option), option.metavar) in named, (name, flag)


def test_check_detects_duplicate_options() -> None:
    generated = Annotated[dict[str, Any], Fields(config.EngineSettings, "memory_limit")]

    def first(*, given: Any, top_p: float = 1.0) -> None:
        """Take one option of the settings, and one that is written by hand."""

    def second(most: Annotated[str, typer.Option("--memory-limit", help="Most.")] = "1GB") -> None:
        """Take an option that is written by hand."""

    first.__annotations__["given"] = generated
    made_up = typer.Typer(add_completion=False)
    made_up.command()(with_settings(first))
    made_up.command()(second)
    command = get_command(made_up)
    assert twins(__name__, command) == {("first", "--top-p"), ("second", "--memory-limit")}
    assert twins("penstock.cli", command) == set()


@pytest.mark.parametrize("kind", list(KINDS))
def test_flag_defaults_match_settings(kind: type[Settings]) -> None:
    taken = taken_by(kind)
    required = {"memory_limit": 1} if kind is config.EngineSettings else {}
    assert kind(**taken, **required) == kind(**required)


class Everything(Settings):
    """Settings with a field of each type that has flags."""

    rooms: Annotated[int, Field(ge=2, le=9), Setting("Rooms.", "NUMBER")] = 4
    most: Annotated[int, Setting("Most.", "BYTES")] = 1_500_000
    least: Annotated[int | None, Setting("Least.", "BYTES", unset="none")] = None
    where: Annotated[Path | None, Setting("Where.", "FOLDER", unset="nowhere")] = None
    bits: Annotated[Literal[2, 4] | None, Setting("Bits.", "BITS", unset="all")] = None
    when: Annotated[Literal["now", "later"], Setting("When.")] = "now"
    layers: Annotated[tuple[int, ...], Setting("Layers.", "LAYERS", unset="none")] = ()
    friends: Annotated[tuple[str, ...], Setting("Friends.", "NAME")] = ()
    secret: Annotated[str | None, Field(repr=False), Setting("Secret.", unset="none")] = None
    loud: Annotated[bool, Setting("Loud.")] = False
    wait_seconds: Annotated[float, Field(gt=0.0), Setting("Wait.", "SECONDS")] = 1.5
    inner: Annotated[int, Setting("No flag.", is_flag=False)] = 7
    short: Annotated[int, Setting("Renamed.", "NUMBER", flag="quite-long")] = 1


def taken_by(kind: type[Settings], *arguments: str) -> dict[str, Any]:
    """Return the values that a command receives from these flags."""
    taken: dict[str, Any] = {}

    def command(other: str = "other", *, given: Any) -> None:
        taken.update(given, other=other)

    command.__annotations__["given"] = Annotated[dict[str, Any], Fields(kind)]
    made = typer.Typer(rich_markup_mode=None, add_completion=False)
    made.command()(with_settings(command))
    get_command(made)(list(arguments), standalone_mode=False)
    assert taken.pop("other") == "other", "a parameter beside them is left alone"
    return taken


def test_unset_options_keep_defaults() -> None:
    assert taken_by(Everything) == {
        "rooms": 4,
        "most": 1_500_000,
        "when": "now",
        "loud": False,
        "wait_seconds": 1.5,
        "short": 1,
    }


def test_option_values_are_parsed(tmp_path: Path) -> None:
    words = (
        "--rooms 9 --most 2GB --least 3KB --where ~/here --bits 4 --when later --layers 1,2 "
        "--friends a --friends b --secret word --loud --wait 2 --quite-long 5"
    )
    given = taken_by(Everything, *words.split())
    assert given == {
        "rooms": 9,
        "most": 2_000_000_000,
        "least": 3_000,
        "where": Path.home() / "here",
        "bits": 4,
        "when": "later",
        "layers": (1, 2),
        "friends": ("a", "b"),
        "secret": "word",
        "loud": True,
        "wait_seconds": 2.0,
        "short": 5,
    }
    assert Everything(**given).model_dump() == {**given, "inner": 7}


def test_empty_secret_is_unset() -> None:
    assert "secret" not in taken_by(Everything, "--secret", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--most", "much"), "--most 'much' is not a size"),
        (("--where", " "), "--where is empty; set a folder"),
        (("--layers", "1,x"), "--layers 1,x: 'x' is not a number"),
    ],
)
def test_error_of_unparsable_value_names_flag(arguments: tuple[str, str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        taken_by(Everything, *arguments)


def test_out_of_range_number_is_refused() -> None:
    with pytest.raises(typer.TyperException, match="greater than or equal to 2"):
        taken_by(Everything, "--rooms", "1")


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 10**6, 20 * 10**9, 10**12 + 1])
def test_size_text_round_trips(count: int) -> None:
    assert size_bytes("--size", size_text(count)) == count


def test_command_may_use_subset_of_settings() -> None:
    assert Fields(config.EngineSettings, "memory_limit").names == ("memory_limit",)
    assert options.engine_size("owner/model", {"memory_limit": 5}) == {"memory_limit": 5}


def test_command_may_override_default() -> None:
    kept = Fields(Everything, "rooms", unset={"rooms": "as many as fit"})
    (option,) = kept.options()
    assert option.default is None
    assert kept.take({"rooms": None}) == {}
    assert kept.take({"rooms": 5}) == {"rooms": 5}
