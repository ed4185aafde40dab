"""`penstock eval`: recall, agreement and perplexity of a model with quantized KV.

    recall      questions about facts of a dialogue, answered by the engine: exact match
    agreement   greedy continuations by the engine: tokens before the first difference from raw KV
    perplexity, KL, top 1
                by teacher forcing: every block attends to the quantized blocks before it, and to
                itself unquantized, as a decode step does

In dialogues of the embedded model only the assistant's tokens count, since it was trained only on
them. Tokens stay in full precision only where a setting says so: a few hundred raw tokens at the
start would hide much of a codec's loss on a short text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from penstock.attention import devices
from penstock.engine.core import Core
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request
from penstock.engine.settings import checked
from penstock.errors import SettingError
from penstock.kv.codecs.names import parse_scheme
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.attention_error import (
    LayerError,
    WatchedLayer,
    layer_errors,
    mean_errors,
    watch,
)
from penstock_bench.eval_load import (
    CLAIM,
    CONTROL_CODEC,
    CONTROL_POINTS,
    GOAL_CODECS,
    GOAL_FORMS,
    GOAL_POINTS,
    RAW,
    UNCHANGED,
    EvalLoad,
    KVSetting,
)
from penstock_bench.eval_texts import AskedDialogue, EvalPiece, EvalTask
from penstock_bench.forcing import Forced, Way, force, passes
from penstock_bench.key_forms import KeyForm
from penstock_bench.report import Line, Notify, Report
from penstock_bench.window_recall import SCALE, Share

WATCHED_PIECES = 4
"""Number of first pieces on which the layers' attention is compared."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of n values, with its standard error."""

    n: int
    mean: float
    standard_error: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Estimate:
        """Average over all values of one or more groups.

        The error is the larger one of assuming independent values and independent groups.
        """
        values = [value for group in groups for value in group]
        n = len(values)
        mean = math.fsum(values) / n
        alone = math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1) / n
        sums = [math.fsum(value - mean for value in group) for group in groups]
        together = math.fsum(s * s for s in sums) * len(groups) / max(1, len(groups) - 1) / n**2
        return cls(n, mean, math.sqrt(max(alone, together if len(groups) > 1 else 0.0)))

    @classmethod
    def of_shares(cls, groups: Sequence[Sequence[float]]) -> Estimate:
        """Average values of -1, 0 or 1, as `of` does.

        If all are equal, the error is computed as if half a value differed.
        """
        plain = cls.of(groups)
        others = Share(plain.n, sum(value != 0 for group in groups for value in group))
        least = others.standard_error or 0.0
        return cls(plain.n, plain.mean, max(plain.standard_error, least))


@dataclass(slots=True)
class EvalRow:
    """One setting on one form. Bytes per token count the quantized KV of all layers."""

    form: KeyForm
    setting: KVSetting
    max_kv_size: int
    keep: int
    bytes_per_token: float = math.nan
    bits: float = math.nan
    """Bits per value, everything included."""
    ratio: float = math.nan
    """Bytes of raw KV in the model's dtype over `bytes_per_token`."""
    recall: dict[int | str, Estimate] = field(default_factory=dict)
    """Share of right answers, by length of the dialogue, or by task and length."""
    recall_over_raw: dict[int | str, Estimate] = field(default_factory=dict)
    """Share of right answers minus that with raw KV, on the same questions."""
    perplexity: Estimate | None = None
    kl: Estimate | None = None
    """KL divergence of the next token's distribution from raw KV's, in nats."""
    top_1: Estimate | None = None
    """Share of positions with the same most likely next token as raw KV."""
    agreement: Estimate | None = None
    """Share of tokens before the first difference from raw KV; None without continuations."""
    layers: list[LayerError | None] = field(default_factory=list)
    """Attention error of each layer by the codec, on the first pieces of the text.

    None for layers that do not see a whole piece. Empty with a window, and for a model that
    implements attention itself.
    """

    @property
    def name(self) -> str:
        return f"{self.form}: {self.setting}"

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "setting": str(self.setting), "codec": self.setting.codec}


@dataclass(slots=True)
class Progress:
    """Counter of finished steps, reported by `notify(description, done, total)`."""

    notify: Notify
    of: int = 0
    done: int = 0

    def step(self, what: str) -> None:
        """Count one step."""
        self.notify(what, self.done, self.of)
        self.done += 1


# ---- the engine


def drain(core: Core) -> None:
    """Step until all requests have ended."""
    while core.step():
        pass


def answers(core: Core, dialogue: AskedDialogue) -> list[float]:
    """Prefill a dialogue, ask all questions at once, and return the scores, 0 to 1."""
    core.submit(Request(prompt=dialogue.context, max_tokens=1))
    drain(core)  # now all of it is coded that will be
    handles = [
        core.submit(Request(prompt=prompt, max_tokens=dialogue.answer_tokens))
        for prompt in dialogue.prompts
    ]
    drain(core)
    texts = [handle.result(0.0)[0].text for handle in handles]
    return [dialogue.score(number, text) for number, text in enumerate(texts)]


