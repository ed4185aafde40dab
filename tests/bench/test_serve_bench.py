"""The server bench on small sizes: real processes, real HTTP."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from stand_in_server import stand_in

from penstock.cli import main
from penstock.errors import SettingError
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock_bench import (
    serve_figures,
    serve_held,
    serve_length,
    serve_model,
    serve_process,
    serve_runs,
    serve_time,
)
from penstock_bench import serve_load as serve
from penstock_bench.cli import serve_command
from penstock_bench.engine_sides import LLAMA, OURS, RIVAL
from penstock_bench.models import LlamaShape, ModelChoice
from penstock_bench.recall import count_tokens
from penstock_bench.report import publish, without_folder
from penstock_bench.serve_client import (
    Client,
    Reply,
    Session,
    at_once,
    closed_loop,
    connected,
    open_loop,
    percentile,
)
from penstock_bench.serve_words import TextWords
from support.gguf_files import small_model, write_model

TINY = LlamaShape(
    layers=2, hidden_size=64, intermediate_size=64, query_heads=4, kv_heads=2, head_dim=16
)
SMALL = serve.ServeLoad(
    llama=TINY,
    sessions=3,
    turns=4,
    system_tokens=600,
    line_tokens=20,
    answer_tokens=8,
    forks=1,
    edits=1,
    rate=20.0,
    arrivals=6,
    connections=30,
    connection_tokens=4,
    overhead_rounds=2,
    overhead_prompt_tokens=60,
    overhead_tokens=16,
)


@pytest.fixture(scope="module")
def measured() -> Any:
    return serve_runs.measure(SMALL)


# ---- the model's folder, and what is said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "random"
    serve_model.write_random(place, TINY)
    return place


def test_scripted_model_output_round_trips_through_tokenizer(folder: Path) -> None:
    model, tokenizer = load(folder)
    tokens = render(tokenizer, [{"role": "user", "content": "Hello!"}])
    prompt = len(tokens)
    for _ in range(24):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    answer = tokenizer.decode(tokens[prompt:])
    assert tokenizer.eos_token_id not in tokens[prompt:]
    said = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": answer.strip()}]
    assert render(tokenizer, said, answer=False)[:-1] == tokens


@pytest.mark.parametrize("tokens", [100, 4_000])
def test_system_prompt_has_requested_length(tokens: int) -> None:
    _, tokenizer = load(serve_model.MODEL_PATH)
    message = [{"role": "system", "content": serve_model.system_prompt(tokens)}]
    assert tokens - 20 < len(render(tokenizer, message, answer=False)) <= tokens


def test_user_lines_differ_and_have_requested_length() -> None:
    said = serve_model.lines(1, 10, 40)
    assert len(set(said)) == 10
    assert all(40 <= count_tokens([{"role": "user", "content": line}]) < 80 for line in said)
    assert said != serve_model.lines(2, 10, 40)


def test_real_text_is_cut_to_requested_lengths() -> None:
    def count(text: str) -> int:
        return len(text.split())

    words = TextWords("\n\n".join(f"word{n} and more of it" for n in range(400)), count)
    assert 990 < count(words.system(1_000)) <= 1_000
    assert 2_990 < count(words.system(3_000)) <= 3_000, "a short text comes again"
    said = words.lines(1, 10, 40)
    assert len(set(said)) == 10
    assert all(count(line) == 40 for line in said)
    assert said != words.lines(2, 10, 40)


def test_llama_cpp_needs_gguf_file() -> None:
    with pytest.raises(SettingError, match="no GGUF file"):
        serve_process.llama_cpp("llama-server -np 8", FOLDER, 1)
    command = serve_process.llama_cpp("llama-server -np 8", replace(FOLDER, gguf=Path("m.gguf")), 1)
    assert command.arguments[:5] == ("llama-server", "-np", "8", "--model", "m.gguf")


def test_random_model_refuses_llama_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--llama-server", "llama-server"]) == 2
    assert "need a model with real weights" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "speculate"])
def test_missing_model_gives_one_line_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, why in (
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path, "it has no config.json"),
        (tmp_path / "m.gguf", "there is no file"),
        ("owner/model", "name a model folder"),
    ):
        assert main(["bench", command, "--model", str(name)]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).touch()
    assert main(["bench", command, "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_default_settings_depend_on_real_model() -> None:
    """Receives all command-line options, those left out with their defaults."""
    plain = serve_command.ServeSettings().model_dump()
    real = serve_command._real_settings(plain)
    assert (real["system_tokens"], real["connections"], real["overhead_rounds"]) == (3_000, 0, 0)
    assert serve_command._real_settings({**plain, "system_tokens": 500})["system_tokens"] == 500
    assert {name for name in plain if plain[name] != real[name]} == {*serve_command.REAL_DEFAULTS}


@pytest.mark.slow
def test_gguf_file_is_served_by_both_servers(tmp_path: Path) -> None:
    """Our server stands in for llama.cpp's, and takes the model without a flag."""
    ours = shlex.quote(f'exec {sys.executable} -m penstock serve "$2" "$3" "$4" "$5" "$6"')
    model, config = small_model("llama")
    write_model(tmp_path / "small.gguf", "llama", model, config, "Q8_0")
    load_ = serve.ServeLoad(
        model=str(tmp_path / "small.gguf"),
        llama_server=f"sh -c {ours} llama-server",
        sessions=2, turns=2, system_tokens=300, answer_tokens=4, connections=0, overhead_rounds=0,
    )  # fmt: skip
    report = serve_runs.measure(load_)
    assert report.rival_figures["llama.cpp"]["requests"] == 4
    assert report.raw["same_first_answers"] == {"penstock": 2, "mlx-lm": 2, "llama.cpp": 2}


