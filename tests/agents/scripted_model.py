"""A model that follows a script: one answer for each position in a conversation.

A place is a task and a step of it. The chat template writes it as a mark behind every message, from
the words `(task N)` of the user's last message and the answers since. One attention head carries
the newest mark to the token that opens an answer, and the head of the model turns it into the
first token of the script's answer; every token of an answer is followed by one other. So what the
model says depends on the keys and values that are cached: those of another conversation would
give another answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAGES = Path(__file__).parents[2] / "docs"
ASSISTANT, END, ENDLESS = "<|assistant|>", "<|end|>", "<|endless|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
SPECIAL = ("<|start|>", END, "<|system|>", "<|user|>", ASSISTANT)
VOCABULARY = 8_000
ASIDE = "<|aside|>"
"""Mark of a request that offers no tools, as those for titles."""
CONTEXT = 200_000
SPARE_STEPS = 3
"""Answers behind the last of a task, for a program that goes on."""
PIECE = 9
"""Fewest letters of a piece of an answer, which is a token; its last may have fewer."""
HIDDEN, HEAD, STEP_SCORE = 512, 128, 30.0
"""Width, head size, and the score that sets the newest mark apart from the one before."""
TEMPLATE = (
    "{% set at = namespace(task=0, step=0) %}{{ '<|start|>' }}"
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{% set at.step = at.step + 1 %}"
    "{{ '<|assistant|>' + message.content }}CALLS"
    "{% else %}"
    "{% if message.role == 'user' %}{% for task in range(1, 21) %}"
    "{% if '(task ' ~ task ~ ')' in message.content and task != at.task %}"
    "{% set at.task = task %}{% set at.step = 0 %}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|' + ('system' if message.role == 'system' else 'user') + '|>' + message.content }}"
    "{% if tools %}{{ '<|place ' ~ at.task ~ '.' ~ at.step ~ '|>' }}"
    "{% else %}{{ '<|aside|>' }}{% endif %}"
    "{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_EACH = "{% for call in message.tool_calls or [] %}"
_NAME = "{{ call.function.name }}"
_EACH_ARGUMENT = "{% for key, value in call.function.arguments.items() %}"
_VALUE = "{{ value if value is string else value | tojson }}"
CALLS = {
    "json_tools": f"{_EACH}<tool_call>{{{{ call.function | tojson }}}}</tool_call>{{% endfor %}}",
    "glm47": (
        f"{_EACH}<tool_call>{_NAME}\n{_EACH_ARGUMENT}<arg_key>{{{{ key }}}}</arg_key>\n"
        f"<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}"
    ),
    "minimax_m2": (
        f'{{% if message.tool_calls %}}<minimax:tool_call>\n{_EACH}<invoke name="{_NAME}">\n'
        f'{_EACH_ARGUMENT}<parameter name="{{{{ key }}}}">{_VALUE}</parameter>\n{{% endfor %}}'
        "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    ),
    "qwen3_coder": (
        f"{_EACH}<tool_call>\n<function={_NAME}>\n{_EACH_ARGUMENT}<parameter={{{{ key }}}}>\n"
        f"{_VALUE}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}"
    ),
    "kimi_k2": (
        f"{{% if message.tool_calls %}}<|tool_calls_section_begin|>{_EACH}<|tool_call_begin|>"
        "{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    ),
}
"""Parts of the template that write calls into the history, in the formats of the script's."""
Script = Mapping[int, Sequence[str]]
"""Answers of every task, in their order; one that ends with `ENDLESS` begins again."""


def call(name: str, **arguments: object) -> str:
    """Return an answer that calls a tool."""
    return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{CALL_END}"


