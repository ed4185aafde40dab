"""Run a family of mlx-lm on the engine: how its KV is read, and whether its text matches.

For each, against a plain mlx-lm loop on a tiny random model in float32: cold, warm from memory, the
next turn, warm after a restart, in a batch with joins, and past a window.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import tiny_families
from cold_engine import SOON, running, settle
from core_parts import way_of, why_of
from mlx_lm.models import cache as theirs
from tiny_families import Unbuildable, plain_greedy, prompt_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.offload import engine_tier as tier_module
from penstock.engine.request import Request, Sampling
from penstock.engine.schedule import restoring as restoring_module
from penstock.errors import ModelError
from penstock.models import mlx_lm as seam

PAGE = Path(__file__).parents[2] / "benchmarks" / "notes" / "families.md"
BLOCK = 16
ANSWER = 6
LOGITS_OFF = 1e-4
"""Largest difference of a token's log-probability from a plain loop's, as a share of the largest
logit."""
WINDOW = 32
"""Without a `keep`: beside one, the rings of mlx-lm misplace the windows of masks."""
SMALL: dict[str, Any] = {
    "memory_limit": "400MB",
    "block_size": BLOCK,
    "prefill_chunk": 32,
    "max_batch_size": 4,
}
STEPWISE = {"plamo3": "its masks see one token more than its ring holds"}
"""Families whose text in mlx-lm depends on how a prompt is cut, and why: the engine's is that of
a loop that reads token by token."""
WHOLE = {"phi3small": "its masks are added, and hide nothing of a chunk"}
"""The same, but its text is that of mlx-lm's generate: all of a prompt but its last token at once,
and nothing is shared."""

ANEW = {"deepseek_v4": "rows that it pools behind a cut lack the tokens in front of it"}
"""The same, but its text is that of a loop which reads the whole text anew for each token."""
TURNED = {"inkling": "its masks count columns, which a ring turns"}
"""Families that cannot be compared past a window, and why."""

UNSTEADY = {"kimi_k3": 4e-4, "hrm_text": 4e-3}
"""Families whose logits differ by more, and how much: in their library, too, by where a prompt is
cut."""


class Differs(AssertionError):
    """The engine's text differs from a plain loop's."""


@dataclass(frozen=True)
class Row:
    """Results of a family, or in `why` the reason that there are none."""

    family: str
    layers: str = ""
    way: str = ""
    """`shared`, `indexed`, `latent`, `joined`, or `-` where there is no attention."""
    reuse: str = ""
    why: str = ""

    def line(self) -> str:
        """Return the row as a Markdown table line."""
        cells = (self.family, self.layers, self.way, self.reuse, self.why)
        return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class Zoo:
    """A library of model classes."""

    name: str
    build: Callable[[str], Any]
    """Makes a tiny random model of a family, or raises `Unbuildable`."""
    caches: Any
    """Module with the classes of its caches."""

    def documented(self) -> dict[str, str]:
        """Return the lines of its table in benchmarks/notes/families.md, by family."""
        page = PAGE.read_text().partition(f"<!-- families of {self.name} -->")[2]
        table = page.partition("<!-- end of families -->")[0].partition("|---")[2]
        lines = [line for line in table.splitlines() if line.startswith("| ")]
        return {line.split("|")[1].strip(): line for line in lines}

    def representatives(self) -> set[str]:
        """Return a family for each combination of layers, KV reading and reuse."""
        found: dict[tuple[str, ...], str] = {}
        for family, line in self.documented().items():
            _, _, layers, way, reuse, *_ = (cell.strip() for cell in line.split("|"))
            kinds = (
                kind for kind in ("full", "window", "recurrent", "compressed") if kind in layers
            )
            found.setdefault((way, reuse, *kinds), family)
        return set(found.values())

    def reuse_share(self) -> float:
        """Return the share of families with prefix reuse among those that run here."""
        reuse = [line.split("|")[4].strip() for line in self.documented().values()]
        run = [each for each in reuse if each != "not run"]
        return sum(each in ("yes", "walk-back") for each in run) / len(run)


MLX_LM = Zoo("mlx-lm", tiny_families.build, theirs)


def examine(family: str, zoo: Zoo = MLX_LM, *, whole: bool = True) -> Row:
    """Run a family on the engine; `whole` also over a restart and past a window.

    Raises:
        Differs: it does not say what a plain loop says.
    """
    try:
        model = zoo.build(family)
    except Unbuildable as error:
        why = f"{zoo.name} cannot run it here: {_short(error.why)}"
        return Row(family, reuse="not run", why=why)
    with tiny_families.uncompiled():
        try:
            core = Core(model, **SMALL)
        except ModelError as error:
            return Row(family, _layers(model), reuse="none", why=_short(str(error)))
        try:
            _check_texts(family, model, core)
        finally:
            core.close()
        if whole:
            _check_restart(family, model)
        turned = family in TURNED or any(map(_picks_columns, seam.plain_caches(model)))
        if whole and not turned:
            _check_window(family, model, zoo)
    way = way_of(core) if core.runner.attention_windows else "-"
    walks = core.runner.is_recurrent
    why = "goes on where states were kept" if walks else ""
    if way == "joined":
        why = "; ".join(filter(None, [_reason(why_of(core)), why]))
    if family in STEPWISE:
        why = "; ".join(filter(None, [why, f"as read token by token: {STEPWISE[family]}"]))
    if family in WHOLE:
        why = "; ".join(filter(None, [why, f"as mlx-lm cuts a prompt: {WHOLE[family]}"]))
    if family in ANEW:
        why = "; ".join(filter(None, [why, f"as read anew for each token: {ANEW[family]}"]))
    reuse = "none" if core.runner.fitness.whole else "walk-back" if walks else "yes"
    return Row(family, _layers(model), way, reuse, why)


def examine_window(family: str, window: int, places: int) -> None:
    """Run a family with windows, or chunks of attention, of so many tokens on the engine.

    Raises:
        Differs: it does not say what a plain loop says.
    """
    model = tiny_families.build(family, window=window)
    _said.clear()  # by another window
    with tiny_families.uncompiled():
        core = Core(model, **{**SMALL, "max_batch_size": places})
        try:
            _check_texts(family, model, core)
        finally:
            core.close()
    _said.clear()


def _check_texts(family: str, model: Any, core: Core) -> None:
    prompt = prompt_of(70, seed=1)
    said = _check(family, model, "cold", _ask(core, prompt))
    warm = _ask(core, prompt)
    _check(family, model, "warm", warm)
    turn = _ask(core, [*prompt, *said, *prompt_of(5, seed=2)])
    _check(family, model, "the next turn", turn)
    for handle in (warm, turn):
        if _cached(handle) < 64 and family not in WHOLE:
            raise Differs(f"{family}: {_cached(handle)} tokens of a known prompt were found")
    handles = [_submit(core, each) for each in (prompt[:30], prompt_of(20, seed=3), prompt[:1])]
    core.step()
    core.step()
    handles.append(_submit(core, prompt[:50]))  # joins those that run
    _drain(core)
    for handle in handles:
        _check(family, model, "in a batch", handle)


def _check_restart(family: str, model: Any) -> None:
    prompt = prompt_of(70, seed=1)
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory())
        # Others use the machine as well: nobody computes what takes long to be read.
        held.enter_context(patch.object(tier_module, "LEAST_PATIENCE_SECONDS", SOON))
        held.enter_context(patch.object(restoring_module, "ASK_SECONDS", SOON))
        for found in (0, 64):
            with running(Path(folder), model=model, **SMALL) as core:
                handle = _submit(core, prompt)
                settle(core)
                _check(family, model, "after a restart", handle)
                if core.view.stats().restored_tokens != (0 if family in WHOLE else found):
                    raise Differs(f"{family}: {core.view.stats().restored_tokens} tokens restored")


def _check_window(family: str, model: Any, zoo: Zoo) -> None:
    """Past `max_kv_size` a loop on the zoo's rings that reads token by token says the same; of a
    family that can drop nothing, a loop without rings."""
    prompt = prompt_of(50, seed=4)
    core = Core(model, **{**SMALL, "max_kv_size": WINDOW, "keep": 0})
    try:
        handle = _ask(core, prompt)
    finally:
        core.close()
    if family in WHOLE or not seam.layout(model).drops:
        _check(family, model, "past a window", handle)
        return
    caches = [_bounded(cache, zoo.caches) for cache in seam.plain_caches(model)]
    _compare(family, "past a window", handle, _loop(model, prompt, caches))


def _picks_columns(cache: Any) -> bool:
    """Tell whether a layer's keys have a second cache to be picked by: in a ring that is turned,
    mlx-lm picks others."""
    inner = getattr(cache, "caches", ())
    return sum(hasattr(each, "update_and_fetch") for each in inner) > 1


def _bounded(cache: Any, kinds: Any) -> Any:
    if isinstance(cache, kinds.CacheList):
        return kinds.CacheList(*(_bounded(inner, kinds) for inner in cache.caches))
    if type(cache) is kinds.KVCache:
        return kinds.RotatingKVCache(WINDOW)
    return cache


def _loop(model: Any, prompt: Sequence[int], caches: list[Any]) -> tuple[list[int], mx.array]:
    tokens, found = list(prompt), []
    for at in range(len(prompt) + ANSWER - 1):
        logits = model(mx.array([[tokens[at]]]), cache=caches)[0, -1]
        mx.eval(logits)
        if at >= len(prompt) - 1:
            found.append(logits)
            tokens.append(int(mx.argmax(logits).item()))
    return tokens[len(prompt) :], mx.stack(found)


def _check(family: str, model: Any, what: str, handle: Handle) -> list[int]:
    """Compare an answer with the plain loop's, and return it."""
    return _compare(family, what, handle, _plain(family, model, handle.request.prompt))