# ---- loads, on a stand-in


def send(url: str, load: Callable[[Client], Awaitable[list[Reply]]]) -> list[Reply]:
    async def run() -> list[Reply]:
        async with connected(url, "counter") as client:
            return await load(client)

    return asyncio.run(run())


def test_session_resends_history() -> None:
    with stand_in() as server:
        replies = send(server.url, lambda c: closed_loop(c, "S", [Session(["a", "b"])], 4))
    assert server.said == [["S", "a"], ["S", "a", "message 2", "b"]]
    assert [reply.turn for reply in replies] == [0, 1]
    assert all(reply.error is None for reply in replies)
    assert all(reply.sent < min(reply.text_times) <= reply.ended for reply in replies)
    assert [len(reply.text_times) for reply in replies] == [2, 2]  # no comment, no empty delta
    assert (replies[0].prompt_tokens, replies[0].cached_tokens) == (20, 15)


def test_forked_and_edited_sessions_resend_shared_history() -> None:
    session = Session(["a", "b", "c", "d"], fork=["x", "y"], edit="e")
    with stand_in() as server:
        replies = send(server.url, lambda c: closed_loop(c, "S", [session], 4))
    said = {tuple(text for text in of if not text.startswith("message")) for of in server.said}
    assert said == {
        ("S", "a"), ("S", "a", "b"), ("S", "a", "b", "c"), ("S", "a", "b", "e"),
        ("S", "a", "b", "x"), ("S", "a", "b", "x", "y"),
    }  # fmt: skip
    assert len(replies) == 6


def test_open_loop_sends_at_arrival_times() -> None:
    with stand_in() as server:
        began = time.perf_counter()
        replies = send(server.url, lambda c: open_loop(c, "S", ["a", "b"], [0.05, 0.3], 4))
    assert [reply.sent - began > at for reply, at in zip(replies, (0.05, 0.3), strict=True)]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [("status", True), ("status", False), ("event", True), ("cut", True), ("no usage", True)],
)
def test_failed_replies_are_counted(fault: str, stream: bool) -> None:
    said = [[{"role": "user", "content": "a"}]] * 3
    with stand_in(fault=fault) as server:
        replies = send(server.url, lambda c: at_once(c, said, 4, stream=stream))
    assert [reply.error is not None for reply in replies] == [True] * 3


def test_connection_refused_is_counted() -> None:
    said = [[{"role": "user", "content": "a"}]]
    replies = send(f"http://127.0.0.1:{serve_process.free_port()}", lambda c: at_once(c, said, 4))
    assert "ConnectionRefusedError" in str(replies[0].error)


# ---- memory and processes


