"""`penstock bench restore`: what was read before a restart is read back, not computed again."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import psutil

from penstock.bench.engine_runs import MEMORY_SHARE, RIVAL, EngineShape, clean, size
from penstock.bench.models import BenchModel, Choice, LlamaShape, bench_model
from penstock.bench.report import Line, Report
from penstock.engine.core import Core
from penstock.engine.request import Request, Token
from penstock.models.rivals import Solo

CLAIM = "After a restart a known prompt is read from the disk, not computed"

GOALS = {"first_token": 20.0, "bandwidth": 0.8, "writing": 0.97, "peak_memory": 1.1}
"""Times quicker than computing the prompt; of a plain read's bytes a second; of the decode speed
without a disk; of the bytes restored."""
FLUSH_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes in tokens."""

    model: Choice = Choice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    known_tokens: int = 8_192
    decode_tokens: int = 128
    """Generated while the prompt's blocks are written behind."""
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5


@dataclass(slots=True)
class Round:
    """What one round has found, each side after the other. Seconds, bytes of KV or of files."""

    prefill_seconds: float = 0.0
    """To the first token, nothing known."""
    decode_seconds: float = 0.0
    """Of `decode_tokens` after it."""
    written_prefill_seconds: float = 0.0
    """The same with a folder."""
    written_decode_seconds: float = 0.0
    written_bytes: int = 0
    restored_seconds: dict[str, float] = field(default_factory=dict)
    """To the first token after a restart, by whether the system has the files in memory."""
    step_seconds: float = 0.0
    """Of a plain step at that length, the median."""
    restored_bytes: int = 0
    file_bytes: int = 0
    peak_bytes: int = 0
    """Beyond what was there before the request, until its first token."""
    plain_seconds: dict[str, float] = field(default_factory=dict)
    """To read the same files one after the other."""
    rival_restored_seconds: dict[str, float] = field(default_factory=dict)
    """mlx-lm's: to load its file of the same prompt, and to the first token."""
    rival_peak_bytes: int = 0
    tokens: list[int] = field(default_factory=list, repr=False)

    def bandwidth(self, files: str) -> float:
        """Bytes a second from the request on, a plain step not counted."""
        return self.file_bytes / (self.restored_seconds[files] - self.step_seconds)


FILES = ("disk", "memory")
"""Where the files are when they are read: the system was told to forget them, or has just read
them."""


def measure(load: Load) -> Report:
    """Compute, write, restart and restore, again and again, a folder for each round."""
    model = bench_model(load.model, load.llama)
    prompt = model.prompt(load.known_tokens + 1, seed=0)
    with TemporaryDirectory(prefix="penstock-bench-") as name:
        file = Path(name) / "rival.safetensors"
        rival_seconds = _rival_file(model, prompt, file)
        rounds = [_round(load, model, prompt, file) for _ in range(load.rounds)]
    for each in rounds:
        _check(rounds[0].tokens, each.tokens)
    return report(load, model, rounds, rival_seconds)


def _round(load: Load, model: BenchModel, prompt: Sequence[int], rival_file: Path) -> Round:
    found = Round()
    with TemporaryDirectory(prefix="ours-", dir=rival_file.parent) as name:
        folder = Path(name)
        with _core(load, model, None) as core:
            found.prefill_seconds, found.tokens, steps = _ask(core, prompt, load.decode_tokens)
            found.decode_seconds, found.step_seconds = sum(steps), statistics.median(steps)
        with _core(load, model, folder) as core:
            seconds, tokens, steps = _ask(core, prompt, load.decode_tokens)
            found.written_prefill_seconds, found.written_decode_seconds = seconds, sum(steps)
            _check(found.tokens, tokens)
        ours = sorted(folder.rglob("*.safetensors"))
        found.written_bytes = sum(path.stat().st_size for path in ours)
        for files in FILES:
            _prepare(ours, files)
            with _core(load, model, folder) as core:
                before = mx.get_active_memory()
                mx.reset_peak_memory()
                seconds, tokens, _ = _ask(core, prompt, 1)
                found.peak_bytes = max(found.peak_bytes, mx.get_peak_memory() - before)
                found.restored_seconds[files] = seconds
                stats = core.stats()
                assert stats.ssd is not None
                found.restored_bytes = stats.restored_tokens * core.runner.token_bytes
                found.file_bytes = stats.ssd.counts.read_bytes
            _check(found.tokens, tokens)
            _prepare(ours, files)
            found.plain_seconds[files] = _plain_read(ours)
    _rival_round(found, model, prompt, rival_file)
    return found


