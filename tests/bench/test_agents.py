"""`penstock bench agents` as a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from patience import SOON
from run_command import SCRIPT, Call, Capture, Done, refused, run, typed

from penstock.recall import MODEL_PATH

FEW = ("bench", "agents", "--agents", "3", "--tokens", "200")


def report_of(done: Done[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def few() -> dict[str, Any]:
    return report_of(run(*FEW, "--json"))


def test_agents_recall_their_own_and_shared_facts(few: dict[str, Any]) -> None:
    report = few
    answers = [answer for agent in report["agents"] for answer in agent["answers"]]
    assert [agent["agent"] for agent in report["agents"]] == [1, 2, 3]
    assert [answer["shared"] for answer in answers] == [True, False] * 6
    assert [answer["answer"] for answer in answers] == [f"{a['expected']}." for a in answers]
    assert report["right"] == report["asked"] == len(answers)


def test_agents_report_accounts_for_all_tokens_and_bytes(few: dict[str, Any]) -> None:
    report = few
    stats, each = report["stats"], report["agents"]
    for figure in ("hit_tokens", "prompt_tokens"):
        assert sum(agent[figure] for agent in each) == report[figure] == stats[figure]
    assert report["hit_tokens"] > 0
    assert report["hit_rate"] == pytest.approx(report["hit_tokens"] / report["prompt_tokens"])
    # The last token of a prompt is read by the step that decodes.
    requests = stats["requests"]
    assert report["prefilled_tokens"] == report["prompt_tokens"] - report["hit_tokens"] - requests
    assert requests == stats["finished"] == 3 * 6
    assert (stats["failed"], stats["running"], stats["waiting"]) == (0, 0, 0)
    assert report["shared_tokens"] % report["block_size"] == 0
    assert 0 < report["shared_tokens"] <= 200
    # Everything that is held is the shared part, once, what each has behind it, and the last
    # tokens of a few answers from which a turn went on another way.
    own = sum(agent["own_bytes"] for agent in each)
    ends = report["held_bytes"] - report["shared_bytes"] - own
    assert report["held_bytes"] == stats["by_kind"]["nodes"]
    assert 0 <= ends < len(each) * report["block_size"] * 2_048
    assert ends % 2_048 == 0
    assert sum(stats["by_kind"].values()) == stats["used_bytes"] <= report["limit_bytes"]
    assert report["plain_bytes"] == sum(agent["plain_bytes"] for agent in each)
    assert report["plain_bytes"] == 2_048 * sum(agent["conversation_tokens"] for agent in each)
    assert report["held_bytes"] < report["plain_bytes"]
    assert 0 < report["peak_bytes"] <= report["limit_bytes"]


def test_agents_are_reproducible_by_seed(call: Call) -> None:
    def asked(seed: str) -> list[str]:
        given = {"PENSTOCK_AGENTS": "2", "PENSTOCK_TOKENS": "64", "PENSTOCK_SEED": seed}
        report = report_of(call("bench", "agents", "--json", **given))
        assert len(report["agents"]) == 2
        return [a["question"] for agent in report["agents"] for a in agent["answers"]]

    assert asked("3") == asked("3") != asked("4")


def test_agents_respect_memory_limit_and_block_size(call: Call) -> None:
    given = {"PENSTOCK_MEMORY_LIMIT": "150 MB", "PENSTOCK_BLOCK_SIZE": "32"}
    report = report_of(call(*FEW, "--json", **given))
    assert (report["limit_bytes"], report["block_size"]) == (150_000_000, 32)


def test_agents_above_batch_size_wait(call: Call) -> None:
    report = report_of(call("bench", "agents", "--json", "--agents", "11", "--tokens", "100"))
    assert report["right"] == report["asked"] == 44


def test_agents_piped_output_has_no_control_characters(call: Call) -> None:
    done = call(*FEW, FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert [c for c in done.stdout if not (c.isprintable() or c == "\n")] == []
    lines = done.stdout.splitlines()
    live = [line for line in lines if " running, " in line]
    assert live[-1].startswith("0 running, 0 waiting; ")
    for part in (
        "of 200.0 MB: weights 7.03 MB, nodes ",
        "plain caches ",
        "hit tokens (",
        "tokens/s",
    ):
        assert part in live[-1]
    assert sum(line.endswith(" right") for line in lines) == 12
    assert lines[-3].split()[:2] == ["all", "12/12"]
    assert lines[-1].startswith("At most ")


def test_agents_terminal_output_redraws_one_line() -> None:
    code, shown = typed("", *FEW)
    assert code == 0
    assert "\x1b[2K" in shown  # a line is wiped
    assert "\x1b[?25h" in shown  # the cursor is back
    assert "At most " in shown.splitlines()[-1]


def test_ctrl_c_stops_agents() -> None:
    with subprocess.Popen(
        [SCRIPT, "bench", "agents", "--tokens", "3000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert b"running" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SOON)
        assert process.returncode == 130
        assert errors == b""


def test_model_without_chat_template_is_refused(capsys: Capture, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no chat template" in refused(capsys, "bench", "agents", "--model", str(model))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--agents", "1"], "--agents"),
        (["--tokens", "many"], "--tokens"),
        (["--tokens", "31"], "--tokens"),
        (["--block-size", "0"], "--block-size"),
        (["--seed", "-1"], "--seed"),
        (["--memory-limit", "much"], "'much' is not a size"),
        (["--memory-limit", "0"], "--memory-limit is 0"),
        (["--memory-limit", "9MB"], "9.00 MB"),
        (["--model", "nosuch"], "there is no folder nosuch"),
        (["extra"], "extra"),
    ],
)
def test_bad_arguments_give_one_line_error(
    capsys: Capture, arguments: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, "bench", "agents", *arguments)