def test_memory_peak_is_sampled() -> None:
    code = "from time import *; sleep(0.5); x = bytearray(2 * 10**8); sleep(0.3); del x; sleep(0.3)"
    with (
        subprocess.Popen([sys.executable, "-c", code]) as process,
        serve_process.watched(psutil.Process(process.pid)) as memory,
    ):
        process.wait()
    assert memory.peak_bytes - memory.samples[0][1] > 150_000_000
    assert memory.samples[-1][1] < memory.peak_bytes - 100_000_000
    gaps = [b[0] - a[0] for a, b in zip(memory.samples, memory.samples[1:], strict=False)]
    assert percentile(gaps, 50) < 0.1


def test_server_exit_at_start_reports_its_last_output() -> None:
    ends = (sys.executable, "-c", "raise SystemExit('no such model')")
    broken = serve_process.ServerCommand("broken", ends, signal.SIGTERM)
    started = serve_process.serving(broken, serve_process.free_port())
    with pytest.raises(serve_process.ServerFailed, match="no such model"), started:
        pass


def test_terminated_bench_leaves_no_child_processes() -> None:
    code = (
        "import sys, time\n"
        "from penstock_bench.serve_process import _started, ending_cleanly, stop, signal\n"
        "waits = (sys.executable, '-c', 'import time; time.sleep(60)')\n"
        "with ending_cleanly(), _started(waits, {}) as (process, _):\n"
        "    try:\n"
        "        print(process.pid, flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        stop(process, signal.SIGTERM)\n"
    )
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        child = int(bench.stdout.readline())
        assert psutil.pid_exists(child)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(20) == 143
    assert not psutil.pid_exists(child)


# ---- all of it


def test_both_servers_answer_every_session(measured: Any) -> None:
    forked = SMALL.turns - 2
    wanted = SMALL.sessions * SMALL.turns + SMALL.forks * forked
    for side in (measured.penstock["sessions"], measured.rival_figures["sessions"]):
        assert (side["requests"], side["errors"]) == (wanted, 0)
        assert side["completion_tokens"] == wanted * SMALL.answer_tokens
        assert side["ttft_p50_seconds"] <= side["ttft_p95_seconds"] <= side["ttft_p99_seconds"]
        assert side["peak_bytes"] >= side["idle_bytes"] > 50_000_000
        assert side["peak_above_idle_bytes"] == side["peak_bytes"] - side["idle_bytes"]
        assert side["ttft_p95_later_seconds"] > 0 and side["later_tokens_per_second"] > 0
    assert measured.penstock["sessions"]["cached_tokens"] > 0
    assert {"throughput", "ttft_p95", "peak_memory"} <= set(measured.ratio)


def test_both_servers_get_open_loop_requests(measured: Any) -> None:
    for side in (measured.penstock["arrivals"], measured.rival_figures["arrivals"]):
        assert (side["requests"], side["errors"]) == (SMALL.arrivals, 0)


def test_all_connections_are_open_at_once(measured: Any) -> None:
    crowd = measured.penstock["connections"]
    assert (crowd["requests"], crowd["errors"]) == (SMALL.connections, 0)
    assert crowd["most_open"] == SMALL.connections


def test_overhead_is_measured_for_equal_work(measured: Any) -> None:
    raw = measured.raw["overhead"]
    assert raw["tokens"] == 8 * SMALL.overhead_tokens
    for kind in ("seconds", "cpu_seconds", "client_cpu_seconds"):
        assert {way: len(of) for way, of in raw[kind].items()} == dict.fromkeys(serve.WAYS, 2)
    assert min(raw["cpu_seconds"]["alone"]) > 0


