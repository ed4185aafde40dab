"""One writer of a sequence's KV; rejected columns leave nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from core_parts import layer_shapes, sequences_in
from engine_faults import model_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.schedule.scheduler import State
from penstock.prefix.prefixes import InsertResult

FIELDS = {
    "pin",
    "num_cached_tokens",
    "own_spans",
    "slot",
    "tail",
    "recurrent_state",
    "transient",
}
FAMILY = {"SequenceKV", "DraftKV"}
"""Classes whose instances have these fields; other classes may have fields of the same names."""
WRITERS = {"sequence_kv.py": 34}
"""Files that write the fields, and the least number of lines that do so."""
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
ROOT = Path(__file__).parents[3]
SOURCES = (ROOT / "src" / "penstock", ROOT / "benchmarks" / "src")


def changed(node: ast.AST) -> ast.AST | None:
    """Return the target that a node stores to, deletes, or changes by a list method."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return None if isinstance(node.ctx, ast.Load) else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in CHANGES else None
    return None


def field_in(place: ast.AST | None, *, of_self: bool) -> bool:
    """Return whether a target is one of the fields; `self` counts only if `of_self`."""
    while isinstance(place, ast.Attribute | ast.Subscript):
        if isinstance(place, ast.Attribute) and place.attr in FIELDS:
            own = isinstance(place.value, ast.Name) and place.value.id == "self"
            return of_self or not own
        place = place.value
    return False


def is_set_by_name(node: ast.AST) -> bool:
    """Return whether a node calls `setattr` or the like with a field's name."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    texts = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return name in SETTERS and bool(texts & FIELDS)


def bases(node: ast.ClassDef) -> set[str]:
    """Return the unqualified names of a class's bases."""
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def writers(source: str) -> list[int]:
    """List the lines that write one of the fields."""
    lines: list[int] = []

    def look(node: ast.AST, *, of_self: bool) -> None:
        if isinstance(node, ast.ClassDef):
            of_self = node.name in FAMILY or bool(bases(node) & FAMILY)
        if is_set_by_name(node) or field_in(changed(node), of_self=of_self):
            assert isinstance(node, ast.expr)
            lines.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            look(child, of_self=of_self)

    look(ast.parse(source), of_self=True)
    return lines


def test_only_sequence_kv_writes_kv_state() -> None:
    lines_by_file = {
        str(path.relative_to(ROOT)): writers(path.read_text())
        for source in SOURCES
        for path in source.rglob("*.py")
    }
    for name, least in WRITERS.items():
        assert len(lines_by_file.pop(f"src/penstock/engine/schedule/{name}")) > least
    assert any(name.startswith("benchmarks/") for name in lines_by_file)
    assert {name: lines for name, lines in lines_by_file.items() if lines} == {}


def test_sequence_kv_classes_are_listed() -> None:
    trees = [
        ast.parse(path.read_text()) for path in (ROOT / "src" / "penstock" / "engine").rglob("*.py")
    ]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    derived = {node.name for node in classes if bases(node) & FAMILY}
    assert derived | {"SequenceKV"} == FAMILY


@pytest.mark.parametrize(
    "source",
    [
        "s.kv.tail = 0",
        "s.kv.tail += 1",
        "a, s.pin = b",
        "s.kv.own_spans: list = []",
        "s.kv.transient = True",
        "s.kv.own_spans[0] = b",
        "s.kv.own_spans[0].start = 0",
        "s.kv.own_spans.clear()",
        "s.kv.own_spans.append(b)",
        "s.kv.own_spans.extend(b)",
        "s.kv.own_spans.insert(0, b)",
        "a = s.kv.own_spans.pop()",
        "s.kv.own_spans.remove(b)",
        "s.kv.own_spans.sort()",
        "s.kv.own_spans.reverse()",
        "del s.kv.own_spans[0]",
        "del s.kv.own_spans[:], b",
        "del s.kv.slot",
        "setattr(s.kv, 'tail', 0)",
        "delattr(s.kv, 'slot')",
        "object.__setattr__(s.kv, 'tail', 0)",
        "with b as s.kv.pin: pass",
        "with b as (a, s.kv.pin): pass",
        "for s.kv.tail in b: pass",
        "a = [0 for s.kv.tail in b]",
        "class C(DraftKV): a = lambda self: self.own_spans.clear()",
        "class C: a = lambda self: self.kv.own_spans.clear()",
    ],
)
def test_check_detects_other_writers(source: str) -> None:
    assert writers(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "a = s.kv.tail",
        "a[s.kv.tail] = b",
        "a.append(s.kv.slot)",
        "s.kv.spans().append(b)",
        "setattr(a, 'name', 0)",
        "class C: a = lambda self: self.tail.clear()",
    ],
)
def test_reads_are_not_reported_as_writes(source: str) -> None:
    assert writers(source) == []