def _rival_file(model: BenchModel, prompt: Sequence[int], file: Path) -> float:
    """Compute the prompt with mlx-lm and save it; return the seconds of computing it."""
    clean()
    side = Solo(model.model)
    began = time.perf_counter()
    side.learn(prompt[:-1])
    _first(side, prompt)
    seconds = time.perf_counter() - began
    side.save(prompt[:-1], file)
    side.close()
    return seconds


def _rival_round(found: Round, model: BenchModel, prompt: Sequence[int], file: Path) -> None:
    """Load what mlx-lm has saved, as after a restart."""
    for files in FILES:
        _prepare([file], files)
        before = clean()
        mx.reset_peak_memory()
        side = Solo(model.model)
        began = time.perf_counter()
        side.load(prompt[:-1], file)
        _check(found.tokens, [_first(side, prompt)])
        found.rival_restored_seconds[files] = time.perf_counter() - began
        found.rival_peak_bytes = mx.get_peak_memory() - before
        side.close()
        del side


def _first(side: Solo, prompt: Sequence[int]) -> int:
    side.submit([prompt], 1)
    return side.step()[0][1]


def _check(expected: Sequence[int], found: Sequence[int]) -> None:
    if list(expected[: len(found)]) != list(found):
        raise AssertionError("restored, the prompt is answered with other tokens")


@contextmanager
def _core(load: Load, model: BenchModel, folder: Path | None) -> Iterator[Core]:
    clean()
    core = Core(
        model.model,
        model.tokenizer,
        memory_limit=int(MEMORY_SHARE * psutil.virtual_memory().total),
        max_batch_size=1,
        block_size=load.engine.block_size or model.block_size,
        prefill_chunk=load.engine.prefill_chunk,
        ssd_cache_dir=folder,
    )
    try:
        if core.cold is not None and not core.cold.tier.flush(FLUSH_SECONDS):
            raise AssertionError("the folder was not opened in time")
        yield core
    finally:
        core.close()


def _ask(core: Core, prompt: Sequence[int], count: int) -> tuple[float, list[int], list[float]]:
    """Return the seconds to the first token, the tokens, and the seconds of those after it."""
    request = Request(prompt=tuple(prompt), max_tokens=count + 1, ignore_eos=True)
    began = before = time.perf_counter()
    handle = core.submit(request)
    first, tokens, steps = 0.0, list[int](), list[float]()
    while len(tokens) < count + 1:
        core.step()
        found = [event.token for event in handle.events() if isinstance(event, Token)]
        now = time.perf_counter()
        if found and tokens:
            steps.append(now - before)
        elif found:
            first = now - began
        tokens += found
        before = now if found else before
    return first, tokens, steps


