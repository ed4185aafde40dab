"""`penstock bench-kv-cache`: bytes, errors and the comparison with mlx-lm."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_families

from penstock.cli import main
from penstock.kv.codecs.names import parse_scheme
from penstock_bench import codecs as bench
from penstock_bench import vllm_mlx
from penstock_bench.codecs import CacheShape, CodecRow, Table

SHAPE = CacheShape(layers=2, heads=4, head_dim=128, seq_len=256, dtype="float32", rounds=1)
NAMES = (
    *("raw", "affine8", "kivi8", "affine4", "kivi4"),
    *("kivi5/turbo3.5", "kivi6/turbo2.5", "turbo3"),
)


@pytest.fixture(scope="module", params=bench.DATA)
def table(request: pytest.FixtureRequest) -> Table:
    return bench.measure(SHAPE, request.param, NAMES)


def row(table: Table, name: str) -> CodecRow:
    (found,) = (row for row in table.rows if row.name == name)
    return found


def test_nbytes_match_formula(table: Table) -> None:
    for name in NAMES:
        found = row(table, name)
        bits = parse_scheme(name).token_bits(128, 128, 32)
        assert 8 * found.nbytes == bits * 2 * 4 * 256
        assert found.ratio == pytest.approx(2 * 128 * 32 / bits, abs=1e-3)
    assert row(table, "mlx-lm 4").ratio == pytest.approx(32 / 5), "its scales are float32"


def test_raw_is_lossless_and_error_grows_with_fewer_bits(table: Table) -> None:
    raw = row(table, "raw")
    assert (raw.kl, raw.top_1, raw.mean_error, raw.max_error) == (0, 1, 0, 0)
    figures = [row(table, name) for name in ("affine8", "affine4", "turbo3")]
    for better, worse in pairwise(figures):
        assert better.relative_mse_values < worse.relative_mse_values
    assert row(table, "affine8").kl < row(table, "affine4").kl


def test_errors_match_mlx_lm_for_same_codec(table: Table) -> None:
    for bits in (4, 8):
        ours, theirs = row(table, f"affine{bits}"), row(table, f"mlx-lm {bits}")
        for figure in ("relative_mse_keys", "relative_mse_values", "mean_error"):
            assert getattr(ours, figure) == pytest.approx(getattr(theirs, figure), rel=0.1)
        # Bytes of ours are made by other operations: what is left of KL, 1e-6, is a fifth less.
        assert (0.9 if bits == 4 else 0.7) <= ours.kl / theirs.kl <= 1.1


def test_per_channel_keys_tolerate_outliers(table: Table) -> None:
    """At a ratio of 3.5 to float16; the rival takes more bytes."""
    ours, theirs = row(table, "kivi5/turbo3.5"), row(table, "mlx-lm 4")
    least = {"gauss": 2, "outliers": 10, "biased": 10}[table.data]
    assert parse_scheme(ours.name).ratio(128, 128, 16) >= 3.5
    assert ours.kl < theirs.kl / least
    if table.data != "gauss":
        assert theirs.kl > 10 * row(bench.measure(SHAPE, "gauss", ["raw"]), "mlx-lm 4").kl


def test_six_bit_keys_trade_value_error_for_key_error(table: Table) -> None:
    ours, theirs = row(table, "kivi6/turbo2.5"), row(table, "mlx-lm 4")
    least = {"gauss": 2, "outliers": 10, "biased": 10}[table.data]
    assert parse_scheme(ours.name).ratio(128, 128, 16) >= 3.5
    assert ours.mean_error_keys < theirs.mean_error_keys / least
    assert ours.kl < theirs.kl / least
    assert ours.mean_error_values > 2 * theirs.mean_error_values
    assert ours.mean_error == pytest.approx((ours.mean_error_keys + ours.mean_error_values) / 2)


def test_kivi8_is_nearly_lossless(table: Table) -> None:
    assert parse_scheme("kivi8").ratio(128, 128, 16) >= 1.88
    assert row(table, "kivi8").kl < 1e-4
    if table.data == "biased":
        assert row(table, "affine8").kl > 1e-4, "which not all 8 bits are"


def test_unsupported_head_sizes_are_reported() -> None:
    shape = CacheShape(layers=1, heads=2, head_dim=80, seq_len=64, dtype="float32", rounds=1)
    found = bench.measure(shape, "gauss", ["affine4", "kivi4/turbo4"])
    assert [row.name for row in found.rows] == ["kivi4/turbo4"]
    assert "no group does" in found.refused["affine4"]
    assert "divides a head of 80" in found.refused["mlx-lm"]


def test_rivals_use_supported_group_size_and_count_used_tokens() -> None:
    """mlx-lm allocates for 256 tokens; the bytes of the 64 used are shown."""
    shape = CacheShape(layers=1, heads=2, head_dim=96, seq_len=64, dtype="float32", rounds=1)
    found = bench.measure(shape, "gauss", ["affine4g32"])
    for name in ("mlx-lm 4g32", "vllm-mlx 4g32") if vllm_mlx.is_installed() else ("mlx-lm 4g32",):
        theirs = row(found, name)
        assert theirs.bits == 4 + 2 * 32 / 32
        assert theirs.kl == pytest.approx(row(found, "affine4g32").kl, rel=0.1)


@pytest.mark.skipif(not vllm_mlx.is_installed(), reason="vllm-mlx is not installed")
def test_vllm_mlx_codes_match_mlx_lm(table: Table) -> None:
    for bits in bench.RIVAL_BITS:
        one, other = row(table, f"mlx-lm {bits}"), row(table, f"vllm-mlx {bits}")
        assert (other.nbytes, other.kl) == (one.nbytes, one.kl)


def test_missing_rival_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_mlx, "is_installed", lambda: False)
    ways, missing = bench.rivals(64)
    assert list(ways) == ["mlx-lm 8", "mlx-lm 4"]
    assert "pip install" in missing["vllm-mlx"]


def test_bench_kv_cache_command_prints_plots_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--layers", "1", "--heads", "2", "--head-dim", "64", "--seq-len", "64"]
    small += ["--rounds", "1", "--dtype", "float32"]
    picture = tmp_path / "codecs.png"
    given = ["--codecs", "raw,k8v4", "--json", "--plot", str(picture), "--save", str(tmp_path)]
    code = main(["bench-kv-cache", *small, *given])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    names = ["raw", "rot8/rot4", *bench.rivals(64)[0]]
    assert [row["name"] for row in found["rows"]] == names
    assert found["baseline"] == "float32"
    assert picture.read_bytes().startswith(b"\x89PNG")
    (record,) = tmp_path.glob("kv-cache-*.json")
    assert json.loads(record.read_text()) == found
    assert main(["bench-kv-cache", *small, "--codecs", "4"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "affine4" in printed


def test_bench_kv_cache_measures_kv_of_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", "embedded", "--seq-len", "128", "--rounds", "1", "--codecs", "raw,8"]
    assert main(["bench-kv-cache", *given, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shape = found["shape"]
    assert (shape["layers"], shape["heads"], shape["head_dim"], shape["seq_len"]) == (2, 2, 64, 128)
    raw, eight = found["rows"][:2]
    assert raw["kl"] == 0 < eight["kl"] < 0.01


def test_only_layers_with_equal_key_and_value_sizes_are_measured() -> None:
    """Recurrent layers are skipped; latents of two sizes are refused."""
    made = tiny_families.build("qwen3_next")
    shape, layers = bench.computed(made, range(64), "float32")
    held = [cache for cache in made.make_cache() if not hasattr(cache, "cache")]
    assert shape.layers == len(layers) == len(held) < len(made.layers)
    made = tiny_families.build("deepseek_v3")
    with pytest.raises(ValueError, match="only keys and values of one size can be set side"):
        bench.computed(made, range(64), "float32")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--codecs", "q4"], "is not a codec; supported: raw"),
        (["--codecs", ","], "--codecs is empty"),
        (["--data", "nowhere"], "no such folder; or one of gauss"),
        (["--data", "no/where"], "there is no folder no/where"),
        (["--seq-len", "100"], "not a multiple of 64"),
        (["--seq-len", "100000000"], "GB are free; take fewer --layers or a smaller --seq-len"),
        (["--head-dim", "81"], "penstock: heads of 81 numbers: an even number of 8 or more"),
        (["--data", "biased", "--head-dim", "4"], "heads of 4 numbers"),
        (["--plot", "picture.txt"], "picture.txt: pictures end with "),
    ],
)
def test_bad_input_gives_one_line_error(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-kv-cache", *given]) == 2
    assert words in capsys.readouterr().err
