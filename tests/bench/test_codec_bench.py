"""`penstock bench-kv-cache`: true bytes, errors that mean what they say, the rival beside them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.bench import codecs as bench
from penstock.bench.codecs import Row, Shape, Table
from penstock.cli import main
from penstock.kv.codecs import parse_scheme

SHAPE = Shape(layers=2, heads=4, head_dim=128, seq_len=256, dtype="float32", rounds=1)
NAMES = ("raw", "affine8", "affine4", "kivi4", "kivi5/turbo3.5", "turbo3")


@pytest.fixture(scope="module", params=bench.DATA)
def table(request: pytest.FixtureRequest) -> Table:
    return bench.measure(SHAPE, request.param, NAMES)


def row(table: Table, name: str) -> Row:
    (found,) = (row for row in table.rows if row.name == name)
    return found


def test_bytes_are_those_of_the_formula(table: Table) -> None:
    for name in NAMES:
        found = row(table, name)
        bits = parse_scheme(name).token_bits(128, 128, 32)
        assert 8 * found.nbytes == bits * 2 * 4 * 256
        assert found.ratio == pytest.approx(2 * 128 * 32 / bits, abs=1e-3)
    assert row(table, "mlx-lm 4").ratio == pytest.approx(32 / 5), "its scales are float32"


def test_raw_loses_nothing_and_fewer_bits_lose_more(table: Table) -> None:
    raw = row(table, "raw")
    assert (raw.kl, raw.top_1, raw.mean_error, raw.max_error) == (0, 1, 0, 0)
    figures = [row(table, name) for name in ("affine8", "affine4", "turbo3")]
    for better, worse in pairwise(figures):
        assert better.relative_mse_values < worse.relative_mse_values
    assert row(table, "affine8").kl < row(table, "affine4").kl


def test_the_rival_has_the_errors_of_the_same_codec_of_ours(table: Table) -> None:
    """Else the two would not be measured alike."""
    for bits in (4, 8):
        ours, theirs = row(table, f"affine{bits}"), row(table, f"mlx-lm {bits}")
        for figure in ("relative_mse_keys", "relative_mse_values", "mean_error"):
            assert getattr(ours, figure) == pytest.approx(getattr(theirs, figure), rel=0.1)
        # Bytes of ours are made by other operations: what is left of KL, 1e-6, is a fifth less.
        assert (0.9 if bits == 4 else 0.7) <= ours.kl / theirs.kl <= 1.1


def test_keys_by_channel_do_not_mind_what_ruins_others(table: Table) -> None:
    """At 3.5 times less than float16: the field's size. The rival takes more."""
    ours, theirs = row(table, "kivi5/turbo3.5"), row(table, "mlx-lm 4")
    least = {"gauss": 2, "outliers": 10, "biased": 10}[table.data]
    assert parse_scheme(ours.name).ratio(128, 128, 16) >= 3.5
    assert ours.kl < theirs.kl / least
    if table.data != "gauss":
        assert theirs.kl > 10 * row(bench.measure(SHAPE, "gauss", ["raw"]), "mlx-lm 4").kl


def test_heads_that_a_codec_cannot_hold_are_told_of() -> None:
    shape = Shape(layers=1, heads=2, head_dim=80, seq_len=64, dtype="float32", rounds=1)
    found = bench.measure(shape, "gauss", ["affine4", "kivi4/turbo4"])
    assert [row.name for row in found.rows] == ["kivi4/turbo4"]
    assert "no group does" in found.refused["affine4"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "1", "--heads", "2", "--head-dim", "64", "--seq-len", "64"]
    small += ["--rounds", "1", "--dtype", "float32"]
    picture = tmp_path / "codecs.png"
    given = ["--codecs", "raw,k8v4", "--json", "--plot", str(picture)]
    code = main(["bench-kv-cache", *small, *given])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["raw", "rot8/rot4", "mlx-lm 8", "mlx-lm 4"]
    assert found["baseline"] == "float32"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench-kv-cache", *small, "--codecs", "4"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "affine4" in printed


def test_a_models_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", "embedded", "--seq-len", "128", "--rounds", "1", "--codecs", "raw,8"]
    assert main(["bench-kv-cache", *given, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shape = found["shape"]
    assert (shape["layers"], shape["heads"], shape["head_dim"], shape["seq_len"]) == (2, 2, 64, 128)
    raw, eight = found["rows"][:2]
    assert raw["kl"] == 0 < eight["kl"] < 0.01


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--codecs", "q4"], "is no codec; there are raw"),
        (["--codecs", ","], "names none"),
        (["--data", "nowhere"], "no such folder; or one of gauss"),
        (["--seq-len", "100"], "not a multiple of 64"),
    ],
)
def test_wrong_input_is_one_line(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-kv-cache", *given]) == 2
    assert words in capsys.readouterr().err