def test_report_is_printed_saved_and_plotted(
    measured: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publish(measured, as_json=True, save=tmp_path)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {
        "claim", "penstock", RIVAL, "ratio", "goal", "met", "environment",
    }  # fmt: skip
    (stored,) = tmp_path.glob("serve-*.json")
    record = json.loads(stored.read_text())["raw"]
    assert set(record["sessions"]) == {OURS, RIVAL}
    assert (
        serve_model.system_prompt(SMALL.system_tokens)[:40] not in stored.read_text()
    )  # figures, and no text of anybody
    assert record["sessions"][OURS][0]["memory"]
    publish(measured, as_json=False, save=None)
    assert "completion tokens/s" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    from penstock_bench.serve_picture import draw

    draw(measured, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").stat().st_size > 10_000


def phase(seconds: float, replies: Sequence[Reply], peak_bytes: int) -> serve.Phase:
    memory = serve_process.Memory([(0.0, 100), (0.1, peak_bytes)])
    return serve.Phase(seconds, list(replies), memory, 100, 1.0, None)


def reply(first: float, gap: float, error: str | None = None) -> Reply:
    times = [] if error else [first, first + gap, first + 2 * gap]
    return Reply(0, 0.0, times, first + 2 * gap, "", 10, 5, 0 if error else 3, error)


def found(folder_like: Any, ours: serve.Phase, theirs: serve.Phase) -> serve.ServerRuns:
    return serve.ServerRuns({OURS: [ours], RIVAL: [theirs]}, {}, None, None, folder_like)


FOLDER = serve_model.ServedFolder(Path(), "none", 1, 1)
THEIRS = phase(30.0, [reply(5.0, 0.2)] * 4, 400)


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        (phase(10.0, [reply(1.0, 0.1)] * 4, 200), True),
        (phase(10.1, [reply(1.0, 0.1)] * 4, 200), False),  # throughput
        (phase(10.0, [reply(1.1, 0.1)] * 4, 200), False),  # first token
        (phase(10.0, [reply(1.0, 0.1)] * 4, 201), False),  # memory
        (phase(7.5, [*[reply(1.0, 0.1)] * 4, reply(1.0, 0.1, "500")], 200), False),  # an error
    ],
)
def test_every_goal_can_be_missed(ours: serve.Phase, met: bool) -> None:
    made = serve_figures.report(serve.ServeLoad(), found(FOLDER, ours, THEIRS))
    assert made.met is met
    assert len([line for line in made.lines if line.goal]) == 4


def test_goals_apply_only_to_default_load() -> None:
    slow = phase(100.0, [reply(50.0, 1.0)], 4_000)
    assert serve_figures.report(SMALL, found(FOLDER, slow, THEIRS)).met


def test_connection_error_misses_goal() -> None:
    good = phase(1.0, [reply(1.0, 0.1)] * 2, 200)
    bad = phase(1.0, [reply(1.0, 0.1), reply(1.0, 0.1, "503")], 200)
    for crowd, met in ((good, True), (bad, False)):
        of = replace(found(FOLDER, good, THEIRS), connections=crowd)
        assert serve_figures.report(SMALL, of).met is met


@pytest.mark.parametrize(("streamed", "met"), [([1.04, 1.04], True), ([1.06, 1.06], False)])
def test_server_overhead_above_goal_misses_it(streamed: list[float], met: bool) -> None:
    good = phase(1.0, [reply(1.0, 0.1)] * 2, 200)
    seconds = {"alone": [1.0, 1.0], "streamed": streamed, "whole": [1.0, 1.0]}
    overhead = serve.Overhead(seconds, seconds, seconds, 100)
    of = replace(found(FOLDER, good, THEIRS), overhead=overhead)
    assert serve_figures.report(SMALL, of).met is met


def test_check_detects_differing_prompts() -> None:
    ours, theirs = (phase(1.0, [reply(1.0, 0.1)], 200) for _ in range(2))
    serve_runs._check_same_prompts({OURS: [ours], RIVAL: [theirs]})
    theirs.replies[0].prompt_tokens = 11
    with pytest.raises(AssertionError, match="different prompts"):
        serve_runs._check_same_prompts({OURS: [ours], RIVAL: [theirs]})


def test_serve_bench_help_lists_options() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "serve", "--help"],
        capture_output=True,
        text=True,
    )
    assert "--connections NUMBER" in done.stdout
    assert ModelChoice.RANDOM in done.stdout


# ---- the time that it takes


RECORD = Path(__file__).parents[2] / "benchmarks/results/serve-2026-11-21T081951Z.json"