_said: dict[tuple[str, tuple[int, ...]], tuple[list[int], mx.array]] = {}


def _plain(family: str, model: Any, prompt: tuple[int, ...]) -> tuple[list[int], mx.array]:
    """Return the cached text of a plain loop."""
    if (family, prompt) not in _said and family.partition(",")[0] in ANEW:
        _said[family, prompt] = tiny_families.anew_greedy(model, prompt, ANSWER)
    if (family, prompt) not in _said:
        cuts: Sequence[int] = range(1, len(prompt)) if family in STEPWISE else ()
        if family in WHOLE and len(prompt) > 1:
            cuts = (len(prompt) - 1,)
        _said[family, prompt] = plain_greedy(model, prompt, ANSWER, cuts=cuts)
    return _said[family, prompt]


def _compare(
    family: str, what: str, handle: Handle, plain: tuple[list[int], mx.array]
) -> list[int]:
    (choice,) = handle.result(timeout_seconds=0)
    tokens, logits = plain
    if choice.tokens != tokens:
        raise Differs(f"{family}, {what}: {choice.tokens}, not {tokens}")
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for place, (ours, token) in enumerate(zip(choice.logprobs, tokens, strict=True)):
        off = abs((ours.logprob or 0.0) - float(logprobs[place, token].item()))
        most = UNSTEADY.get(family, LOGITS_OFF) * float(mx.abs(logits[place]).max().item())
        if not off <= most:
            raise Differs(f"{family}, {what}: log-probability {place} is off by {off:.2g}")
    return tokens


