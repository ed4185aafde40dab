"""`penstock bench decide`: questions of one state, beside chat requests with `logprobs`.

Both sides ask the same server, and neither finds a state of the other in the cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from penstock_bench.report import Line, Notify, Report
from penstock_bench.serve_model import real_folder
from penstock_bench.serve_process import ServerFailed, ending_cleanly, free_port, ours, serving
from penstock_bench.serve_words import words_of

CLAIM = "Questions with fixed answers are answered faster than chat requests read their logprobs"
RIVAL = "chat with logprobs"
CLIENTS = 8
"""Chat requests at a time."""
TOP_LOGPROBS = 20
MOST_APART = 0.01
"""Greatest difference of two probabilities of Yes, which differ in rounding."""
ASKED = "Question: {}\nAnswer with Yes or No only."
"""A question in the prompt, as the server writes it."""
SECONDS = 3_600.0


@dataclass(frozen=True, slots=True)
class DecideLoad:
    model: str = "smollm2"
    questions: int = 2_000
    chats: int = 100
    """Questions that are asked as chat requests."""
    state_tokens: int = 500
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Decisions:
    """Questions a second of each round, and the greatest difference of two probabilities."""

    decided: list[float]
    asked: list[float]
    apart: float
    compared: int


def measure(load: DecideLoad, notify: Notify) -> Report:
    """Ask the questions of a new state each round, by both interfaces in turn.

    Raises:
        ServerFailed: a request was refused.
    """
    decided: list[float] = []
    asked: list[float] = []
    apart: list[float] = []
    questions = [f"Is the number {number} in this text?" for number in range(load.questions)]
    with ending_cleanly(), real_folder(load.model) as folder:
        words = words_of(folder.path, ())
        states = words.lines(11_000, 2 * load.rounds, load.state_tokens)
        port = free_port()
        with (
            serving(ours(folder, port), port) as server,
            httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http,
        ):
            for number in range(load.rounds):
                notify("round", number, load.rounds)
                ours_state, state = states[2 * number : 2 * number + 2]
                began = time.perf_counter()
                _decide(http, ours_state, questions)
                decided.append(len(questions) / (time.perf_counter() - began))
                chosen = questions[: load.chats]
                began = time.perf_counter()
                rows = _chats(http, state, chosen)
                asked.append(len(chosen) / (time.perf_counter() - began))
                pairs = zip(_decide(http, state, chosen), rows, strict=True)
                apart += [abs(ours - theirs) for ours, theirs in pairs if theirs is not None]
        outcome = Decisions(decided, asked, max(apart, default=0.0), len(apart))
        return _report(load, folder.as_object(), outcome, folder.dtype)


def _decide(http: httpx.Client, state: str, questions: Sequence[str]) -> list[float]:
    """Return the probability of Yes of each question."""
    asked = {str(i): {"type": "noul", "instructions": text} for i, text in enumerate(questions)}
    answers = _post(http, "/v1/systemone", {"state": state, "questions": asked})["answers"]
    return [float(answers[name]["noul"]) for name in asked]


def _chats(http: httpx.Client, state: str, questions: Sequence[str]) -> list[float | None]:
    """Return the probability of Yes of each question; None if one answer is not in the top."""

    def ask(text: str) -> float | None:
        message = {"role": "user", "content": f"{state}\n\n{ASKED.format(text)}"}
        body = {"messages": [message], "max_tokens": 1, "temperature": 0, "logprobs": True}
        answer = _post(http, "/v1/chat/completions", body | {"top_logprobs": TOP_LOGPROBS})
        (token,) = answer["choices"][0]["logprobs"]["content"]
        return share_of_yes({top["token"]: top["logprob"] for top in token["top_logprobs"]})

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, questions))


def share_of_yes(logprobs: Mapping[str, float]) -> float | None:
    """Return the probability of Yes among Yes and No; None if one of them is missing.

    >>> round(share_of_yes({"Yes": math.log(0.3), "No": math.log(0.1)}), 6)
    0.75
    """
    if not {"Yes", "No"} <= logprobs.keys():
        return None
    return 1 / (1 + math.exp(logprobs["No"] - logprobs["Yes"]))


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    if answer.status_code != httpx.codes.OK:
        raise ServerFailed(f"{path} answers {answer.status_code}: {answer.text[:500]}")
    content: dict[str, Any] = answer.json()
    return content


def _report(load: DecideLoad, model: dict[str, Any], outcome: Decisions, dtype: str) -> Report:
    ours, theirs = statistics.median(outcome.decided), statistics.median(outcome.asked)
    faster, close = ours > theirs, outcome.apart <= MOST_APART
    return Report(
        name="decide",
        claim=CLAIM,
        rival=RIVAL,
        penstock={"questions_per_second": ours, "seconds": load.questions / ours},
        rival_figures={"questions_per_second": theirs},
        ratio={"questions_per_second": ours / theirs},
        goal={"ratio": 1.0, "apart": MOST_APART},
        met=faster and close,
        lines=[
            Line(
                f"questions/s ({ours / theirs:.2f}x)",
                f"{ours:,.1f}",
                f"{theirs:,.1f}",
                "its own",
                faster,
            ),
            Line(f"{load.questions:,} questions", f"{load.questions / ours:,.1f} s", ""),
            Line(
                f"most apart of {outcome.compared:,} probabilities",
                f"{outcome.apart:.2g}",
                "",
                f"{MOST_APART}",
                close,
            ),
        ],
        raw={"load": asdict(load), "model": model, "rounds": asdict(outcome)},
        dtype=dtype,
    )
