"""`penstock bench restore`: cached prompts are restored from disk after a restart."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import psutil

from penstock.engine.core import Core
from penstock.engine.request import Request, Token
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock_bench.comparison import size
from penstock_bench.engine_runs import clean
from penstock_bench.engine_sides import MEMORY_SHARE, RIVAL, EngineShape
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Solo

CLAIM = "After a restart a known prompt is read from the disk, not computed"

GOALS = {"first_token": 20.0, "bandwidth": 0.8, "writing": 0.97, "peak_memory": 1.1}
"""Goals, as ratios by name.

`first_token`: speedup over computing the prompt. `bandwidth`: share of the speed of a plain read.
`writing`: share of the decode speed without a disk. `peak_memory`: over the restored bytes.
"""
FLUSH_SECONDS = 120.0
FILES = ("disk", "memory")
"""Location of the files: only on disk, or also in the page cache after a read."""


def _by_files() -> dict[str, list[float]]:
    return {files: [] for files in FILES}


@dataclass(frozen=True, slots=True)
class RestoreLoad:
    """Sizes in tokens."""

    model: ModelChoice = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    known_tokens: int = 8_192
    decode_tokens: int = 128
    """Tokens generated while the prompt's blocks are written in the background."""
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5
    restarts: int = 9
    """Restarts per round and location, each next to a plain read."""


@dataclass(slots=True)
class Round:
    """Figures of one round, one side after the other. Seconds, bytes of KV or of files."""

    prefill_seconds: float = 0.0
    """Seconds to the first token, nothing cached."""
    decode_seconds: float = 0.0
    """Seconds of the `decode_tokens` after the first one."""
    written_prefill_seconds: float = 0.0
    """Seconds to the first token with a disk tier, nothing cached."""
    written_decode_seconds: float = 0.0
    written_bytes: int = 0
    restored_seconds: dict[str, list[float]] = field(default_factory=_by_files)
    """Seconds to the first token after each restart, by location of the files."""
    step_seconds: float = 0.0
    """Median seconds of a decode step at that length."""
    restored_bytes: int = 0
    file_bytes: int = 0
    peak_bytes: int = 0
    """Peak bytes until the first token, above the bytes before the request."""
    plain_seconds: dict[str, list[float]] = field(default_factory=_by_files)
    """Seconds to read the same files sequentially, by location."""
    rival_restored_seconds: dict[str, list[float]] = field(default_factory=_by_files)
    """Seconds until mlx-lm has loaded its prompt file and generated a token, by location."""
    rival_peak_bytes: int = 0
    tokens: list[int] = field(default_factory=list, repr=False)

    def bandwidth_shares(self, files: str) -> list[float]:
        """Return our read bandwidth over the plain read's, for each restart.

        The time of a decode step is subtracted.
        """
        return [
            plain / (restored - self.step_seconds)
            for plain, restored in zip(
                self.plain_seconds[files], self.restored_seconds[files], strict=True
            )
        ]


def measure(load: RestoreLoad) -> Report:
    """Compute, write, restart and restore repeatedly, with a new folder in each round.

    Raises:
        SettingError: the prompt is so short that the engine computes it instead.
    """
    model = bench_model(load.model, load.llama)
    prompt = model.prompt(load.known_tokens + 1, seed=0)
    with TemporaryDirectory(prefix="penstock-bench-") as name:
        file = Path(name) / "rival.safetensors"
        rival_seconds = _rival_file(model, prompt, file)
        rounds = [_round(load, model, prompt, file) for _ in range(load.rounds)]
    for round_ in rounds:
        _check(rounds[0].tokens, round_.tokens)
        if not round_.restored_bytes:
            raise SettingError(
                f"--tokens {load.known_tokens}: so many are sooner computed than read, and were "
                f"not restored; ask for more"
            )
    return report(load, model, rounds, rival_seconds)


def _round(load: RestoreLoad, model: BenchModel, prompt: Sequence[int], rival_file: Path) -> Round:
    round_ = Round()
    with TemporaryDirectory(prefix="ours-", dir=rival_file.parent) as name:
        folder = Path(name)
        with _core(load, model, None) as core:
            round_.prefill_seconds, round_.tokens, steps = _ask(core, prompt, load.decode_tokens)
            round_.decode_seconds, round_.step_seconds = sum(steps), statistics.median(steps)
        with _core(load, model, folder) as core:
            seconds, tokens, steps = _ask(core, prompt, load.decode_tokens)
            round_.written_prefill_seconds, round_.written_decode_seconds = seconds, sum(steps)
            _check(round_.tokens, tokens)
        ours = sorted(folder.rglob("*.safetensors"))
        round_.written_bytes = sum(path.stat().st_size for path in ours)
        _plain_read(ours)  # storage below the system may have a cache too: the same for all
        for files in FILES:
            for number in range(load.restarts):
                if number % 2:
                    _read_plainly(round_, ours, files)
                _prepare(ours, files)
                _restart(round_, load, model, prompt, folder, files)
                if not number % 2:
                    _read_plainly(round_, ours, files)
    _rival_round(round_, model, prompt, rival_file, load)
    return round_