def answer(core: Core, handle: Handle) -> tuple[int, ...]:
    while core.step():
        core.view.check()
    return handle.result(0.0)[0].tokens


@pytest.fixture
def core() -> Any:
    small = {"block_size": 16, "prefill_chunk": 64, "max_batch_size": 2, "max_kv_size": 512}
    with_room = Core(model_of("llama"), memory_limit="40MB", **small)
    yield with_room
    with_room.close()


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_columns_of_rejected_tokens_do_not_change_text(core: Core, accepted: int) -> None:
    """Writes past the committed length, as of rejected proposals, change no text."""
    request = Request(prompt=tuple(range(1, 40)), max_tokens=24)
    expected = answer(core, core.submit(request))
    core.clear()
    handle = core.submit(request)
    while not sequences_in(core, State.RUNNING):
        core.step()
    core.step()
    (sequence,) = core.admission.sequences.values()
    kv = sequence.kv
    while kv.tail + 3 > core.tails.columns - 1 or not kv.tail:
        core.step()
    assert kv.slot is not None
    shape = layer_shapes(core)[0]
    noise = mx.full((1, shape.kv_heads, 1, shape.key_dim), 7.0)
    for layer in range(len(layer_shapes(core))):
        for column in range(kv.tail, kv.tail + 3):
            core.tails.write_block(layer, kv.slot, column, noise, noise)
    before = kv.position
    kv.append_tokens(written=3, accepted=0)
    assert kv.position == before
    if accepted:  # the negative control: what is accepted is read
        kv.append_tokens(written=3, accepted=accepted)
        assert kv.position == before + accepted
        return
    assert answer(core, handle) == expected


@pytest.mark.parametrize(("written", "accepted"), [(1, 2), (1, -1), (0, 1)])
def test_accepting_more_tokens_than_written_is_refused(
    core: Core, written: int, accepted: int
) -> None:
    handle = core.submit(Request(prompt=(1, 2, 3), max_tokens=4))
    core.step()
    (sequence,) = core.admission.sequences.values()
    with pytest.raises(ValueError, match="accepted of"):
        sequence.kv.append_tokens(written, accepted)
    core.cancel(handle)


def running_core(core: Core, prompt_tokens: int, generated: int) -> Any:
    """Return the KV of a sequence in `core` that has decoded this number of tokens."""
    core.submit(Request(prompt=tuple(range(1, prompt_tokens + 1)), max_tokens=100, ignore_eos=True))
    while not sequences_in(core, State.RUNNING):
        core.step()
    for _ in range(generated):
        core.step()
    (sequence,) = core.admission.sequences.values()
    return sequence.kv


@pytest.mark.parametrize("generated", [1, 20, 40, 70])
def test_whole_blocks_of_answer_are_committed_at_end(core: Core, generated: int) -> None:
    """Where it ends inside a span, its blocks are not held twice."""
    kv = running_core(core, 40, generated)
    committed, end = kv.num_cached_tokens, kv.committed_end
    kv.keep_end()
    assert kv.num_cached_tokens == end // 16 * 16
    assert (kv.num_cached_tokens > committed) == (generated >= 20)
    spans = kv.spans()
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    kv.check()


def test_last_prompt_token_is_its_own_chunk(core: Core) -> None:
    """As in mlx-lm's own loop, whose chunks are of the prompt without its last token."""
    kv = running_core(core, 40, 0)
    (sequence,) = core.admission.sequences.values()
    assert kv.position >= 39
    assert sequence.whole_stop == kv.position + 1