def _submit(core: Core, prompt: Sequence[int]) -> Handle:
    sampling = Sampling(logprobs=True)
    return core.submit(Request(prompt=tuple(prompt), max_tokens=ANSWER, sampling=sampling))


def _ask(core: Core, prompt: Sequence[int]) -> Handle:
    handle = _submit(core, prompt)
    _drain(core)
    return handle


def _drain(core: Core) -> None:
    while core.step():
        pass
    core.view.check()


def _cached(handle: Handle) -> int:
    finish = handle.result(timeout_seconds=0)[0].finish
    assert finish is not None
    return finish.usage.cached_tokens


def _layers(model: Any) -> str:
    """Return the number of layers of each kind."""
    try:
        layout = seam.layout(model)
    except ModelError:
        return "of its own kind"
    kinds = Counter(
        "compressed"
        if number in layout.rows
        else "full"
        if attention_window.window is None
        else "window"
        for number, attention_window in enumerate(layout.attention_windows)
    )
    kinds["recurrent"] = len(layout.state_sizes)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


REASONS = {
    "does not go through": "an attention of its own",
    "it needs joined": "computes with masks",
    "makes its own masks": "makes its own masks",
    "changes keys or values": "changes keys or values after they are cached",
    "compress": "compresses what it keeps",
}


def _reason(why: str) -> str:
    """Return a short reason for joined KV."""
    return next((short for part, short in REASONS.items() if part in why), "reads its caches")


def _short(text: str) -> str:
    """Return what is wrong without what to do, and of two ways the last one."""
    return text.partition("; use")[0].rpartition("joined, ")[2].replace("|", "/").partition("\n")[0]