def _restart(
    round_: Round,
    load: RestoreLoad,
    model: BenchModel,
    prompt: Sequence[int],
    folder: Path,
    files: str,
) -> None:
    """Submit the prompt to a new engine on the folder."""
    with _core(load, model, folder) as core:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        seconds, tokens, _ = _ask(core, prompt, 1)
        round_.peak_bytes = max(round_.peak_bytes, mx.get_peak_memory() - before)
        round_.restored_seconds[files].append(seconds)
        stats = core.view.stats()
        round_.restored_bytes = round(stats.restored_tokens * core.view.coded_token_bytes)
        round_.file_bytes = stats.tiers["disk"].counts.read_bytes
    if load.engine.exact:
        _check(round_.tokens, tokens)


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


def _rival_round(
    round_: Round, model: BenchModel, prompt: Sequence[int], file: Path, load: RestoreLoad
) -> None:
    """Load the prompt saved by mlx-lm, as after a restart."""
    for files in [place for place in FILES for _ in range(load.restarts)]:
        _prepare([file], files)
        before = clean()
        mx.reset_peak_memory()
        side = Solo(model.model)
        began = time.perf_counter()
        side.load(prompt[:-1], file)
        first = _first(side, prompt)
        round_.rival_restored_seconds[files].append(time.perf_counter() - began)
        if load.engine.exact:
            _check(round_.tokens, [first])
        round_.rival_peak_bytes = mx.get_peak_memory() - before
        side.close()
        del side


def _first(side: Solo, prompt: Sequence[int]) -> int:
    side.submit([prompt], 1)
    return side.step()[0][1]


def _check(expected: Sequence[int], tokens: Sequence[int]) -> None:
    if list(expected[: len(tokens)]) != list(tokens):
        raise AssertionError("restored, the prompt is answered with other tokens")


@contextmanager
def _core(load: RestoreLoad, model: BenchModel, folder: Path | None) -> Iterator[Core]:
    clean()
    core = Core(
        model.model,
        model.tokenizer,
        memory_limit=int(MEMORY_SHARE * psutil.virtual_memory().total),
        max_batch_size=1,
        block_size=load.engine.block_size or model.block_size,
        prefill_chunk=load.engine.prefill_chunk,
        **load.engine.codec_settings,
        ssd_cache_dir=folder,
    )
    try:
        if not core.flush_tiers(FLUSH_SECONDS):
            raise AssertionError("the folder was not opened in time")
        yield core
    finally:
        core.close()


def _ask(core: Core, prompt: Sequence[int], count: int) -> tuple[float, list[int], list[float]]:
    """Return the seconds to the first token, all tokens, and the seconds of each later token."""
    request = Request(prompt=tuple(prompt), max_tokens=count + 1, ignore_eos=True)
    began = before = time.perf_counter()
    handle = core.submit(request)
    first, tokens, steps = 0.0, list[int](), list[float]()
    while len(tokens) < count + 1:
        core.step()
        new = [event.token for event in handle.events() if isinstance(event, Token)]
        now = time.perf_counter()
        if new and tokens:
            steps.append(now - before)
        elif new:
            first = now - began
        tokens += new
        before = now if new else before
    return first, tokens, steps


