"""Chat on the embedded model: turns read only what is new, and answers do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from mlx_lm.models.cache import make_prompt_cache
from small_models import BASE, build

from penstock.caches import TurboQuantKVCache, make_kv_cache
from penstock.cli.conversation import (
    Drafting,
    LocalChat,
    kv_line,
    kv_use,
    make_caches,
    shared_tokens,
)
from penstock.config import KVSettings, SamplingSettings
from penstock.errors import ModelError, SettingError
from penstock.models.mlx_lm import Loaded, encode, load_all, render, stream
from penstock.recall import MODEL_PATH

TOLD = (
    "The code of the amber falcon is 4821.",
    "My sister has a small dog.",
    "Remember that the colour of the quiet dolphin is turquoise.",
)
GREEDY = SamplingSettings(max_tokens=24)


@pytest.fixture(scope="module")
def recall() -> Loaded:
    return load_all(MODEL_PATH)


def ask(conversation: LocalChat, text: str) -> tuple[str, int]:
    """Return the answer and the number of tokens that were read for it."""
    pieces = list(conversation.answer(text, GREEDY))
    return "".join(piece.text for piece in pieces), pieces[-1].prompt_tokens


def fresh_answer(recall: Loaded, messages: list[dict[str, str]]) -> str:
    tokens = render(recall.tokenizer, messages)
    caches = make_caches(recall, KVSettings(), capacity=len(tokens) + GREEDY.max_tokens)
    return "".join(p.text for p in stream(recall, tokens, caches=caches, sampling=GREEDY))


@pytest.mark.parametrize(
    ("held", "wanted", "shared"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 2], 1), ([1, 2, 3], [1], 0)],
)
def test_the_last_token_is_always_read(held: list[int], wanted: list[int], shared: int) -> None:
    assert shared_tokens(held, wanted) == shared


def test_it_answers_from_memory(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings())
    for text in TOLD:
        ask(conversation, text)
    assert ask(conversation, "What is the code of the amber falcon?")[0] == "4821."
    assert ask(conversation, "What is the colour of the quiet dolphin?")[0] == "turquoise."


@pytest.mark.parametrize("codec", ["k8v4", "auto3.5x"])
def test_it_answers_from_memory_in_a_codec(recall: Loaded, codec: str) -> None:
    coded = KVSettings(kv_cache_quantization=codec, kv_cache_min_quantize_tokens=0)
    held = []
    for kv in (KVSettings(), coded):
        conversation = LocalChat(recall, kv)
        for text in TOLD * 6:
            ask(conversation, text)
        assert ask(conversation, "What is the code of the amber falcon?")[0] == "4821."
        held.append(conversation)
    whole, fewer = (conversation.kv_use().nbytes for conversation in held)
    assert fewer < 0.6 * whole
    assert {type(cache) for cache in held[1].caches} == {TurboQuantKVCache}
    assert held[1].caches[0].codes.offset >= 128
    assert held[1].caches[0]._in_place


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_quantization": "4g128"}, "4g128: affine4g128 holds 128 numbers"),
        ({"kv_cache_quantization": "4", "max_kv_size": 127}, "--max-kv-size 127: .* at least 128"),
    ],
)
def test_codecs_that_do_not_fit_the_model(
    recall: Loaded, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        make_caches(recall, KVSettings(**settings))


def test_a_turn_reads_only_what_is_new(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings(), "You are a helpful assistant.")
    for text in TOLD:
        held = conversation.kv_use().tokens
        _, read = ask(conversation, text)
        rendered = len(render(recall.tokenizer, conversation.messages[:-1]))
        assert read == rendered - held
        assert conversation.caches[0].offset == conversation.kv_use().tokens


def test_each_answer_equals_that_of_a_fresh_run(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings())
    for text in (*TOLD, "What is the code of the amber falcon?"):
        answer, _ = ask(conversation, text)
        assert answer == fresh_answer(recall, conversation.messages[:-1])


def test_reset_forgets_all_but_the_system_prompt(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings(), "Be brief.")
    ask(conversation, TOLD[0])
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.kv_use().tokens == 0
    assert ask(conversation, "What is the code of the amber falcon?")[0] != "4821."


@pytest.mark.parametrize("kv", [KVSettings(), KVSettings(max_kv_size=48, keep_kv_size=4)])
def test_a_template_that_rewrites_history(kv: KVSettings) -> None:
    """The rendered history does not start with what is held: trimmed, or read anew."""
    other = load_all(MODEL_PATH)
    tokenizer = other.tokenizer
    first = "{{ '<|start|><|system|> ' + messages | length | string + '<|end|>' }}"
    tokenizer.chat_template = first + tokenizer.chat_template.replace("{{ '<|start|>' }}", "")
    conversation = LocalChat(other, kv)
    for text in (*TOLD, *TOLD):
        _, read = ask(conversation, text)
        prompt = len(render(tokenizer, conversation.messages[:-1]))
        assert read >= prompt - 3  # only what stands before the count is shared
        assert conversation.caches[0].offset == conversation.kv_use().seen_tokens
    if kv.max_kv_size == KVSettings().max_kv_size:
        assert ask(conversation, "What is the code of the amber falcon?")[0] == "4821."


def test_a_broken_off_turn_is_forgotten(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings())
    ask(conversation, TOLD[0])
    said = list(conversation.messages)
    turn = conversation.answer(TOLD[1], GREEDY)
    next(turn)
    turn.close()
    assert conversation.messages == said
    assert ask(conversation, "What is the code of the amber falcon?")[0] == "4821."


def test_the_window_bounds_what_is_held(recall: Loaded) -> None:
    conversation = LocalChat(recall, KVSettings(max_kv_size=32, keep_kv_size=4))
    sizes = []
    for text in TOLD * 3:
        ask(conversation, text)
        use = conversation.kv_use()
        sizes.append(use.nbytes)
        assert use.tokens <= use.capacity <= 32
    assert sizes[-1] == sizes[-2] == sizes[-3]
    assert conversation.kv_use().tokens == 32
    assert conversation.kv_use().seen_tokens > 64


WINDOWS = [
    KVSettings(max_kv_size=window, **form)
    for window in (2, 16, 33, 128, 200, 4_096)
    for form in ({}, {"kv_bits": 4}, {"kv_cache_quantization": "8"})
    if window >= 128 or "kv_cache_quantization" not in form
]


@pytest.mark.parametrize("kv", WINDOWS, ids=lambda kv: "-".join(map(str, kv.model_dump().values())))
def test_tokens_held_are_those_of_the_window(recall: Loaded, kv: KVSettings) -> None:
    capacity = None
    for length in (1, 27, 150, 300):
        capacity = None if capacity else length + 8  # a cache grows, or is allocated at once
        caches = make_caches(recall, kv, capacity)
        tokens = [7 + number % 50 for number in range(length)]
        list(stream(recall, tokens, caches=caches, sampling=SamplingSettings(max_tokens=8)))
        seen = caches[0].offset
        use = kv_use(caches, seen)
        assert use.tokens <= use.capacity
        assert use.tokens <= min(seen, kv.max_kv_size)
        if kv.kv_cache_quantization is None:  # codes are dropped a block of 64 at a time
            assert use.tokens == min(seen, kv.max_kv_size)
        assert (f"{use.tokens:,} of {seen:,}" in kv_line(use)) == (use.tokens < seen)


@pytest.mark.parametrize(
    ("family", "tokens", "words"),
    [
        ("mamba2", 0, "recurrent states of 9 tokens in "),
        ("falcon_h1", 4, "KV 4 of 9 tokens in "),  # both kinds in one layer
        ("qwen3_next", 4, "KV 4 of 9 tokens in "),
    ],
)
def test_recurrent_layers_hold_no_tokens(family: str, tokens: int, words: str) -> None:
    model = tiny_families.build(family)
    caches = make_kv_cache(model, max_kv_size=4)
    for token in range(9):
        mx.eval(model(mx.array([[token]]), cache=caches))
    use = kv_use(caches, 9)
    assert (use.tokens, use.seen_tokens) == (tokens, 9)
    assert kv_line(use).startswith(words)


def test_generate_allocates_for_the_request_alone(recall: Loaded) -> None:
    tokens = encode(recall.tokenizer, TOLD[0])
    caches = make_caches(recall, KVSettings(), capacity=len(tokens) + GREEDY.max_tokens)
    list(stream(recall, tokens, caches=caches, sampling=GREEDY))
    use = kv_use(caches, len(tokens))
    assert use.growths == 0
    assert use.capacity == len(tokens) + GREEDY.max_tokens


def test_a_seed_repeats_the_answer(recall: Loaded) -> None:
    prompt = render(recall.tokenizer, [{"role": "user", "content": "Hello!"}])

    def sampled(seed: int) -> list[int]:
        sampling = SamplingSettings(max_tokens=12, temperature=100.0, seed=seed)
        caches = make_caches(recall, KVSettings())
        return [p.token for p in stream(recall, prompt, caches=caches, sampling=sampling)]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_no_chat_template_is_an_error() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    tokenizer.has_chat_template = False
    with pytest.raises(ModelError, match="no chat template; use penstock generate --raw"):
        render(tokenizer, [{"role": "user", "content": "Hello!"}])


def test_a_refusing_template_is_an_error() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(ModelError, match=r"the chat template refuses the messages: .*no system"):
        render(tokenizer, [{"role": "system", "content": "Be brief."}])


def test_a_head_size_without_a_quantized_form_is_an_error(recall: Loaded) -> None:
    odd = replace(recall, config=recall.config | {"head_dim": 48})
    with pytest.raises(SettingError, match="head size 48"):
        make_caches(odd, KVSettings(kv_bits=4))


@pytest.mark.parametrize(
    ("model_type", "why"), [("gpt_oss", "attention sinks"), ("kimi_k2", "latents")]
)
def test_a_model_that_cannot_read_quantized_caches_is_refused_before_it_runs(
    recall: Loaded, model_type: str, why: str
) -> None:
    latents = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
    odd = replace(recall, config={**BASE, **latents, "model_type": model_type, "head_dim": 64})
    with pytest.raises(SettingError, match=f"{model_type}.* cannot have quantized caches: .*{why}"):
        LocalChat(odd, KVSettings(kv_bits=8))
    assert make_caches(odd, KVSettings())


def gemma2(recall: Loaded) -> Loaded:
    """A model that cannot read quantized caches, under a config that says it can."""
    config = {**BASE, "model_type": "gemma2", "head_dim": 64, "vocab_size": 8192}
    return replace(recall, model=build(config), config=config | {"model_type": "llama"})


def test_mlx_lm_failing_on_quantized_caches_is_one_error_that_says_so(recall: Loaded) -> None:
    loaded = gemma2(recall)
    caches = make_caches(loaded, KVSettings(kv_bits=8))
    with pytest.raises(ModelError, match=r"fails on quantized caches \(TypeError: .*--kv-bits"):
        list(stream(loaded, [1, 2, 3], caches=caches, sampling=GREEDY))
    plain = make_caches(loaded, KVSettings())
    assert list(stream(loaded, [1, 2, 3], caches=plain, sampling=GREEDY))


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_an_error_that_is_not_mlx_lm_s_keeps_its_traceback(
    recall: Loaded, kv_bits: int | None
) -> None:
    def broken(*_: mx.array) -> None:
        raise TypeError("ours")

    caches = make_caches(recall, KVSettings(kv_bits=kv_bits))
    caches[0].update_and_fetch = broken
    with pytest.raises(TypeError, match="ours"):
        list(stream(recall, [1, 2, 3], caches=caches, sampling=GREEDY))


def test_an_error_of_mlx_lm_on_plain_caches_is_not_blamed_on_quantization(recall: Loaded) -> None:
    caches = make_caches(recall, KVSettings())
    with pytest.raises(ValueError, match="prompt"):
        list(stream(recall, [], caches=caches, sampling=GREEDY))


@pytest.mark.parametrize("text", ["What is the code of the quiet dolphin?", "Thank you."])
def test_with_a_draft_model_the_dialogue_is_the_same(recall: Loaded, text: str) -> None:
    """Its answers end inside what was proposed, and the next turn goes on from there."""
    lines = ["The code of the quiet dolphin is 7315.", text, "The code of the red owl is 9.", text]
    plain, drafted = LocalChat(recall, KVSettings()), LocalChat(recall, KVSettings(), draft=recall)
    for line in lines:
        said, read = ask(plain, line)
        assert (said, read) == (ask(drafted, line)[0], read)
        held = {cache.offset for cache in drafted.caches}
        assert held == {len(drafted.held)}
        assert len(plain.held) - 5 <= len(drafted.held) <= len(plain.held)


def test_a_draft_model_is_refused_where_nothing_can_be_taken_back(recall: Loaded) -> None:
    hybrid = Loaded(tiny_families.build("mamba2"), recall.tokenizer, {})
    with pytest.raises(SettingError, match="taken back"):
        Drafting(recall, KVSettings(), make_prompt_cache(hybrid.model))
    short = LocalChat(recall, KVSettings(max_kv_size=30), draft=recall)
    with pytest.raises(SettingError, match="more than --max-kv-size 30"):
        ask(short, "Hello.")
