"""Codecs and the cold tier: blocks are written and read in their codec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
import pytest
from cold_engine import files, said, settle, ssd, submit
from core_parts import cached_match

from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request
from penstock.engine.session_files import load_session, save_session
from penstock.errors import SettingError
from penstock.kv import columns as col
from penstock.kv.segment import Segment
from penstock.prefix.node import Node
from penstock_bench.key_forms import KeyForm, reform
from penstock_bench.models import LlamaShape, ModelChoice, bench_model

SHAPE = LlamaShape(
    layers=3, hidden_size=128, intermediate_size=128, query_heads=4, kv_heads=2, head_dim=64
)
BLOCK = 64
TOKENS = 10 * BLOCK + 20
RAW_BLOCKS = 2
SMALL: dict[str, Any] = {
    "block_size": BLOCK,
    "prefill_chunk": 128,
    "max_batch_size": 4,
    "max_kv_size": 4_096,
    "memory_limit": "400MB",
    "ssd_cache_limit": "1GB",
    "kv_cache_min_quantize_tokens": 0,
    "kv_cache_raw_first_tokens": RAW_BLOCKS * BLOCK,
    "kv_cache_quantize_when": "active",
}
CODECS = ["8", "turbo4", "turbo2.5", "kivi4/turbo3.5", "k8v4", "raw/3"]


pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="module")
def model() -> Any:
    return bench_model(ModelChoice.RANDOM, SHAPE).model


@pytest.fixture(scope="module")
def large() -> Any:
    """Return the same model with large key channels, which get scales."""
    made = bench_model(ModelChoice.RANDOM, SHAPE).model
    reform(made, KeyForm.OUTLIERS)
    return made


def running(
    model: Any, folder: Path, codec: str | None, **settings: Any
) -> AbstractContextManager[Core]:
    return cold_engine.running(
        folder, model=model, **{**SMALL, "kv_cache_quantization": codec, **settings}
    )


def prompt(seed: int = 0) -> list[int]:
    found: list[int] = mx.random.randint(0, 512, (TOKENS,), key=mx.random.key(seed)).tolist()
    return found


def ask(core: Core, tokens: list[int]) -> tuple[tuple[int, ...], int]:
    """Return the answer, and the number of cached prompt tokens."""
    before = core.view.stats().hit_tokens
    handle = submit(core, tokens)
    settle(core)
    return said(handle), core.view.stats().hit_tokens - before


def path(core: Core, tokens: list[int]) -> list[Node[Segment]]:
    return list(cached_match(core, tokens).path)


def whole(core: Core, tokens: list[int]) -> list[list[bytes]]:
    """Return the bytes of every cached block of a prompt, array by array."""
    found = []
    for node in path(core, tokens):
        for at in range(0, len(node.tokens), BLOCK):
            layers = Segment.views(node.segment.layers, at, at + BLOCK).layers
            found.append([bytes(mx.contiguous(a)) for pair in layers for a in col.arrays(*pair)])
    return found[: len(tokens) // BLOCK]


@pytest.mark.parametrize("codec", CODECS)
def test_restart_preserves_text_and_codes(model: Any, tmp_path: Path, codec: str) -> None:
    """Text, codes and byte counts."""
    asked = prompt()
    with running(model, tmp_path, codec) as core:
        ask(core, asked)
        warm, cached = ask(core, asked)
        assert cached == 10 * BLOCK
        held, nbytes = whole(core, asked), sum(n.segment.nbytes for n in path(core, asked))
    with running(model, tmp_path, codec) as core:
        again, cached = ask(core, asked)
        assert (again, cached) == (warm, 10 * BLOCK)
        assert ssd(core).counts.read_blocks == 10
        assert whole(core, asked) == held
        assert sum(node.segment.nbytes for node in path(core, asked)) == nbytes


def test_block_of_last_token_is_recomputed(model: Any, tmp_path: Path) -> None:
    """That token is computed, so its block must not be read as codes."""
    asked = prompt()[: 10 * BLOCK]
    with running(model, tmp_path, "turbo4") as core:
        ask(core, asked)
        warm, cached = ask(core, asked)
        assert cached == 9 * BLOCK
    with running(model, tmp_path, "turbo4") as core:
        assert ask(core, asked) == (warm, 9 * BLOCK)
        assert ssd(core).counts.read_blocks == 9


@pytest.mark.parametrize("codec", ["turbo4", "turbo2.5", "k8v4"])
def test_restart_preserves_scales_of_keys(
    large: Any, tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_restart_preserves_text_and_codes(large, tmp_path, codec)
    asked = prompt()
    with running(large, tmp_path, codec) as core:
        expected, cached = ask(core, asked)
        assert cached == 10 * BLOCK
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "key_scales", lambda *_: ())
        with running(large, tmp_path, codec) as core:
            assert ask(core, asked)[1] == 0, "codes without scales, or with others, are other codes"
    with running(large, tmp_path, codec) as core:
        assert ask(core, asked) == (expected, 10 * BLOCK)


@pytest.mark.parametrize("codec", CODECS)
def test_file_sizes_match_quantized_nbytes(model: Any, tmp_path: Path, codec: str) -> None:
    asked = prompt()
    with running(model, tmp_path, codec) as core:
        ask(core, asked)
        held = sum(node.segment.nbytes for node in path(core, asked))
        written = sum(path.stat().st_size for path in files(tmp_path))
    with running(model, tmp_path / "raw", None) as core:
        ask(core, asked)
        raw = sum(path.stat().st_size for path in files(tmp_path / "raw"))
    assert held < written < held + 10 * (4 * BLOCK + 4_096)  # tokens, and a head each
    assert written < raw


def test_raw_blocks_are_quantized_when_written(model: Any, tmp_path: Path) -> None:
    asked, settings = prompt(), {"kv_cache_quantize_when": "at-rest"}
    with running(model, tmp_path, "turbo4", **settings) as core:
        handle = submit(core, asked, max_tokens=200)
        assert core.tiers is not None
        while core.tiers.tiers["disk"].tier.stats().counts.written_blocks < 10:
            assert core.step()
        assert not handle.done, "all blocks are written while their reader runs"
        settle(core)
        held = whole(core, asked)
    with running(model, tmp_path, "turbo4", **settings) as core:
        _, cached = ask(core, asked)
        assert cached == 10 * BLOCK
        assert whole(core, asked) == held


AT_REST: dict[str, Any] = {
    "kv_cache_quantize_when": "at-rest",
    "kv_cache_raw_first_tokens": 0,
    "kv_cache_min_quantize_tokens": 6 * BLOCK,
}


@pytest.mark.parametrize("codec", ["4", "turbo2.5"])
def test_short_prompt_is_equal_cold_warm_and_restarted(
    model: Any, tmp_path: Path, codec: str
) -> None:
    """Its blocks stay raw in memory and are not in the tier."""
    asked = prompt()[: 5 * BLOCK + 20]
    with running(model, tmp_path / "raw", None) as core:
        expected = [ask(core, asked)[0] for _ in range(2)]
    for _ in range(2):
        with running(model, tmp_path / "coded", codec, **AT_REST) as core:
            assert [ask(core, asked)[0] for _ in range(2)] == expected
            assert files(tmp_path / "coded") == []


@pytest.mark.parametrize("turns", [(10,), (4, 10), (3, 5, 6, 10), (5, 8, 10)])
def test_prompt_reaching_min_tokens_is_written_from_first_block(
    model: Any, tmp_path: Path, turns: tuple[int, ...]
) -> None:
    asked = prompt()
    with running(model, tmp_path, "turbo4", **AT_REST) as core:
        for blocks in turns:
            ask(core, asked[: blocks * BLOCK + 20])
            written = blocks if blocks >= 6 else 0
            assert sum(node.end == written * BLOCK for node in path(core, asked)) == (blocks >= 6)
            assert len(files(tmp_path)) == written
        warm, _ = ask(core, asked)
        held = whole(core, asked)
    with running(model, tmp_path, "turbo4", **AT_REST) as core:
        assert ask(core, asked) == (warm, 10 * BLOCK)
        assert whole(core, asked) == held


def test_short_prompt_restores_blocks_of_longer_prompt(model: Any, tmp_path: Path) -> None:
    asked = prompt()
    short = [*asked[: 2 * BLOCK], *prompt(1)[: BLOCK + 20]]
    with running(model, tmp_path, "4", **AT_REST) as core:
        ask(core, asked)
        expected, _ = ask(core, short)
        warm, _ = ask(core, short)
    with running(model, tmp_path, "4", **AT_REST) as core:
        assert ask(core, short) == (expected, 2 * BLOCK)
        assert ask(core, short)[0] == warm


def test_blocks_of_other_codec_are_misses_not_damage(model: Any, tmp_path: Path) -> None:
    asked = prompt()
    others: list[dict[str, Any]] = [
        {"codec": None},
        {"codec": "turbo4"},
        {"codec": "turbo3"},
        {"codec": "turbo4", "kv_cache_skip_layers": (0,)},
        {"codec": "turbo4", "kv_cache_raw_first_tokens": 0},
        {"codec": "turbo4", "kv_cache_quantize_when": "at-rest"},
        {
            "codec": "turbo4",
            "kv_cache_quantize_when": "at-rest",
            "kv_cache_min_quantize_tokens": 100,
        },
    ]
    for _ in range(2):
        first = _ == 0
        for settings in others:
            with running(model, tmp_path, **settings) as core:
                _, cached = ask(core, asked)
                assert cached == (0 if first else 10 * BLOCK), settings
                assert ssd(core).counts.damaged_blocks == ssd(core).faults == 0


def test_damaged_block_is_recomputed(model: Any, tmp_path: Path) -> None:
    asked = prompt()
    with running(model, tmp_path, "turbo4") as core:
        ask(core, asked)
        warm, _ = ask(core, asked)
    newest = max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    raw = bytearray(newest.read_bytes())
    raw[-100] ^= 1
    newest.write_bytes(raw)
    with running(model, tmp_path, "turbo4") as core:
        assert ask(core, asked)[0] == warm
        assert ssd(core).counts.damaged_blocks == 1


def test_values_too_large_for_codec_are_not_written(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt()
    encoded = Segment.encoded

    def large(self: Segment, *settings: Any) -> Segment:
        layers = tuple((keys * 1e6, values) for keys, values in self.layers)  # type: ignore[operator]
        return encoded(Segment(layers), *settings)

    monkeypatch.setattr(Segment, "encoded", large)
    with running(model, tmp_path, "4") as core:
        ask(core, asked)
        assert len(files(tmp_path)) == RAW_BLOCKS
        assert ssd(core).dropped_blocks > 0


def test_session_requires_same_codec(model: Any, tmp_path: Path) -> None:
    asked, file = prompt(), tmp_path / "session.tar"

    @contextmanager
    def engine(folder: str, codec: str) -> Iterator[Engine]:
        settings = {**SMALL, "ssd_cache_dir": tmp_path / folder, "kv_cache_quantization": codec}
        with Engine(model, **settings) as made:
            yield made

    with engine("here", "turbo4") as first:
        first.submit(Request(prompt=tuple(asked), max_tokens=4, ignore_eos=True)).result(60.0)
        assert save_session(first, file, asked).tokens == 10 * BLOCK
    with engine("there", "turbo3") as second, pytest.raises(SettingError, match="other settings"):
        load_session(second, file)
    with engine("elsewhere", "turbo4") as third:
        assert load_session(third, file).tokens == 10 * BLOCK


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_blocks_without_memory_to_encode_are_not_written(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(*_: Any) -> None:
        raise error("no room")

    asked = prompt()
    with running(model, tmp_path / "without", None) as core:
        expected, _ = ask(core, asked)
    monkeypatch.setattr(Segment, "encoded", fails)
    with running(model, tmp_path / "with", "4") as core:
        assert ask(core, asked)[0] == expected
        assert len(files(tmp_path / "with")) == RAW_BLOCKS
        assert ssd(core).dropped_blocks == 10 - RAW_BLOCKS


def test_session_of_unquantized_short_prompt_is_refused(model: Any, tmp_path: Path) -> None:
    asked, settings = prompt()[:300], {**SMALL, **AT_REST, "kv_cache_quantization": "turbo4"}
    with Engine(model, ssd_cache_dir=tmp_path / "cache", **settings) as engine:
        engine.submit(Request(prompt=tuple(asked), max_tokens=4, ignore_eos=True)).result(60.0)
        with pytest.raises(SettingError, match="of at least 384 tokens"):
            save_session(engine, tmp_path / "session.tar", asked)
        assert not (tmp_path / "session.tar").exists()
