"""`penstock eval`: what a model still knows, says and expects with its KV held in fewer bits.

    recall      questions about facts of a dialogue, answered by the engine: all of an answer right
    agreement   the engine continues a text, greedily: tokens before the first that is not raw's
    perplexity, KL, top 1
                of a text that is read block after block (teacher forcing): every block reads those
                before it as the engine holds them, and itself as it is, as a decode step does

Of the embedded model's own dialogues only what the assistant says counts: it was trained on that
alone, and expects nothing of users. Nothing is left in full precision but what a setting says: a
few hundred raw tokens at the start would hide much of what a codec does to a short text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.engine.core import Core
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request
from penstock.engine.settings import checked
from penstock.errors import SettingError
from penstock.kv.attention_plan import KVSpan
from penstock.kv.codecs import Scheme, parse_scheme
from penstock.models.mlx_lm import encode, load, render
from penstock.recall import END, MODEL_PATH, ROLES, dialogue
from penstock_bench.bench_settings import EvalSettings
from penstock_bench.key_forms import KeyForm, reform
from penstock_bench.report import Line, Report
from penstock_bench.window_recall import SCALE, Share

CLAIM = "Recall with quantized keys and values is that of raw ones"
RAW = "raw"
FIRST_SEED = 10_000_000
"""Seed of the first dialogue; the embedded model was trained on others."""
ANSWER_TOKENS = 8
LEAST_BLOCKS = 2
"""Blocks of a piece of text, at least: in the first block no codec is read."""
GOAL_CODECS = ("turbo4", "k8v4")
GOAL_FORMS = (KeyForm.PLAIN, KeyForm.OUTLIERS)
GOAL_POINTS = 0.5
CONTROL_CODEC = "affine2"
CONTROL_POINTS = 10.0


@dataclass(frozen=True, slots=True)
class KVSetting:
    """How KV is held: a codec, and a window; None: the engine's defaults."""

    codec: str
    max_kv_size: int | None = None
    keep: int | None = None

    @property
    def scheme(self) -> Scheme:
        """The codecs. Raises ValueError if there is none of this name."""
        return parse_scheme(self.codec)

    @property
    def served(self) -> bool:
        """Whether the engine holds KV so: it refuses codecs that are not read as they lie."""
        codecs = (self.scheme.keys, self.scheme.values)
        return all(codec is None or codec.in_place for codec in codecs)

    def __str__(self) -> str:
        window = "" if self.max_kv_size is None else f", window {self.max_kv_size:,}"
        return f"{self.codec}{window}{'' if self.keep is None else f', keep {self.keep}'}"


UNCHANGED = KVSetting(RAW)
EVALUATED_BLOCK_SIZE = 64
"""The least that all codecs can hold."""
SETTINGS = (
    *map(KVSetting, ("8", "k8v4", "kivi5/turbo3.5", "turbo4", "2")),
    KVSetting(RAW, 1_024, 256),
    KVSetting("k8v4", 1_024, 256),
)