def test_shorter_paths_drop_increasing_numbers_of_nodes(core: Core) -> None:
    prompt = tuple(range(1, 100))
    for shared in (96, 64, 48, 32, 16):
        other = (*prompt[:shared], *range(200, 220))
        answer(core, core.submit(Request(prompt=other, max_tokens=1)))
    core.submit(Request(prompt=prompt, max_tokens=100, ignore_eos=True))
    core.step()
    (sequence,) = core.admission.sequences.values()
    kv = sequence.kv
    assert kv.pin is not None
    assert [node.end for node in kv.pin.path[:-1]] == [16, 32, 48, 64]
    assert list(kv.shorter_paths()) == [
        kv.block_hashes[:4],
        kv.block_hashes[:3],
        kv.block_hashes[:1],
        [],
    ]


def test_answer_end_is_not_committed_without_memory_for_copy(core: Core) -> None:
    kv = running_core(core, 40, 40)
    before = kv.spans(), kv.num_cached_tokens, kv.position
    core.ledger.set_limit(core.ledger.used_bytes)
    kv.keep_end()
    assert (kv.spans(), kv.num_cached_tokens, kv.position) == before


@pytest.mark.parametrize("keep", [0, 12, 32])
def test_spans_outside_window_are_released(keep: int) -> None:
    """Kept tokens stay, unseen tokens go, also from the pin; no column is visible twice."""
    window, columns = 48, 16
    core = Core(
        model_of("llama"),
        memory_limit="40MB",
        block_size=columns,
        prefill_chunk=64,
        max_batch_size=2,
        max_kv_size=window,
        keep=keep,
    )
    try:
        kv = running_core(core, 30, 1)
        while core.step() and core.admission.sequences:
            spans, nearest = kv.spans(), core.runner.window_start(kv.position)
            covered = [at for span in spans for at in range(span.start, span.end)]
            assert len(set(covered)) == len(covered)
            end = kv.committed_end
            assert {*range(min(keep, end)), *range(nearest, end)} <= set(covered)
            # Whole spans go when a full tail becomes a span and nothing of them is seen.
            seen = nearest - core.tails.columns
            assert all(span.end > seen or span.start < keep for span in spans[1:-1])
            path = kv.pin.path if kv.pin is not None else ()
            assert all(node.start < kv.num_cached_tokens for node in path)
            kv.check()
            core.view.check()
        stats = core.view.stats()
        assert (stats.finished, stats.failed, kv.position) == (1, 0, 0)
    finally:
        core.close()


def test_decoding_sequence_does_not_adopt_committed_blocks(
    core: Core,
) -> None:
    """Its spans follow the cached tokens: the same blocks would be visible twice."""
    first = Request(prompt=tuple(range(1, 41)), max_tokens=100, ignore_eos=True)
    answer(core, core.submit(first))
    kv = running_core(core, 40, 20)
    kv.hash_blocks()
    held = core.prefixes.match(kv.block_hashes).tokens
    assert held > kv.num_cached_tokens and kv.own_spans
    before = kv.spans(), kv.position
    assert kv.extend() == 0
    assert (kv.spans(), kv.position) == before


@pytest.mark.parametrize(("tokens", "cached"), [(47, 32), (48, 47), (49, 48)])
def test_last_token_of_fully_cached_prompt_is_computed(
    core: Core, tokens: int, cached: int
) -> None:
    """Its logits are needed; the rest of the whole blocks is not recomputed."""
    request = Request(prompt=tuple(range(1, tokens + 1)), max_tokens=24, ignore_eos=True)
    expected = answer(core, core.submit(request))
    handle = core.submit(request)
    assert answer(core, handle) == expected
    (choice,) = handle.result(0.0)
    assert choice.finish is not None and choice.finish.usage.cached_tokens == cached


def test_chunk_refused_by_tree_stays_with_sequence(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ends inside a block."""
    request = Request(prompt=tuple(range(1, 60)), max_tokens=24)
    expected = answer(core, core.submit(request))
    core.clear()

    def refuse(pin: Any, blocks_done: int, *given: Any) -> InsertResult:
        return InsertResult(blocks_done, 0, "there is no room")

    monkeypatch.setattr(core.prefixes, "insert", refuse)
    assert answer(core, core.submit(request)) == expected
    assert core.view.stats().held_tokens == 0
