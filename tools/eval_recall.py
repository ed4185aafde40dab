"""Measure the embedded model's recall by context length, with mlx-lm itself.

    PYTHONPATH=src python tools/eval_recall.py                  # a table
    PYTHONPATH=src python tools/eval_recall.py --json           # one JSON object, table to stderr

Each context is read into mlx-lm's own cache; every question is asked after it, answered
greedily until the model ends its turn, and trimmed off again. An answer counts only if its
whole text is right. Of the binomial standard error and the one clustered by context, the larger
is given. The negative control asks about a fact that was taken out of the context.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.blas import load_blas  # isort: skip - penstock loads a fast BLAS, before MLX comes

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from penstock.recall import MODEL_PATH
from penstock_bench.recall import UNKNOWN, Dialogue, Question, dialogue, without

GOALS = {1000: 0.99, 4000: 0.95, 8000: 0.90}
FIRST_SEED = 10_000_000
MAX_ANSWER_TOKENS = 12
PREFILL_TOKENS = 512


class Model:
    """The model, its tokenizer and one cache, asked greedily."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer, *_ = mlx_lm.load(str(folder))
        self.cache = make_prompt_cache(self.model)
        self.tokens: list[int] = []

    def read(self, told: Dialogue) -> list[int]:
        """Prefill the dialogue's tokens, keeping the start it shares with the one before."""
        tokens: list[int] = self.tokenizer.apply_chat_template(list(told.messages))
        shared = 0
        while shared < min(len(tokens), len(self.tokens)) and tokens[shared] == self.tokens[shared]:
            shared += 1
        trim_prompt_cache(self.cache, len(self.tokens) - shared)
        for start in range(shared, len(tokens), PREFILL_TOKENS):
            self.model(mx.array(tokens[start : start + PREFILL_TOKENS])[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
        self.tokens = tokens
        return tokens

    def answer(self, told: Dialogue, question: Question, context: list[int]) -> str:
        """Ask after the dialogue just read; leave the cache as it was."""
        prompt: list[int] = self.tokenizer.apply_chat_template(
            told.ask(question), add_generation_prompt=True
        )
        if prompt[: len(context)] != context:
            raise ValueError("the question's prompt does not continue the context")
        step: list[int] = prompt[len(context) :]
        answer: list[int] = []
        while len(answer) < MAX_ANSWER_TOKENS:
            logits = self.model(mx.array(step)[None], cache=self.cache)
            step = mx.argmax(logits[0, -1:], axis=-1).tolist()
            if step[0] in self.tokenizer.eos_token_ids:
                break
            answer += step
        trim_prompt_cache(self.cache, self.cache[0].offset - len(context))
        text: str = self.tokenizer.decode(answer)
        return text.strip()


@dataclass(slots=True)
class RightAnswers:
    """Right answers of each context."""

    asked: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def add(self, asked: int, right: int) -> None:
        """Count one context."""
        self.asked.append(asked)
        self.right.append(right)

    def row(self) -> dict[str, float | int]:
        """Return n, the share that is right and its standard error."""
        n = sum(self.asked)
        share = sum(self.right) / n
        binomial = share * (1 - share) / n
        contexts = len(self.asked)
        spread = sum((r - share * a) ** 2 for a, r in zip(self.asked, self.right, strict=True))
        clustered = spread * contexts / max(1, contexts - 1) / n**2
        error = max(binomial, clustered) ** 0.5
        return {"n": n, "exact": round(share, 5), "standard_error": round(error, 5)}


def measure(model: Model, tokens: int, questions: int, per_context: int) -> dict[str, Any]:
    """Ask at one length; and once a context about a fact taken out, the negative control."""
    recall, refusal, leaked = RightAnswers(), RightAnswers(), 0
    wrong: list[dict[str, str]] = []
    began = time.monotonic()
    per_context = min(per_context, tokens // 64)
    for number in range(-(-questions // per_context)):
        told = dialogue(FIRST_SEED + number, tokens=tokens, facts=per_context)
        context = model.read(told)
        given = [(question, model.answer(told, question, context)) for question in told.questions]
        missed = [(question, answer) for question, answer in given if answer != question.answer]
        recall.add(len(given), len(given) - len(missed))
        wrong += [{"asked": q.text, "right": q.answer, "given": answer} for q, answer in missed]

        gone = told.questions[number % per_context]
        control = without(told, gone)
        answer = model.answer(control, gone, model.read(control))
        refusal.add(1, int(answer == UNKNOWN))
        leaked += answer == gone.answer
    return {
        "context_tokens": tokens,
        **recall.row(),
        "goal": GOALS.get(tokens),
        "never_told": refusal.row() | {"right_value_given": leaked},
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def main() -> None:
    """Parse the flags, measure, and print."""
    parser = argparse.ArgumentParser(description="Measure recall by context length with mlx-lm.")
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1000, 2000, 4000, 8000])
    parser.add_argument("--questions", type=int, default=512, help="for each length")
    parser.add_argument(
        "--per-context",
        type=int,
        default=16,
        help="questions after one context, at most one for every 64 tokens of it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    model = Model(args.model)
    table = sys.stderr if args.json else sys.stdout
    print("context      n   exact   s.e.   never told: 'I do not know.'", file=table)
    rows = []
    for tokens in args.tokens:
        row = measure(model, tokens, args.questions, args.per_context)
        rows.append(row)
        told = f"{tokens:7} {row['n']:6} {row['exact']:7.4f} {row['standard_error']:6.4f}"
        control = f"{row['never_told']['exact']:.3f} of {row['never_told']['n']}"
        print(f"{told}   {control}", file=table, flush=True)
    if args.json:
        environment = {
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "device": str(mx.default_device()),
            "dtype": "float32",
            "blas": Path(load_blas().name).name,
        }
        met = all(row["goal"] is None or row["exact"] >= row["goal"] for row in rows)
        result = {
            "claim": "greedy answers exactly right, by context length",
            "penstock": {"rows": rows},
            "goal": {str(tokens): share for tokens, share in GOALS.items()},
            "met": met,
            "environment": environment,
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
