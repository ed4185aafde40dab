"""Images on the engine match mlx-vlm's tokens cold, warm, restarted and in batches."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from cold_engine import BLOCK, SAID, running, settle
from tiny_image_families import FAMILIES
from tiny_image_models import Pair, picture, prompts, write_model

from penstock import Engine
from penstock.cli import main
from penstock.engine.request import Request
from penstock.errors import LedgerFull, StepFailed
from penstock.models.input_spans import InputSpan, SpanEmbeddings
from penstock.models.loading import load_all
from penstock.models.source_choice import choose_source
from penstock.server.images import file_of

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in ("Image.Image.getdata:DeprecationWarning", "At least one mel:UserWarning")
]
"""Of mlx-vlm's processors of Kimi-VL and Gemma 4."""
LIMITS: dict[str, Any] = {"memory_limit": "400MB", "block_size": 16}
TOKENS = 8
ROOT = Path(__file__).parents[2]
TALK = "Look at this IMAGE and this IMAGE : what is it ?"


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of(request.param, tmp_path_factory.mktemp("images") / request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of("qwen2_vl", tmp_path_factory.mktemp("images") / "qwen2_vl")


@pytest.fixture
def engine(qwen: Pair) -> Iterator[Engine]:
    with Engine(qwen.loaded.model, qwen.loaded.tokenizer, **LIMITS) as made:
        yield made
        made.check()


def answer(engine: Engine, request: Request) -> tuple[list[int], int]:
    """Return the tokens of a greedy answer, and the number of cached prompt tokens."""
    choice = engine.submit(request).result()[0]
    assert choice.finish is not None
    return list(choice.tokens), choice.finish.usage.cached_tokens


def embedded(engine: Engine) -> int:
    """Return the number of encoded images."""
    return engine._core.features.embedded


def test_prompt_tokens_match_processor(pair: Pair) -> None:
    for text, files in prompts(8):
        request = pair.request(text, files, TOKENS)
        assert list(request.prompt) == pair.inputs(text, files)["input_ids"][0].tolist()
        assert len(request.spans) == len(files)


def test_answers_match_mlx_vlm_loop(pair: Pair) -> None:
    """Twenty prompts with 0 to 3 images: cold, warm, and in batches, all at once."""
    talks = prompts(20)
    own = [pair.own_answer(text, files, TOKENS) for text, files in talks]
    requests = [pair.request(text, files, TOKENS) for text, files in talks]
    with Engine(pair.loaded.model, pair.loaded.tokenizer, **LIMITS) as engine:
        for request, expected in zip(requests, own, strict=True):
            assert answer(engine, request)[0] == expected
        seen = {span.key for request in requests for span in request.spans}
        assert embedded(engine) == len(seen)
        for request, expected in zip(requests, own, strict=True):
            found, cached = answer(engine, request)
            assert found == expected
            assert cached >= (len(request.prompt) - 1) // 16 * 16
        assert embedded(engine) == len(seen)
        engine.clear()
        handles = [engine.submit(request) for request in requests]
        assert [list(handle.result()[0].tokens) for handle in handles] == own
        engine.check()


@pytest.mark.parametrize("side", [56, 300])
def test_image_bytes_are_reserved_before_encoding(pair: Pair, side: int) -> None:
    reader = pair.loaded.model.span_reader
    place = pair.loaded.model.image_reader.place(file_of(picture(1, side, side)))
    span = InputSpan(0, len(place.tokens), place.key, place.source)
    reader.embed(span)  # constants are made once
    kept_bytes, work_bytes = reader.embed_bytes(span)
    for _ in range(8):  # how far MLX runs ahead of its operations differs from time to time
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        embeddings = reader.embed(span)
        assert embeddings.nbytes <= kept_bytes
        assert mx.get_peak_memory() - before <= kept_bytes + work_bytes
        del embeddings


def test_answer_depends_on_image(qwen: Pair) -> None:
    """Negative control of the tests above."""
    answers = {tuple(qwen.own_answer(TALK, [picture(n), picture(9)], TOKENS)) for n in range(6)}
    assert len(answers) > 1


def test_different_images_of_one_size_share_no_blocks(qwen: Pair, engine: Engine) -> None:
    files = [picture(1), picture(2)]
    answer(engine, qwen.request(TALK, files, TOKENS))
    for other in ([picture(3), files[1]], [files[0], picture(3)]):
        request = qwen.request(TALK, other, TOKENS)
        changed = request.spans[0 if other[1] == files[1] else 1]
        found, cached = answer(engine, request)
        assert found == qwen.own_answer(TALK, other, TOKENS)
        assert cached <= changed.start


def test_check_detects_images_with_equal_keys(qwen: Pair, engine: Engine) -> None:
    """Negative control: only the key tells two images of one size apart."""
    first, second = (qwen.request(TALK, [picture(n), picture(2)], TOKENS) for n in (1, 3))
    assert first.prompt == second.prompt and first.keyed_prompt != second.keyed_prompt
    answer(engine, first)
    spans = tuple(replace(b, key=a.key) for a, b in zip(first.spans, second.spans, strict=True))
    _, cached = answer(engine, Request(prompt=second.prompt, spans=spans, max_tokens=1))
    assert cached > first.spans[0].end


def test_next_turn_with_images_computes_only_new_tokens(qwen: Pair, engine: Engine) -> None:
    files = [picture(5), picture(6)]
    first = qwen.request(TALK, files, TOKENS)
    said, _ = answer(engine, first)
    rest = qwen.loaded.tokenizer.encode(" And then ?", add_special_tokens=False)
    turn = Request(
        prompt=(*first.prompt, *said, *rest), spans=first.spans, max_tokens=TOKENS, ignore_eos=True
    )
    before = embedded(engine)
    _, cached = answer(engine, turn)
    assert cached == len(first.prompt) + len(said) - 1
    assert embedded(engine) == before
    engine.clear()
    cold = engine.submit(turn).result()[0]
    assert list(cold.tokens) == answer(engine, turn)[0]


def test_prompts_with_images_are_restored_after_restart(
    pair: Pair, tmp_path: Path, patient: None
) -> None:
    files = [picture(7), picture(8, 140, 56)]
    text = TALK + " So ?" * 20
    request, own = pair.request(text, files, SAID), pair.own_answer(text, files, SAID)
    folder, model = tmp_path / "cold", pair.loaded.model
    for expected in (0, len(request.prompt) // BLOCK * BLOCK):
        with running(folder, model=model, fingerprint="one") as core:
            handle = core.submit(request)
            settle(core)
            (choice,) = handle.result(0.0)
            assert choice.finish is not None
            assert list(choice.tokens) == own
            assert choice.finish.usage.cached_tokens == expected
    assert core.features.embedded == 0, "the images were read again, though their KV was there"
    with running(folder, model=model, fingerprint="one") as core:
        other = pair.request(text, [picture(17), files[1]], SAID)
        handle = core.submit(other)
        settle(core)
        (choice,) = handle.result(0.0)
        assert choice.finish is not None
        assert choice.finish.usage.cached_tokens <= other.spans[0].start


def test_clear_evicts_image_features(qwen: Pair) -> None:
    with Engine(qwen.loaded.model, qwen.loaded.tokenizer, **LIMITS) as engine:
        answer(engine, qwen.request(TALK, [picture(1), picture(2)], 1))
        assert engine.stats().by_kind["features"] > 0
        engine.clear()
        assert engine.stats().by_kind["features"] == 0
        engine.check()


class SlowTower:
    """A span reader whose embeddings are delayed."""

    def __init__(self, reader: Any, seconds: float) -> None:
        self._reader, self._seconds = reader, seconds
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def embed(self, span: InputSpan) -> SpanEmbeddings:
        self.threads.add(threading.current_thread().name)
        time.sleep(self._seconds)
        embeddings: SpanEmbeddings = self._reader.embed(span)
        return embeddings


def test_running_answer_continues_while_images_are_encoded(qwen: Pair, engine: Engine) -> None:
    slow = SlowTower(qwen.loaded.model.span_reader, 0.5)
    engine._wait(engine._later(lambda core: setattr(core.features, "_reader", slow)))
    text = qwen.request("No picture here .", [], 2_000)
    running = engine.submit(text)
    while not running.choices[0].tokens:
        list(running.events())
        time.sleep(0.01)
    looking = engine.submit(qwen.request(TALK, [picture(31), picture(32)], 1))
    before = len(running.choices[0].tokens)
    looking.result()
    list(running.events())
    assert len(running.choices[0].tokens) > before + 20
    assert not any("engine" in name for name in slow.threads)
    running.cancel()


def test_vision_tower_is_evaluated_layer_by_layer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX holds up the steps of running answers while a whole tower waits in its queue."""
    model, vision = pair.loaded.model, pair.theirs.config.vision_config
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    place = model.image_reader.place(file_of(picture(1)))
    evaluate, evaluated = mx.eval, list[int]()

    def count(*arrays: Any) -> None:
        evaluated.append(len(arrays))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", count)
    model.span_reader.embed(InputSpan(0, len(place.tokens), place.key, place.source))
    assert len(evaluated) > layers


def test_cached_prompt_does_not_wait_for_image_encoding(qwen: Pair, engine: Engine) -> None:
    """All of it is cached: it runs once its positions are known, and no step waits for them."""
    known = qwen.request(TALK, [picture(33), picture(34)], TOKENS)
    expected, _ = answer(engine, known)
    slow = SlowTower(qwen.loaded.model.span_reader, 0.5)
    engine._wait(engine._later(lambda core: setattr(core.features, "_reader", slow)))
    running = engine.submit(qwen.request("No picture here .", [], 2_000))
    while not running.choices[0].tokens:
        list(running.events())
        time.sleep(0.01)
    looking = engine.submit(qwen.request(TALK, [picture(35), picture(36)], 1))
    time.sleep(0.05)
    again = engine.submit(known)
    assert list(again.result()[0].tokens) == expected
    list(looking.events())
    assert looking.choices[0].finish is None, "it has waited for the other's images"
    running.cancel()


def test_failing_vision_tower_fails_only_its_request(qwen: Pair, engine: Engine) -> None:
    request = qwen.request(TALK, [picture(41), picture(42)], 2)
    broken = tuple(replace(span, key=b"x" * 32, source=None) for span in request.spans)
    handle = engine.submit(Request(prompt=request.prompt, spans=broken, max_tokens=2))
    with pytest.raises(StepFailed, match="input"):
        handle.result()
    assert answer(engine, request)[0] == qwen.own_answer(TALK, [picture(41), picture(42)], 2)


def test_images_competing_for_memory_finish_or_are_refused(qwen: Pair) -> None:
    """Little room beside the weights: each answer is right, or refused with the numbers."""
    talks = prompts(12, seed=11)
    own = [qwen.own_answer(text, files, TOKENS) for text, files in talks]
    with Engine(qwen.loaded.model, qwen.loaded.tokenizer, **LIMITS) as engine:
        engine.set_limit(engine.stats().used_bytes + 1_500_000)
        handles = [engine.submit(qwen.request(text, files, TOKENS)) for text, files in talks]
        refused = 0
        for handle, expected in zip(handles, own, strict=True):
            try:
                assert list(handle.result(60)[0].tokens) == expected
            except LedgerFull as error:
                assert "an input of" in str(error)
                refused += 1
        assert 0 < refused < len(talks)
        engine.check()


def test_quantized_model_encodes_images_in_float32(tmp_path: Path) -> None:
    """Weights of the tower become float32 with the others."""
    folder = write_model("qwen2_vl", tmp_path / "qwen2_vl")
    native = load_all(folder, model_source="mlx-vlm", weights_dtype="native")
    wide = load_all(folder, model_source="mlx-vlm", weights_dtype="float32")
    readers = [loaded.model.image_reader for loaded in (native, wide)]
    places = [reader.place(file_of(picture(1))) for reader in readers if reader is not None]
    rows = [
        reader.embed(InputSpan(0, len(place.tokens), place.key, place.source)).rows
        for reader, place in zip(readers, places, strict=True)
        if reader is not None
    ]
    assert mx.allclose(rows[0], rows[1], atol=1e-4)


def test_models_with_bidirectional_image_attention_read_no_images(tmp_path: Path) -> None:
    """Keys and values of a token would depend on where a prompt is cut."""
    folder = write_model("gemma4", tmp_path / "gemma4")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_all(folder, model_source="mlx-vlm").model.image_reader is None


def test_doctor_reports_image_support(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model("qwen2_vl", tmp_path / "qwen2_vl")
    said = []
    for source in ("mlx-vlm", "auto", "mlx-lm"):
        main(["doctor", str(folder), "--json", "--model-source", source])
        said.append(json.loads(capsys.readouterr().out)["model"]["images"])
    assert said[:2] == ["read", "read"]
    assert said[2].startswith("not read") and "--model-source auto" in said[2]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "gemma4", "qwen3_5"])
def test_folder_with_vision_tower_is_loaded_by_mlx_vlm(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path / family)
    choice, _ = choose_source(str(folder))
    assert choice.name == "mlx-vlm" and "images" in choice.why
    assert choose_source(str(folder), "mlx-lm")[0].name == "mlx-lm"
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    text = {name: array for name, array in weights.items() if "vis" not in name}
    mx.save_safetensors(str(file), text)  # as mlx-lm's converter leaves it
    assert choose_source(str(folder))[0].name == "mlx-lm"


def test_gap_measurement_runs() -> None:
    command = [sys.executable, str(ROOT / "tools" / "image_gaps.py"), "--seconds", "0.5"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["nothing", "texts", "images"]