def write_model(
    folder: Path,
    script: Script,
    aside: str = "What we did, in short.",
    *,
    family: str = "json_tools",
) -> None:
    """Write a folder that mlx-lm loads: tokenizer, template and weights that follow a script.

    Args:
        folder: is there.
        script: the answers.
        aside: the answer to requests without tools.
        family: format of the script's calls, one of `CALLS`.
    """
    answers = _answers(script, aside)
    words = Words(answers)
    raw = Tokenizer.from_str(_byte_pairs())
    raw.add_special_tokens(list(SPECIAL))
    raw.add_tokens([AddedToken(text, normalized=False) for text in words.texts])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|start|>",
        eos_token=END,
        chat_template=TEMPLATE.replace("CALLS", CALLS[family]),
    )
    tokenizer.save_pretrained(folder)
    config = {
        **{"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1},
        **{"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": HEAD, "rms_norm_eps": 1e-5, "rope_theta": 1e12, "torch_dtype": "float32"},
        **{"vocab_size": raw.get_vocab_size(), "max_position_embeddings": CONTEXT},
        **{"tie_word_embeddings": False, "eos_token_id": raw.token_to_id(END)},
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = _weights(config, raw, words)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _answers(script: Script, aside: str) -> dict[str, str]:
    """Return the answers by marker, in order of the markers."""
    places = {ASIDE: aside, "<|place 0.0|>": "Ready."}
    for task, answers in sorted(script.items()):
        spare = [f"Task {task} is over."] * SPARE_STEPS
        for step, answer in enumerate([*answers, *spare]):
            places[f"<|place {task}.{step}|>"] = answer
    return places


@cache
def _byte_pairs() -> str:
    """Return a byte-pair encoding trained on our own pages, for prompts of realistic length."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train([str(page) for page in sorted(PAGES.glob("*.md"))], trainer)
    return str(raw.to_str())


class Words:
    """Tokens of a script: marks, and pieces of answers, of which no two are the same text.

    An answer that another one begins with, or that two marks have, shares no piece with it.
    """

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.marks = list(answers)
        self.follows: list[tuple[str, str]] = []
        self.first: dict[str, str] = {}
        self._texts: dict[str, None] = dict.fromkeys(self.marks)
        said: dict[str, str] = {}
        for mark, answer in answers.items():
            if answer not in said:
                said[answer] = self._add(answer)
            self.first[mark] = said[answer]

    @property
    def texts(self) -> list[str]:
        return list(self._texts)

    def _add(self, answer: str) -> str:
        text = answer.removesuffix(ENDLESS)
        pieces = self._pieces(text)
        after = pieces[0] if answer.endswith(ENDLESS) else END
        self.follows += [*pairwise(pieces), (pieces[-1], after)]
        return pieces[0]

    def _pieces(self, text: str) -> list[str]:
        """Split a text into pieces that no other answer contains."""
        pieces: list[str] = []
        piece = ""
        for letter in text:
            piece += letter
            if len(piece) >= PIECE and piece not in self._texts and piece not in pieces:
                pieces.append(piece)
                piece = ""
        while not piece or piece in self._texts or piece in pieces:
            if not pieces:
                raise ValueError(f"{text!r} stands in another answer; reword it")
            piece = pieces.pop() + piece
        pieces.append(piece)
        self._texts.update(dict.fromkeys(pieces))
        return pieces


def _weights(config: dict[str, object], raw: Tokenizer, words: Words) -> Model:
    model = Model(ModelArgs.from_dict(config))
    attention, head = model.layers[0].self_attn, mx.zeros(model.lm_head.weight.shape)
    embeddings = mx.zeros(model.model.embed_tokens.weight.shape)
    query, key, value = (mx.zeros((HEAD, HIDDEN)) for _ in range(3))
    back = mx.zeros((HIDDEN, HEAD))
    still = HEAD // 2 - 1  # the channel of the lowest frequency, which positions hardly turn
    marks = len(words.marks)
    if marks > HEAD or 1 + 2 * marks + len(words.follows) > HIDDEN:
        raise ValueError(f"{marks} marks and {len(words.follows)} pieces are too many")
    embeddings[raw.token_to_id(ASSISTANT), 0] = 1.0
    query[still, 0] = 1.0
    for index, mark in enumerate(words.marks):
        embeddings[raw.token_to_id(mark), 1 + index] = 1.0
        key[still, 1 + index] = STEP_SCORE * HEAD**0.5 / HIDDEN * (1 + index)
        value[index, 1 + index] = 1.0
        back[1 + marks + index, index] = 1.0
        head[raw.token_to_id(words.first[mark]), 1 + marks + index] = 10.0
    for index, (token, following) in enumerate(words.follows, 1 + 2 * marks):
        embeddings[raw.token_to_id(token), index] = 100.0
        head[raw.token_to_id(following), index] = 10.0
    model.model.embed_tokens.weight, model.lm_head.weight = embeddings, head
    attention.q_proj.weight, attention.k_proj.weight = query, key
    attention.v_proj.weight, attention.o_proj.weight = value, back
    model.layers[0].mlp.down_proj.weight = mx.zeros_like(model.layers[0].mlp.down_proj.weight)
    return model
