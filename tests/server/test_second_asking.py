"""Two models whose requests wait for each other's memory: one is unloaded, all are answered."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from patience import SOON
from served_pool import ASKED, Address, served, spec

from penstock.recall import MODEL_PATH
from penstock.server.attached_models import AttachedModel

LONG = [{"role": "user", "content": f"{'La ' * 1_500}\n{ASKED}"}]
"""A prompt whose keys and values do not fit beside both models."""
FREE_BYTES = 700_000


def text_of(answered: httpx.Response) -> str:
    assert answered.status_code == 200, answered.text
    if not answered.headers["content-type"].startswith("text/event-stream"):
        return str(answered.json()["choices"][0]["message"]["content"])
    lines = [line for line in answered.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    roles = [c["delta"].get("role") for chunk in chunks for c in chunk["choices"]]
    assert roles.count("assistant") == 1
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def ask(address: Address, number: int) -> str:
    model = ("first", "second")[number % 2]
    more: dict[str, Any] = {"messages": LONG, "stream": number % 4 > 1, "temperature": 0}
    return text_of(address.chat(model, **more))


def test_one_of_two_deadlocked_models_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gave: list[AttachedModel] = []
    give_way = AttachedModel.give_way

    def noted(model: AttachedModel) -> None:
        gave.append(model)
        give_way(model)

    monkeypatch.setattr(AttachedModel, "give_way", noted)
    with served([spec("first", MODEL_PATH), spec("second", MODEL_PATH)], 200_000_000) as address:
        alone = {ask(address, number) for number in range(2)}
        assert len(alone) == 1
        address.several.pool.unload("first").result(SOON)
        address.several.pool.unload("second").result(SOON)
        for name in ("first", "second"):
            address.answer(name)
        sizes = sum(model["size"] for model in address.models().values())
        address.several.pool.set_limit(sizes + 2_000_000 + FREE_BYTES).result(SOON)
        with ThreadPoolExecutor(6) as workers:
            told = set(workers.map(lambda number: ask(address, number), range(6)))
        assert told == alone
        assert gave
        address.several.pool.check()