def _prepare(paths: Sequence[Path], files: str) -> None:
    """Have the system forget files, where it can be told to, or read them."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            if files == "memory":
                file.readall()
            elif hasattr(os, "posix_fadvise"):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_read(paths: Sequence[Path]) -> float:
    began = time.perf_counter()
    for path in paths:
        path.read_bytes()
    return time.perf_counter() - began


def report(load: Load, model: BenchModel, rounds: Sequence[Round], rival_seconds: float) -> Report:
    """Judge the first token against computing the prompt, and the bytes against a plain read."""

    def middle(name: str, files: str | None = None) -> float:
        values = [getattr(each, name) for each in rounds]
        return float(
            statistics.median(value if files is None else value[files] for value in values)
        )

    def share(files: str) -> float:
        return statistics.median(
            each.bandwidth(files) * each.plain_seconds[files] / each.file_bytes for each in rounds
        )

    first = {files: middle("restored_seconds", files) for files in FILES}
    rival = {files: middle("rival_restored_seconds", files) for files in FILES}
    quicker = min(middle("prefill_seconds") / seconds for seconds in first.values())
    shares = {files: share(files) for files in FILES}
    writing = statistics.median(
        each.decode_seconds / each.written_decode_seconds for each in rounds
    )
    peak = middle("peak_bytes") / middle("restored_bytes")
    served = load.known_tokens + load.decode_tokens
    ours: dict[str, Any] = {
        "prefill_seconds": round(middle("prefill_seconds"), 3),
        "first_token_seconds": {files: round(first[files], 4) for files in FILES},
        "first_token_over_prefill": round(quicker, 1),
        "bandwidth_share": {files: round(shares[files], 3) for files in FILES},
        "decode_speed_while_writing": round(writing, 4),
        "prefill_speed_while_writing": round(
            statistics.median(
                each.prefill_seconds / each.written_prefill_seconds for each in rounds
            ),
            4,
        ),
        "peak_over_restored": round(peak, 3),
        "written_bytes_per_token": round(middle("written_bytes") / served),
        "restored_bytes": round(middle("restored_bytes")),
    }
    theirs: dict[str, Any] = {
        "prefill_seconds": round(rival_seconds, 3),
        "first_token_seconds": {files: round(rival[files], 4) for files in FILES},
        "peak_bytes": round(middle("rival_peak_bytes")),
    }
    lines = [
        Line(
            f"prefill of {load.known_tokens:,} tokens, s",
            f"{ours['prefill_seconds']:.2f}",
            f"{theirs['prefill_seconds']:.2f}",
        ),
        *(
            Line(
                f"first token after a restart, files in {files}, ms",
                f"{1e3 * first[files]:.0f}",
                f"{1e3 * rival[files]:.0f}",
            )
            for files in FILES
        ),
        Line(
            "quicker than our own prefill",
            f"{quicker:.1f}x",
            "",
            f">= {GOALS['first_token']:g}x",
            quicker >= GOALS["first_token"],
        ),
        *(
            Line(
                f"of a plain read's bytes/s, files in {files}",
                f"{100 * shares[files]:.0f} %",
                "",
                f">= {100 * GOALS['bandwidth']:g} %",
                shares[files] >= GOALS["bandwidth"],
            )
            for files in FILES
        ),
        Line(
            "decode speed while blocks are written",
            f"{100 * writing:.1f} %",
            "",
            f">= {100 * GOALS['writing']:g} %",
            writing >= GOALS["writing"],
        ),
        Line(
            "peak of a restore, of the bytes restored",
            f"{peak:.2f}",
            "",
            f"<= {GOALS['peak_memory']:g}",
            peak <= GOALS["peak_memory"],
        ),
        Line("peak", size(middle("peak_bytes")), size(theirs["peak_bytes"])),
        Line("bytes written per token served", f"{ours['written_bytes_per_token']:,}", ""),
    ]
    return Report(
        name="restore",
        claim=CLAIM,
        rival=RIVAL,
        penstock=ours,
        rival_figures=theirs,
        ratio={
            "first_token": round(min(rival[files] / first[files] for files in FILES), 3),
            "prefill_speed": round(theirs["prefill_seconds"] / ours["prefill_seconds"], 3),
            "peak_memory": round(theirs["peak_bytes"] / middle("peak_bytes"), 3),
        },
        goal=GOALS,
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "runs": [asdict(each) for each in rounds],
        },
        dtype=model.dtype,
    )