def _prepare(paths: Sequence[Path], files: str) -> None:
    """Drop files from the page cache, where the system supports it, or read them."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            if files == "memory":
                file.readall()
            elif hasattr(os, "posix_fadvise"):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_plainly(round_: Round, paths: Sequence[Path], files: str) -> None:
    _prepare(paths, files)
    round_.plain_seconds[files].append(_plain_read(paths))


def _plain_read(paths: Sequence[Path]) -> float:
    began = time.perf_counter()
    for path in paths:
        path.read_bytes()
    return time.perf_counter() - began


def report(
    load: RestoreLoad, model: BenchModel, rounds: Sequence[Round], rival_seconds: float
) -> Report:
    """Compare the first token with computing the prompt, and the bandwidth with a plain read."""
    ours = _our_figures(load, rounds)
    theirs: dict[str, Any] = {
        "prefill_seconds": round(rival_seconds, 3),
        "first_token_seconds": {
            files: round(_middle_of(round_.rival_restored_seconds[files] for round_ in rounds), 4)
            for files in FILES
        },
        "peak_bytes": round(statistics.median(round_.rival_peak_bytes for round_ in rounds)),
    }
    lines = _lines(load, ours, theirs)
    first, rival = ours["first_token_seconds"], theirs["first_token_seconds"]
    return Report(
        name="restore",
        claim=CLAIM,
        rival=RIVAL,
        penstock=ours,
        rival_figures=theirs,
        ratio={
            "first_token": round(min(rival[files] / first[files] for files in FILES), 3),
            "prefill_speed": round(theirs["prefill_seconds"] / ours["prefill_seconds"], 3),
            "peak_memory": round(theirs["peak_bytes"] / ours["peak_bytes"], 3),
        },
        goal=GOALS,
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "runs": [asdict(round_) for round_ in rounds],
        },
        dtype=model.dtype,
    )


def _middle_of(rounds: Iterable[Sequence[float]]) -> float:
    """Return the median of all restarts of all rounds."""
    return statistics.median(value for values in rounds for value in values)


def _our_figures(load: RestoreLoad, rounds: Sequence[Round]) -> dict[str, Any]:
    def middle(figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(round_) for round_ in rounds)

    first = {
        files: _middle_of(round_.restored_seconds[files] for round_ in rounds) for files in FILES
    }
    prefill = middle(lambda round_: round_.prefill_seconds)
    peak, restored = (
        middle(lambda round_: round_.peak_bytes),
        middle(lambda round_: round_.restored_bytes),
    )
    written = middle(lambda round_: round_.written_bytes)
    return {
        "prefill_seconds": round(prefill, 3),
        "first_token_seconds": {files: round(first[files], 4) for files in FILES},
        "first_token_over_prefill": round(prefill / max(first.values()), 1),
        "bandwidth_share": {
            files: round(_middle_of(round_.bandwidth_shares(files) for round_ in rounds), 3)
            for files in FILES
        },
        "decode_speed_while_writing": round(
            middle(lambda round_: round_.decode_seconds / round_.written_decode_seconds), 4
        ),
        "prefill_speed_while_writing": round(
            middle(lambda round_: round_.prefill_seconds / round_.written_prefill_seconds), 4
        ),
        "peak_bytes": round(peak),
        "peak_over_restored": round(peak / restored, 3),
        "written_bytes_per_token": round(written / (load.known_tokens + load.decode_tokens)),
        "restored_bytes": round(restored),
    }


def _lines(load: RestoreLoad, ours: dict[str, Any], theirs: dict[str, Any]) -> list[Line]:
    def at_least(label: str, value: float, goal: str, form: str) -> Line:
        aim = GOALS[goal]
        return Line(label, format(value, form), "", f">= {format(aim, form)}", value >= aim)

    first, rival = ours["first_token_seconds"], theirs["first_token_seconds"]
    shares, peak = ours["bandwidth_share"], ours["peak_over_restored"]
    return [
        Line(
            f"prefill of {counted(load.known_tokens, 'token')}, s",
            f"{ours['prefill_seconds']:.2f}",
            f"{theirs['prefill_seconds']:.2f}",
        ),
        *(
            Line(
                f"first token, files in {files}, ms",
                f"{1e3 * first[files]:.0f}",
                f"{1e3 * rival[files]:.0f}",
            )
            for files in FILES
        ),
        at_least(
            "times quicker than our own prefill",
            ours["first_token_over_prefill"],
            "first_token",
            ".1f",
        ),
        *(
            at_least(f"of a plain read's speed, in {files}", shares[files], "bandwidth", ".0%")
            for files in FILES
        ),
        at_least(
            "decode speed while writing",
            ours["decode_speed_while_writing"],
            "writing",
            ".1%",
        ),
        Line(
            "peak, of the bytes restored",
            f"{peak:.2f}",
            "",
            f"<= {GOALS['peak_memory']:g}",
            peak <= GOALS["peak_memory"],
        ),
        Line("peak", size(ours["peak_bytes"]), size(theirs["peak_bytes"])),
        Line("bytes written per token served", f"{ours['written_bytes_per_token']:,}", ""),
    ]