class EvalLoad(EvalSettings):
    """What is measured, and how much of it. Sizes in tokens."""

    model: str = str(MODEL_PATH)
    settings: tuple[KVSetting, ...] = SETTINGS
    """Raw KV without a window is measured in any case: all others are compared with it."""
    windows_once: bool = True
    """Whether those with a window are measured on the first form alone."""
    forms: tuple[KeyForm, ...] = tuple(KeyForm)
    lengths: tuple[int, ...] = (250, 1_000, 4_000)
    """Lengths of the dialogues before the questions, which the embedded model alone answers."""
    per_dialogue: int = 16
    """Questions, at most."""
    text: str | None = None
    """None: dialogues of the embedded model's."""
    piece_tokens: int = 1_000
    """The text is read in pieces, each from an empty cache."""
    prompts: int = 16
    """Beginnings of each piece that are continued, at most."""
    continued_tokens: int = 32
    """Tokens of a continuation, at most; an answer may end before."""
    block_size: int = EVALUATED_BLOCK_SIZE
    memory_limit: int | str | None = "200MB"

    def engine(self, setting: KVSetting) -> dict[str, Any]:
        """Return the settings of an engine."""
        return {
            "memory_limit": self.memory_limit,
            "block_size": self.block_size,
            "max_kv_size": setting.max_kv_size,
            "keep": setting.keep,
            "max_batch_size": self.per_dialogue,
            "kv_cache_quantization": setting.codec,
            "kv_cache_min_quantize_tokens": 0,
            "kv_cache_raw_first_tokens": self.raw_first_tokens,
            "kv_cache_quantize_when": "active",
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of n values, with its standard error."""

    n: int
    mean: float
    standard_error: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> Estimate:
        """Average over all values of all groups, of which there is one or more.

        The error is the larger of two: of independent values, and of independent groups.
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

        Where none or all are 0, the error is that of half a one.
        """
        plain = cls.of(groups)
        others = Share(plain.n, sum(value != 0 for group in groups for value in group))
        least = others.standard_error or 0.0
        return cls(plain.n, plain.mean, max(plain.standard_error, least))


@dataclass(slots=True)
class EvalRow:
    """One setting on one form. Bytes of a token are those of what is held coded, all layers."""

    form: KeyForm
    setting: KVSetting
    max_kv_size: int
    keep: int
    bytes_per_token: float = math.nan
    bits: float = math.nan
    """Bits of a number, all parts together."""
    ratio: float = math.nan
    """Bytes of raw KV in the model's type over these."""
    recall: dict[int, Estimate] = field(default_factory=dict)
    """Share of right answers, by the length of the dialogue."""
    recall_over_raw: dict[int, Estimate] = field(default_factory=dict)
    """The same questions' share less raw's."""
    perplexity: Estimate | None = None
    kl: Estimate | None = None
    """KL divergence of the next token's distribution from raw's, in nats."""
    top_1: Estimate | None = None
    """Share of the positions whose likeliest next token is raw's."""
    agreement: Estimate | None = None
    """Tokens before the first that is not raw's, over all that were generated; None if the engine
    refuses the codec."""

    @property
    def name(self) -> str:
        """Form and setting."""
        return f"{self.form}: {self.setting}"

    def as_object(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {**asdict(self), "setting": str(self.setting), "codec": self.setting.codec}


@dataclass(slots=True)
class Progress:
    """Counts what is done and tells of it: `tell(what, done, of)`."""

    tell: Callable[[str, int, int], None]
    of: int = 0
    done: int = 0

    def step(self, what: str) -> None:
        """Count one more."""
        self.tell(what, self.done, self.of)
        self.done += 1


# ---- what is read and asked


@dataclass(frozen=True, slots=True)
class AskedDialogue:
    """A dialogue, in tokens, with the questions after it and the right answers."""

    context: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[str, ...]


def dialogues(tokenizer: Any, load_: EvalLoad, length: int) -> Iterator[AskedDialogue]:
    """Yield dialogues of one length until enough is asked."""
    facts = max(1, min(load_.per_dialogue, length // 64))
    for number in range(-(-load_.questions // facts)):
        talk = dialogue(FIRST_SEED + number, tokens=length, facts=facts)
        yield AskedDialogue(
            tuple(render(tokenizer, talk.messages, answer=False)),
            tuple(tuple(render(tokenizer, talk.ask(asked))) for asked in talk.questions),
            tuple(asked.answer for asked in talk.questions),
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a text, and of each whether it counts how it was expected."""

    tokens: tuple[int, ...]
    counts: tuple[bool, ...]

    def ends(self, count: int) -> list[int]:
        """Return where to begin a continuation, `count` places at most: at answers, or anywhere."""
        begins = [i for i in range(1, len(self.tokens)) if self.counts[i] > self.counts[i - 1]]
        places = begins or range(1, len(self.tokens) + 1)
        count = min(count, len(places))
        return [places[len(places) * (i + 1) // count - 1] for i in range(count)]


def pieces(tokenizer: Any, load_: EvalLoad) -> list[Piece]:
    """Cut the text into pieces, or write pieces of its own.

    Raises:
        SettingError: no piece has two blocks.
    """
    least = LEAST_BLOCKS * load_.block_size
    if load_.text_tokens < least:
        raise SettingError(
            f"--text-tokens {load_.text_tokens}: a piece needs {least} or more, {LEAST_BLOCKS} "
            f"blocks of {load_.block_size}"
        )
    size = min(load_.piece_tokens, load_.text_tokens)
    if load_.text is not None:
        tokens = encode(tokenizer, load_.text)[: load_.text_tokens]
        cut = [_whole(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    else:
        own = [
            dialogue(FIRST_SEED - 1 - number, tokens=size, facts=0, quiz=0.3, strangers=0.1)
            for number in range(load_.text_tokens // size)
        ]
        if load_.model == str(MODEL_PATH):
            cut = [_spoken(tokenizer, render(tokenizer, one.messages, answer=False)) for one in own]
        else:
            texts = ["\n".join(message["content"] for message in one.messages) for one in own]
            cut = [_whole(encode(tokenizer, text)) for text in texts]
    long = [piece for piece in cut if len(piece.tokens) >= least]
    if not long:
        most = max((len(piece.tokens) for piece in cut), default=0)
        raise SettingError(
            f"the text has {most} tokens, or pieces of so many; a piece needs {least} or more"
        )
    return long


def _whole(tokens: Sequence[int]) -> Piece:
    return Piece(tuple(tokens), (True,) * len(tokens))


def _spoken(tokenizer: Any, tokens: Sequence[int]) -> Piece:
    """Return the embedded model's dialogue; what the assistant says counts, its end included."""
    names = (ROLES["assistant"], END)
    begin, end = (int(tokenizer.convert_tokens_to_ids(name)) for name in names)
    counts, speaks = [], False
    for token in tokens:
        counts.append(speaks)
        speaks = token == begin or (speaks and token != end)
    return Piece(tuple(tokens), tuple(counts))


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A model in one form, and what it is asked and reads."""

    form: KeyForm
    model: Any
    tokenizer: Any
    asked: dict[int, list[AskedDialogue]]
    """Questions by length of their dialogue."""
    text: list[Piece]

    @classmethod
    def of(cls, load_: EvalLoad, form: KeyForm) -> EvalTask:
        """Load the model and write what it is asked; raises as `measure` does."""
        model, tokenizer = load(load_.model)
        reform(model, form, load_.outlier_scale)
        asked = {length: list(dialogues(tokenizer, load_, length)) for length in load_.lengths}
        return cls(form, model, tokenizer, asked, pieces(tokenizer, load_))

    def steps(self, settings: Sequence[KVSetting]) -> int:
        """Return how many steps `Progress` will count."""
        served = sum(setting.served for setting in settings)
        asked = sum(len(conversations) for conversations in self.asked.values())
        return served * (asked + len(self.text)) + len(self.text)


# ---- the engine


def drain(core: Core) -> None:
    """Run until nothing is left to do."""
    while core.step():
        pass


def answers(core: Core, asked: AskedDialogue) -> list[bool]:
    """Read a dialogue, ask everything at once, and tell which answers are right."""
    core.submit(Request(prompt=asked.context, max_tokens=1))
    drain(core)  # now all of it is coded that will be
    handles = [
        core.submit(Request(prompt=prompt, max_tokens=ANSWER_TOKENS)) for prompt in asked.prompts
    ]
    drain(core)
    texts = [handle.result(0.0)[0].text.strip() for handle in handles]
    return [text == answer for text, answer in zip(texts, asked.answers, strict=True)]


def continued(core: Core, load_: EvalLoad, piece: Piece) -> list[list[int]]:
    """Continue beginnings of a piece, greedily; the tokens of each."""
    core.submit(Request(prompt=piece.tokens, max_tokens=1))
    drain(core)
    handles = [
        core.submit(Request(prompt=piece.tokens[:end], max_tokens=load_.continued_tokens))
        for end in piece.ends(load_.prompts)
    ]
    drain(core)
    return [list(handle.result(0.0)[0].tokens) for handle in handles]


def alike(tokens: Sequence[int], wanted: Sequence[int]) -> float:
    """Return the share of tokens before the first that differs; the longer one's."""
    if list(tokens) == list(wanted):  # also of two that end at once
        return 1.0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, wanted, strict=False))
    return sum(1 for _ in same) / max(1, len(tokens), len(wanted))


@dataclass(slots=True)
class EngineAnswers:
    """What the engine has answered in one setting: by length and dialogue, by piece."""

    right: dict[int, list[list[bool]]]
    continued: list[list[list[int]]]


def serve(
    task: EvalTask, load_: EvalLoad, setting: KVSetting, step: Callable[[], None]
) -> EngineAnswers:
    """Ask and have continued everything by one engine; `step` is called before each."""
    core = Core(task.model, task.tokenizer, **load_.engine(setting))
    try:
        right: dict[int, list[list[bool]]] = {}
        for length, conversations in task.asked.items():
            right[length] = []
            for one in conversations:
                step()
                right[length].append(answers(core, one))
        continuations = []
        for piece in task.text:
            step()
            continuations.append(continued(core, load_, piece))
        return EngineAnswers(right, continuations)
    finally:
        core.close()


# ---- teacher forcing


@dataclass(frozen=True, slots=True)
class Way:
    """How a text is read in a setting."""

    setting: KVSetting
    runner: Runner
    limits: EngineSettings
    scheme: Scheme
    """The setting's, as the engine scales it for this model."""


class Reading:
    """One text, read block after block; what was read is held as the engine holds it."""

    def __init__(self, way: Way) -> None:
        size = way.limits.block_size
        self._runner = way.runner
        self._scheme = way.scheme
        self._first = -(-way.limits.raw_first_tokens // size) * size
        self._size = size
        self.parts: list[KVSpan] = []

    @property
    def position(self) -> int:
        """How many tokens were read."""
        return self.parts[-1].end if self.parts else 0

    @property
    def coded(self) -> tuple[int, int]:
        """Bytes and tokens of what is coded, or would be if there were a codec."""
        coded = [p for p in self.parts if p.start >= self._first and p.columns == self._size]
        return sum(p.segment.nbytes for p in coded), sum(p.columns for p in coded)

    def read(self, tokens: Sequence[int]) -> mx.array:
        """Read a block, or the rest behind the last one.

        Returns:
            Log-probabilities of the token that follows each token: (n, vocabulary) float32.
        """
        start = self.position
        logits, chunk = self._runner.read(tokens, self.parts, start)
        segment = chunk.segment
        if start >= self._first and len(tokens) == self._size:
            segment = segment.encoded(self._scheme)
        self.parts.append(KVSpan(segment, start, len(tokens)))
        wide = logits.astype(mx.float32)
        return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


@dataclass(slots=True)
class Forced:
    """Of one setting, token by token, piece by piece."""

    losses: list[list[float]] = field(default_factory=list)
    """Negative log-likelihood, nats."""
    kl: list[list[float]] = field(default_factory=list)
    same: list[list[float]] = field(default_factory=list)
    nbytes: int = 0
    tokens: int = 0


def force(
    ways: Sequence[Way],
    text: Sequence[Piece],
    block_size: int,
    step: Callable[[], None],
) -> list[Forced]:
    """Read a text in all ways side by side, block by block; the first way is raw.

    In this order the distributions of raw need not be kept. `step` is called before each piece.
    """
    forced = [Forced() for _ in ways]
    for piece in text:
        step()
        readings = [Reading(way) for way in ways]
        for one in forced:
            one.losses.append([])
            one.kl.append([])
            one.same.append([])
        for start in range(0, len(piece.tokens), block_size):
            stop = min(start + block_size, len(piece.tokens))
            counted = [
                i for i in range(start, min(stop, len(piece.tokens) - 1)) if piece.counts[i + 1]
            ]
            rows = mx.array([i - start for i in counted], mx.int32)
            after = mx.array([piece.tokens[i + 1] for i in counted], mx.int32)
            raw: mx.array | None = None
            for reading, one in zip(readings, forced, strict=True):
                logs = reading.read(piece.tokens[start:stop])[rows]
                raw = logs if raw is None else raw
                if counted:
                    _note(one, logs, raw, after)
        for reading, one in zip(readings, forced, strict=True):
            nbytes, tokens = reading.coded
            one.nbytes, one.tokens = one.nbytes + nbytes, one.tokens + tokens
    return forced


def _note(one: Forced, logs: mx.array, raw: mx.array, after: mx.array) -> None:
    losses = -mx.take_along_axis(logs, after[:, None], axis=-1)[:, 0]
    kl = (mx.exp(raw) * (raw - logs)).sum(axis=-1)
    same = mx.argmax(logs, axis=-1) == mx.argmax(raw, axis=-1)
    mx.eval(losses, kl, same)
    for kept, new in ((one.losses, losses), (one.kl, kl), (one.same, same.astype(mx.float32))):
        kept[-1].extend(new.tolist())  # type: ignore[arg-type]


# ---- all of it


def measure(load_: EvalLoad, tell: Callable[[str, int, int], None] = lambda *_: None) -> Report:
    """Measure all settings on all forms.

    Args:
        load_: what, and how much.
        tell: takes a description of the measurement, the steps that are done, and their total.

    Raises:
        ModelError: the engine cannot run the model, or it has no other forms.
        SettingError: a codec does not exist or fits neither heads nor blocks, a window is out of
            its range, or the text is too short.
    """
    settings = list(dict.fromkeys((UNCHANGED, *load_.settings)))
    for setting in settings:
        _check(setting, load_)
    forms = list(dict.fromkeys(load_.forms))
    if load_.windows_once and all(setting.max_kv_size is not None for setting in load_.settings):
        forms = forms[:1]
    measured: list[tuple[EvalRow, dict[str, Any]]] = []
    progress = Progress(tell)
    dtype = ""
    for number, form in enumerate(forms):
        task = EvalTask.of(load_, form)
        if number and load_.windows_once:
            settings = [setting for setting in settings if setting.max_kv_size is None]
        progress.of = progress.done + (len(forms) - number) * task.steps(settings)
        ways = [_way(task.model, setting, load_) for setting in settings]
        measured += _on_form(task, load_, ways, progress)
        dtype = str(ways[0].runner.shapes[0].dtype).rpartition(".")[2]
    return report(load_, [row for row, _ in measured], [raw for _, raw in measured], dtype)


def _on_form(
    task: EvalTask, load_: EvalLoad, ways: Sequence[Way], progress: Progress
) -> list[tuple[EvalRow, dict[str, Any]]]:
    """Measure all settings, raw first; return their rows, and what they were made of."""

    def stepper(what: object) -> Callable[[], None]:
        return lambda: progress.step(f"{task.form}: {what}")

    served = [
        serve(task, load_, way.setting, stepper(way.setting)) if way.setting.served else None
        for way in ways
    ]
    forced = force(ways, task.text, load_.block_size, stepper("reading the text"))
    raw = served[0]
    assert raw is not None
    measured = []
    for way, answered, one in zip(ways, served, forced, strict=True):
        row = EvalRow(task.form, way.setting, way.limits.max_kv_size, way.limits.keep_tokens)
        _sizes(row, one, way.runner)
        _text(row, one)
        if answered is not None:
            _answers(row, answered, raw)
        kept = {"losses": _sums(one.losses), "kl": _sums(one.kl), "same": _sums(one.same)}
        right = None if answered is None else _right(answered)
        measured.append((row, {"row": row.name, "right": right, **kept}))
    return measured


def _way(model: Any, setting: KVSetting, load_: EvalLoad) -> Way:
    limits = checked(load_.engine(setting))
    runner = Runner(model, max_kv_size=limits.max_kv_size, keep=limits.keep_tokens)
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


def _sizes(row: EvalRow, one: Forced, runner: Runner) -> None:
    numbers = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in runner.shapes)
    row.bytes_per_token = one.nbytes / one.tokens if one.tokens else runner.token_bytes
    row.bits = round(8 * row.bytes_per_token / numbers, 3)
    row.ratio = round(runner.token_bytes / row.bytes_per_token, 3)


def _text(row: EvalRow, one: Forced) -> None:
    losses = Estimate.of(one.losses)
    perplexity = math.exp(losses.mean)
    row.perplexity = Estimate(losses.n, perplexity, perplexity * losses.standard_error)
    row.kl = Estimate.of(one.kl)
    row.top_1 = Estimate.of_shares(one.same)


def _answers(row: EvalRow, answered: EngineAnswers, raw: EngineAnswers) -> None:
    for length, groups in answered.right.items():
        row.recall[length] = _share(groups)
        row.recall_over_raw[length] = Estimate.of_shares(
            [
                [float(a) - float(b) for a, b in zip(ours, theirs, strict=True)]
                for ours, theirs in zip(groups, raw.right[length], strict=True)
            ]
        )
    row.agreement = Estimate.of(
        [
            [alike(a, b) for a, b in zip(ours, theirs, strict=True)]
            for ours, theirs in zip(answered.continued, raw.continued, strict=True)
        ]
    )


def _share(groups: Sequence[Sequence[bool]]) -> Estimate:
    return Estimate.of_shares([[float(right) for right in group] for group in groups])


def _sums(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return count and sum of every piece, for the record."""
    return [[len(group), round(math.fsum(group), 6)] for group in groups]


def _right(answered: EngineAnswers) -> dict[str, list[list[int]]]:
    """Return asked and right of every dialogue, by length, for the record."""
    return {
        str(length): [[len(group), sum(group)] for group in groups]
        for length, groups in answered.right.items()
    }


def report(
    load_: EvalLoad, rows: Sequence[EvalRow], raw: Sequence[dict[str, Any]], dtype: str
) -> Report:
    """Lay out the rows and judge recall."""
    lines = [line for row in rows for line in judged(row, rows)]
    goals = {
        "most_points_below_raw": GOAL_POINTS,
        "of": [*GOAL_CODECS],
        "forms": [*GOAL_FORMS],
        "control_points_below_raw": CONTROL_POINTS,
    }
    described = load_.model_dump(mode="json") | {
        "model": "embedded" if load_.model == str(MODEL_PATH) else Path(load_.model).name,
        "text": "own" if load_.text is None else "a file",
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
    """Yield the goals of a row: that it loses nothing, or, as a control, that its loss is seen."""
    (raw,) = (one for one in rows if one.setting == UNCHANGED and one.form == row.form)
    setting = row.setting
    if setting != KVSetting(setting.codec) or not row.recall:
        return
    name = setting.scheme.name
    if name in {parse_scheme(codec).name for codec in GOAL_CODECS} and row.form in GOAL_FORMS:
        for length, share in row.recall.items():
            yield Line(
                f"{row.name}, {length:,} tokens",
                _percent(share.mean),
                _percent(raw.recall[length].mean),
                f">= raw - {GOAL_POINTS}",
                SCALE * row.recall_over_raw[length].mean >= -GOAL_POINTS,
            )
    if name == CONTROL_CODEC and row.form is KeyForm.OUTLIERS:
        best = max(row.recall, key=lambda length: row.recall_over_raw[length].mean)
        yield Line(
            f"{row.name}, at its best: is it seen?",
            _percent(row.recall[best].mean),
            _percent(raw.recall[best].mean),
            f"<= raw - {CONTROL_POINTS:.0f}",
            SCALE * row.recall_over_raw[best].mean <= -CONTROL_POINTS,
        )


def _percent(share: float) -> str:
    return f"{SCALE * share:.1f} %"
