"""Drafters that read hidden states (DFlash, EAGLE-3) against mlx-vlm's, with the same weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from drafted_models import CONFIGS, FAMILIES, AttendingCache, drafted, drafted_tokens, parameters
from tiny_families import prompt_of

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config
from mlx_vlm.speculative.drafters.eagle3.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashDraftModel

from penstock.models.hidden_states import outputs_of


def text_of(model: Any) -> Any:
    return getattr(model, "language_model", model)


def hidden_states(model: Any, tokens: list[int]) -> mx.array:
    """Return the states that the drafter reads, (1, tokens, n), from one pass without caches."""
    with outputs_of(text_of(model).model, model.read_layers) as hidden:
        text_of(model).model(mx.array([tokens]))
    return mx.concatenate([hidden[number] for number in model.read_layers], axis=-1)


def own_weights(model: Any) -> list[tuple[str, mx.array]]:
    named = ((n.removeprefix("drafter."), w) for n, w in parameters(model) if "drafter." in n)
    return list(named)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [2, 17, 60])
def test_blocks_match_mlx_vlm(family: str, tokens: int) -> None:
    model, config = drafted(family, "block"), CONFIGS["block"]
    theirs: Any = DFlashDraftModel(DFlashConfig.from_dict(config))
    theirs.load_weights(own_weights(model))
    caches, prompt = theirs.reset(text_of(model)), prompt_of(tokens)
    hidden, size = hidden_states(model, prompt[:-1]), config["block_size"]
    expected = theirs.draft_block(
        prompt[-1], hidden, caches, size, lambda logits: mx.argmax(logits, axis=-1)
    )
    assert drafted_tokens(model, "block", prompt, size - 1) == expected[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_of_eagle_matches_mlx_vlm(family: str) -> None:
    """Both read the same pairs; where a text begins is a choice of each."""
    model, config = drafted(family, "eagle"), CONFIGS["eagle"]
    theirs: Any = Eagle3DraftModel(
        Eagle3Config.from_dict(
            {
                "transformer_layer_config": config,
                "draft_vocab_size": config["draft_vocab_size"],
                "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
            }
        )
    )
    assert theirs.config.capture_layer_ids == list(model.read_layers)
    assert theirs.uses_draft_vocab
    theirs.load_weights(own_weights(model), strict=False)
    theirs.reset(text_of(model))
    prompt = prompt_of(30)
    theirs._next_position = 0
    states = hidden_states(model, prompt)
    expected = theirs._forward_tokens(mx.array([prompt]), states, mx.int32)
    embedded = text_of(model).model.embed_tokens(mx.array([prompt]))
    joined = model.drafter.joined(mx.split(states, 3, axis=-1))
    kv, actual = AttendingCache(), []
    for place in range(len(prompt)):
        one = slice(place, place + 1)
        actual.append(model.drafter.layers[0](embedded[:, one], joined[:, one], kv))
    assert mx.allclose(mx.concatenate(actual, axis=1), expected, rtol=1e-3, atol=1e-4)
    logits = theirs._logits(expected)
    chosen = theirs._draft_to_target(mx.argmax(logits, axis=-1), mx.int32)
    ours = mx.argmax(model.drafter.logits(expected), axis=-1)
    assert ours.tolist() == chosen.tolist()
