"""A model with scripted answers: a llama whose weights map each token to the next.

Its attention and its feed-forward layers add nothing, its embeddings are told apart, and its head
names the next token of a list. So calls of tools and reasoning come from a real engine, a real
tokenizer and mlx-lm's own parsers.
"""

from __future__ import annotations

import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import load as load_tokenizer
from small_models import BASE, build
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, ASK, UNKNOWN = "<|end|>", "<|assistant|>", "<|unknown|>"
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    + END
    + "{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}{% if not (loop.last and continue_final_message) %}"
    + END
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + ASK
    + "{% endif %}"
)
ROLES = tuple(f"<|{role}|>" for role in ("tools", "system", "user", "tool"))


def parrot(
    folder: Path,
    *pieces: str,
    marks: tuple[str, ...] = (),
    template: str = TEMPLATE,
    context: int = 32_768,
    merges: tuple[tuple[str, str], ...] = (),
) -> tuple[Any, Any]:
    """Make a model that always answers with these pieces, one token each, and its tokenizer.

    Args:
        pieces: each once; the answer ends behind the last.
        marks: other tokens that are one piece, as those of reasoning.
        template: the chat template.
        context: tokens that the model is made for.
        merges: pairs that a byte-pair encoding joins; the pieces are then signs, or joined ones.
    """
    if merges:
        tokenizer = _byte_pairs(folder, marks, template, merges)
    else:
        tokenizer = _tokenizer(folder, (*dict.fromkeys((*pieces, *marks)),), template)
    said = [tokenizer.convert_tokens_to_ids(token) for token in (ASK, *pieces, END)]
    return _model(len(tokenizer.get_vocab()), list(pairwise(said)), context), tokenizer


def _tokenizer(folder: Path, whole: tuple[str, ...], template: str) -> Any:
    letters = dict.fromkeys([UNKNOWN, *string.printable])
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return _saved(folder, raw, whole, template)


def _byte_pairs(
    folder: Path, marks: tuple[str, ...], template: str, merges: tuple[tuple[str, str], ...]
) -> Any:
    letters = dict.fromkeys([UNKNOWN, *string.printable, *map("".join, merges)])
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocabulary, list(merges), unk_token=UNKNOWN))
    return _saved(folder, raw, marks, template)


def _saved(folder: Path, raw: Tokenizer, whole: tuple[str, ...], template: str) -> Any:
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([END])
    tokens = ("<tool_call>", "</tool_call>", ASK, *ROLES, *whole)
    raw.add_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(tokens)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, unk_token=UNKNOWN, chat_template=template
    )
    made.save_pretrained(folder)
    return load_tokenizer(folder, {"tool_parser_type": "json_tools"})


def _model(size: int, follows: list[tuple[int, int]], context: int) -> Any:
    shape = {"hidden_size": size, "vocab_size": size, "num_hidden_layers": 2, "head_dim": 16}
    more = {"model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "float32"}
    model = build({**BASE, **shape, **more, "max_position_embeddings": context})
    for layer in model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight = mx.zeros_like(module.weight)
    model.model.embed_tokens.weight = mx.eye(size)
    head = mx.zeros((size, size))
    for token, following in follows:
        head[following, token] = 1.0
    model.lm_head.weight = head
    mx.eval(model.parameters())
    return model