@pytest.mark.parametrize("side", [OURS, RIVAL])
def test_expected_duration_matches_recorded_run(side: str) -> None:
    raw = json.loads(RECORD.read_text())["raw"]
    parameters, kv_bytes = raw["model"]["parameters"], raw["model"]["kv_bytes_per_token"]
    of = serve_model.ServedFolder(Path(), "recorded", parameters, kv_bytes)
    load_ = serve.ServeLoad(**{n: raw["load"][n] for n in ("sessions", "turns", "system_tokens")})
    took = raw["sessions"][side][0]["seconds"]
    expected = serve_time.expected_seconds(load_, of, side, serve_time.RECORDED_GFLOPS)
    assert took / 1.5 < expected < 1.5 * took
    slower = serve_time.expected_seconds(load_, of, side, serve_time.RECORDED_GFLOPS / 2)
    assert slower > 1.7 * expected, "half as fast a machine"


def test_progress_reports_expected_time_and_every_reply() -> None:
    told: list[tuple[str, int, int]] = []
    seconds = {OURS: 20.0, RIVAL: 100.0}
    progress = serve_time.ServeProgress(lambda *step: told.append(step), seconds, rounds=2)
    assert told == [(serve_time.EXPECTED, 0, 240)]

    def four(client: Client) -> Awaitable[list[Reply]]:
        return at_once(client, [[{"role": "user", "content": "a"}]] * 4, 4)

    with stand_in() as server:
        for side in (OURS, RIVAL, RIVAL, OURS):
            send(server.url, progress.counted(side, four, 4))
    assert told[-1][1:] == (240, 240) and len(told) == 1 + 4 * (1 + 4)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# ---- conversations that are held


@pytest.mark.slow
def test_conversations_stay_cached_across_restart() -> None:
    report = serve_held.measure(serve.ServeLoad(llama=TINY), [3])
    ours, theirs = report.penstock["3"], report.rival_figures["3"]
    for side in (ours, theirs):
        assert side["resident_bytes"] > side["above_idle_bytes"]
        assert min(side["oldest_prompt_tokens"], side["newest_prompt_tokens"]) > 1_000
        assert side["restarted_prompt_tokens"] > side["newest_prompt_tokens"]
    assert ours["oldest_cached_tokens"] > 0.9 * serve_held.SYSTEM_TOKENS * 2
    assert ours["restarted_cached_tokens"] > 0.9 * serve_held.SYSTEM_TOKENS * 2
    assert theirs["restarted_cached_tokens"] < 10, "it has no disk"


def held_run(first: Reply, later: Sequence[Reply], again: Reply) -> serve_held.HeldRun:
    phases = phase(1.0, [first], 500), phase(1.0, later, 500), phase(1.0, [again], 500)
    return serve_held.HeldRun(phases[0], 400, *phases[1:])


def test_cached_conversation_figures_are_reported() -> None:
    run = held_run(reply(3.0, 0.1), [reply(1.0, 0.1), reply(2.0, 0.1)], reply(4.0, 0.1))
    figures = run.figures()
    assert (figures["resident_bytes"], figures["above_idle_bytes"]) == (400, 300)
    firsts = [figures[f"{name}_ttft_seconds"] for name in ("oldest", "newest", "restarted")]
    assert firsts == [1.0, 2.0, 4.0]
    sides = {side: {8: run} for side in (OURS, RIVAL)}
    made = serve_held._report(serve.ServeLoad(), FOLDER, RIVAL, sides)
    texts = {line.figure: line.ours for line in made.lines}
    assert texts["8 conversations: first token behind a restart (cached)"] == "4.00 s (5 of 10)"
    with pytest.raises(serve_process.ServerFailed, match="1 answers did not come: 500"):
        serve_held._check("8", phase(1.0, [reply(1.0, 0.1), reply(1.0, 0.1, "500")], 9))


# ---- one client


@pytest.mark.slow
def test_new_prompts_of_each_length_are_answered_by_both_servers() -> None:
    report = serve_length.measure(serve.ServeLoad(llama=TINY), [40, 600])
    for side in (report.penstock, report.rival_figures):
        assert side["resident_bytes"] > 0
        for length, figures in side["lengths"].items():
            assert figures["prompt_tokens"] == pytest.approx(int(length), abs=60)
            assert figures["first_token_seconds"] > 0 and figures["tokens_per_second"] > 0
    for side in report.raw["replies"].values():
        for replies in side.values():
            assert len(replies) == serve_length.ROUNDS
            assert all(reply["cached_tokens"] <= 32 for reply in replies), "new text each time"
    goals = {line.figure: line.goal for line in report.lines}
    assert goals["40 tokens: first token, s"] == ""
    assert goals["600 tokens: first token, s"] == "2x"