def continued(core: Core, load_: EvalLoad, piece: EvalPiece) -> list[list[int]]:
    """Return the greedy continuations of a piece from several positions."""
    if not load_.prompts:
        return []
    core.submit(Request(prompt=piece.tokens, max_tokens=1))
    drain(core)
    handles = [
        core.submit(Request(prompt=piece.tokens[:end], max_tokens=load_.continued_tokens))
        for end in piece.ends(load_.prompts)
    ]
    drain(core)
    return [list(handle.result(0.0)[0].tokens) for handle in handles]


def alike(tokens: Sequence[int], expected: Sequence[int]) -> float:
    """Return the number of equal first tokens over the longer length."""
    if list(tokens) == list(expected):  # also of two that end at once
        return 1.0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=False))
    return sum(1 for _ in same) / max(1, len(tokens), len(expected))


@dataclass(slots=True)
class EngineAnswers:
    """Answers of the engine in one setting: by length and dialogue, by piece."""

    right: dict[int | str, list[list[float]]]
    continued: list[list[list[int]]]


def serve(
    task: EvalTask, load_: EvalLoad, setting: KVSetting, step: Callable[[], None]
) -> EngineAnswers:
    """Answer and continue everything on one engine; `step` is called before each."""
    if not (task.questions or load_.prompts):
        return EngineAnswers({}, [[] for _ in task.text])
    core = Core(task.model, task.tokenizer, **load_.engine(setting))
    try:
        right: dict[int | str, list[list[float]]] = {}
        for length, conversations in task.questions.items():
            right[length] = []
            for conversation in conversations:
                step()
                right[length].append(answers(core, conversation))
        continuations = []
        for piece in task.text:
            step()
            continuations.append(continued(core, load_, piece))
        return EngineAnswers(right, continuations)
    finally:
        core.close()


# ---- all of it


def measure(load_: EvalLoad, notify: Notify = lambda *_: None) -> Report:
    """Measure all settings on all forms.

    Args:
        load_: the settings, and the size of the measurement.
        notify: takes a description, the completed steps, and the total.

    Raises:
        ModelError: the engine cannot run the model, or it has no other forms.
        SettingError: a codec is unknown or does not fit the heads or blocks, a window is out of
            range, or the text is too short.
    """
    settings = list(dict.fromkeys((UNCHANGED, *load_.settings)))
    for setting in settings:
        _check(setting, load_)
    forms = list(dict.fromkeys(load_.forms))
    if load_.windows_once and all(setting.max_kv_size is not None for setting in load_.settings):
        forms = forms[:1]
    measured: list[tuple[EvalRow, dict[str, Any]]] = []
    progress = Progress(notify)
    dtype = ""
    for number, form in enumerate(forms):
        task = EvalTask.of(load_, form)
        if number and load_.windows_once:
            settings = [setting for setting in settings if setting.max_kv_size is None]
        steps = task.steps(
            len(settings),
            sum(len(passes(piece, load_.block_size)) for piece in task.text),
            continues=load_.prompts > 0,
        )
        progress.of = progress.done + (len(forms) - number) * steps
        ways = [_way(task.model, setting, load_) for setting in settings]
        measured += _on_form(task, load_, ways, progress)
        dtype = str(ways[0].runner.shapes[0].dtype).rpartition(".")[2]
    return report(load_, [row for row, _ in measured], [raw for _, raw in measured], dtype)


def _on_form(
    task: EvalTask, load_: EvalLoad, ways: Sequence[Way], progress: Progress
) -> list[tuple[EvalRow, dict[str, Any]]]:
    """Measure all settings, raw KV first; return the rows, each with its raw figures."""

    def stepper(what: object) -> Callable[[], None]:
        return lambda: progress.step(f"{task.form}: {what}")

    served = [serve(task, load_, way.setting, stepper(way.setting)) for way in ways]
    forced = force(ways, task.text, load_.block_size, stepper("reading the text"))
    watched = [
        watch(ways[0].runner, piece.tokens, load_.block_size)
        for piece in task.text[:WATCHED_PIECES]
    ]
    measured = []
    for way, answered, figures in zip(ways, served, forced, strict=True):
        row = EvalRow(task.form, way.setting, way.limits.max_kv_size, way.limits.keep_tokens)
        _sizes(row, figures, way.runner)
        _text(row, figures)
        _layers(row, watched, way)
        _answers(row, answered, served[0])
        kept = {
            "losses": _sums(figures.losses),
            "kl": _sums(figures.kl),
            "same": _sums(figures.same),
        }
        right = _right(answered)
        measured.append((row, {"row": row.name, "right": right, **kept}))
    return measured


def _way(model: Any, setting: KVSetting, load_: EvalLoad) -> Way:
    limits = checked(load_.engine(setting))
    runner = Runner(
        model, devices.current(), max_kv_size=limits.max_kv_size, keep=limits.keep_tokens
    )
    for shape in runner.shapes:
        try:
            setting.scheme.token_bits(shape.key_dim, shape.value_dim, 8 * shape.dtype.size)
        except ValueError as error:
            raise SettingError(f"--codec {setting.codec}: {error}") from None
    return Way(setting, runner, limits, setting.scheme.scaled(runner.key_scales))


