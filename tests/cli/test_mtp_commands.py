"""Commands and multi-token heads: what a folder ships, what it needs, and answers with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headed_models import write_published
from run_command import Call

from penstock.recall import MODEL_PATH


@pytest.mark.parametrize("draft", ["nosuch", "nosuch.gguf", "/nowhere/at/all"])
def test_unknown_draft_model_is_named_before_anything_is_loaded(draft: str, call: Call) -> None:
    for command in (["serve"], ["generate", "hello"]):
        done = call(*command, "--draft-model", draft)
        assert done.returncode == 2
        assert done.stderr.startswith("penstock: draft_model (--draft-model): there is no f")
        assert done.stderr.count("\n") == 1, "nothing was loaded"


def test_commands_say_what_folder_ships(call: Call, tmp_path: Path) -> None:
    vocabulary = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    folder = str(write_published("qwen3_5", tmp_path / "model", vocabulary=vocabulary))
    bare, planned = (
        json.loads(call("plan", folder, "--json", *more).stdout)
        for more in ([], ["--draft-model", "mtp"])
    )
    assert any("multi-token head" in note for note in bare["notes"])
    assert not any("multi-token head" in note for note in planned["notes"])
    assert planned["layers"]["full"] == bare["layers"]["full"] + 1
    assert planned["weight_bytes"] > bare["weight_bytes"]
    assert "--draft-model mtp" in call("doctor", folder).stdout
    greedy = ["generate", "hello", "--raw", "--model", folder, "--temperature", "0", "--json"]
    plain, drafted = (
        json.loads(call(*greedy, "--max-tokens", "20", *more).stdout)["text"]
        for more in ([], ["--draft-model", "mtp"])
    )
    assert drafted == plain != ""