def test_decode_speed_excludes_first_token() -> None:
    answer = Reply(0, 0.0, text_times=[2.0, 2.5, 3.0], completion_tokens=11)
    assert serve_length._speed(answer) == 10.0


def test_answers_without_text_are_no_figures() -> None:
    """A model that was not trained to chat may end its answer at once."""
    told = Reply(0, 1.0, text_times=[1.5, 1.6], ended=1.6, completion_tokens=2, prompt_tokens=9)
    ended = Reply(0, 1.0, ended=1.1, prompt_tokens=9)
    figures = serve_length.LengthRun(1, {20: [ended, told]}).figures()
    assert figures["lengths"]["20"]["first_token_seconds"] == 0.5
    with pytest.raises(SettingError, match="prompts of 20 tokens at once"):
        serve_length.LengthRun(1, {20: [ended]}).figures()


def test_incompatible_plot_and_rival_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--conversations", "8", "--plot", "x.png"]) == 2
    assert "needs sessions and mlx-lm's server" in capsys.readouterr().err
    assert main(["bench", "serve", "--conversations", "8", "--length", "20"]) == 2
    assert "two benches" in capsys.readouterr().err
    assert main(["bench", "serve", "--no-mlx-lm"]) == 2
    assert "add --llama-server" in capsys.readouterr().err


def test_goals_apply_only_to_mlx_lm_rival() -> None:
    ours, llama = phase(10.0, [reply(1.0, 0.1)] * 4, 200), phase(5.0, [reply(1.0, 0.1)] * 4, 100)
    load_ = serve.ServeLoad(model="m.gguf", system_tokens=3_000, llama_server="llama-server")
    three = serve.ServerRuns(
        {OURS: [ours], RIVAL: [THEIRS], LLAMA: [llama]}, {}, None, None, FOLDER
    )
    made = serve_figures.report(load_, three)
    assert (made.rival, made.heading) == (RIVAL, "mlx-lm or llama.cpp")
    assert len([line for line in made.lines if line.goal]) == 4 and not made.met
    (beside,) = (line for line in made.lines if line.figure.startswith("beside llama.cpp: comp"))
    assert (beside.ours, beside.rival) == ("1.2", "2.4") and "(0.50x)" in beside.figure
    two = serve.ServerRuns({OURS: [ours], LLAMA: [llama]}, {}, None, None, FOLDER)
    made = serve_figures.report(load_.model_copy(update={"mlx_lm": False}), two)
    assert (made.rival, made.heading) == (LLAMA, LLAMA)
    assert [line.figure for line in made.lines if line.goal] == ["errors"]
    assert set(serve.sides_of(load_)) == {OURS, RIVAL, LLAMA}
    assert set(serve.sides_of(load_.model_copy(update={"mlx_lm": False}))) == {OURS, LLAMA}


@pytest.mark.parametrize(
    ("command", "recorded"),
    [("build/bin/llama-server -np 8", "llama-server -np 8"), ("llama-server", "llama-server")],
)
def test_record_stores_program_name_without_path(command: str, recorded: str) -> None:
    load = serve.ServeLoad(model="smollm2", llama_server=command)
    assert load.model_dump(mode="json")["llama_server"] == recorded
    assert load.llama_server == command


def test_records_have_no_folders(tmp_path: Path) -> None:
    for model in (tmp_path / "mine.gguf", tmp_path / "mine"):
        model.mkdir()
        raw = {"load": serve.ServeLoad(model=str(model)).model_dump(mode="json"), "runs": [1]}
        kept = without_folder(raw)
        assert kept["load"]["model"] == "mine" and kept["runs"] == [1]
        assert str(tmp_path) not in json.dumps(kept)
    assert without_folder({"load": {"model": "smollm2"}}) == {"load": {"model": "smollm2"}}