def _check(setting: KVSetting, load_: EvalLoad) -> None:
    try:
        scheme = setting.scheme
    except ValueError as error:
        raise SettingError(f"--codec: {error}") from None
    checked(load_.engine(setting))
    for codec in (scheme.keys, scheme.values):
        if codec is not None and load_.block_size % codec.span:
            raise SettingError(
                f"--codec {setting.codec}: {codec.name} encodes {codec.span} tokens together, "
                f"which do not divide blocks of {load_.block_size}"
            )


# ---- figures


def _sizes(row: EvalRow, figures: Forced, runner: Runner) -> None:
    numbers = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in runner.shapes)
    row.bytes_per_token = figures.nbytes / figures.tokens if figures.tokens else runner.token_bytes
    row.bits = round(8 * row.bytes_per_token / numbers, 3)
    row.ratio = round(runner.token_bytes / row.bytes_per_token, 3)


def _text(row: EvalRow, figures: Forced) -> None:
    losses = Estimate.of(figures.losses)
    perplexity = math.exp(losses.mean)
    row.perplexity = Estimate(losses.n, perplexity, perplexity * losses.standard_error)
    row.kl = Estimate.of(figures.kl)
    row.top_1 = Estimate.of_shares(figures.same)


def _answers(row: EvalRow, answered: EngineAnswers, raw: EngineAnswers) -> None:
    for length, groups in answered.right.items():
        row.recall[length] = Estimate.of_shares(groups)
        row.recall_over_raw[length] = Estimate.of_shares(
            [
                [a - b for a, b in zip(ours, theirs, strict=True)]
                for ours, theirs in zip(groups, raw.right[length], strict=True)
            ]
        )
    agreement = [
        [alike(a, b) for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(answered.continued, raw.continued, strict=True)
    ]
    row.agreement = Estimate.of(agreement) if any(agreement) else None


def _layers(row: EvalRow, watched: Sequence[Sequence[WatchedLayer | None]], way: Way) -> None:
    if way.setting.max_kv_size is None:
        row.layers = mean_errors([layer_errors(layers, way.scheme) for layers in watched])


def _sums(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return count and sum for each piece."""
    return [[len(group), round(math.fsum(group), 6)] for group in groups]


def _right(answered: EngineAnswers) -> dict[str, list[list[float]]]:
    """Return the number of questions and of right answers for each dialogue, by length."""
    return {
        str(length): [[len(group), math.fsum(group)] for group in groups]
        for length, groups in answered.right.items()
    }


def report(
    load_: EvalLoad, rows: Sequence[EvalRow], raw: Sequence[dict[str, Any]], dtype: str
) -> Report:
    """Format the rows and judge recall."""
    lines = [line for row in rows for line in judged(row, rows)]
    goals = {
        "most_points_below_raw": GOAL_POINTS,
        "of": [*GOAL_CODECS],
        "forms": [*GOAL_FORMS],
        "control_points_below_raw": CONTROL_POINTS,
    }
    described = load_.model_dump(mode="json") | {
        "model": "embedded" if load_.model == str(MODEL_PATH) else Path(load_.model).name,
        "texts": f"{len(load_.texts)} files" if load_.texts else "own",
    }
    return Report(
        name="eval",
        claim=CLAIM,
        rival=RAW,
        penstock={"rows": [row.as_object() for row in rows], "baseline": dtype},
        rival_figures={row.form: row.as_object() for row in rows if row.setting == UNCHANGED},
        ratio={str(row.setting): row.ratio for row in rows},
        goal=goals,
        met=all(line.met for line in lines),
        lines=lines,
        raw={"load": described, "rows": list(raw)},
        dtype=dtype,
    )


def judged(row: EvalRow, rows: Sequence[EvalRow]) -> Iterator[Line]:
    """Yield the goals of a row: no loss, or for controls a visible loss."""
    (raw,) = (other for other in rows if other.setting == UNCHANGED and other.form == row.form)
    setting = row.setting
    recall = {length: share for length, share in row.recall.items() if isinstance(length, int)}
    if setting != KVSetting(setting.codec) or not recall:
        return
    name = setting.scheme.name
    if name in {parse_scheme(codec).name for codec in GOAL_CODECS} and row.form in GOAL_FORMS:
        for length, share in recall.items():
            yield Line(
                f"{row.name}, {counted(length, 'token')}",
                _percent(share.mean),
                _percent(raw.recall[length].mean),
                f">= raw - {GOAL_POINTS}",
                SCALE * row.recall_over_raw[length].mean >= -GOAL_POINTS,
            )
    if name == CONTROL_CODEC and row.form is KeyForm.OUTLIERS:
        best = max(recall, key=lambda length: row.recall_over_raw[length].mean)
        yield Line(
            f"{row.name}, at its best: is it seen?",
            _percent(row.recall[best].mean),
            _percent(raw.recall[best].mean),
            f"<= raw - {CONTROL_POINTS:.0f}",
            SCALE * row.recall_over_raw[best].mean <= -CONTROL_POINTS,
        )


def _percent(share: float) -> str:
    return f"{SCALE * share:.1f} %"
