"""The files beside the weights: tokenizer, chat template and configuration of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock_bench.recall import END, PIECE, ROLES, START, vocabulary

PAD = "<|pad|>"
SPECIAL = (PAD, START, END, *ROLES.values())

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    # At base 1e12, 20 of the 32 frequencies turn by a radian at most in 32,768 positions: they
    # can match a fact however far away it is.
    "rope_theta": 1e12,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

# The space before the content makes the first word the token it is anywhere else, and is
# what the model generates, so a rendered history equals the tokens that were generated.
CHAT_TEMPLATE = (
    "{{ '<|start|>' }}"
    "{% for message in messages %}"
    "{% set role = message['role'] if message['role'] in ['system', 'assistant'] else 'user' %}"
    "{{ '<|' + role + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Make the tokenizer: known words and two-digit numbers whole, all else byte by byte."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {token: i for i, token in enumerate(SPECIAL)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids.setdefault(letter, len(ids))
    for word in vocabulary():
        ids.setdefault("".join(piece for piece, _ in to_bytes.pre_tokenize_str(word)), len(ids))
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECE), behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything a Hugging Face folder needs except the weights and the card."""
    ids = {"bos_token_id": tokenizer.token_to_id(START), "eos_token_id": tokenizer.token_to_id(END)}
    ids["pad_token_id"] = tokenizer.token_to_id(PAD)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(folder / "config.json", CONFIG | {"vocab_size": tokenizer.get_vocab_size()} | ids)
    _write_json(folder / "generation_config.json", {"do_sample": False} | ids)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
