"""A Hypothesis state machine of engine requests with random faults.

Every answer is compared with what the model says alone, and memory with what MLX says is
allocated: to the byte, for which MLX is told to keep no freed buffers (it hands out larger ones
than were asked for). The garbage collector rests, so that what only it could free is seen, too.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from core_parts import cached_nodes, evict_all, sequences_in, weights_bytes_of, wrap_model
from engine_faults import (
    Alphabet,
    Broken,
    Fault,
    Faulty,
    fail_after_last_layer,
    fails,
    return_nan_logits,
    runs_out_of_memory,
    spell,
)
from engine_reference import (
    ENDS,
    KINDS,
    MOST_GROWN,
    MOST_NEW,
    Answer,
    Kind,
    answer,
    common,
    drawn_kinds,
    solo,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.engine.core import Core
from penstock.engine.handle import Choice, Handle
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.request import Finish, Request, Sampling
from penstock.engine.schedule.scheduler import State
from penstock.errors import NeverFits, PenstockError, QueueFull, StepFailed
from penstock.ledger import Kind as Bytes

ROOMS = (60_000, 130_000, 250_000, 1_000_000)
"""Bytes beside what is always held: for hardly anybody, for one or two, for a few, for all."""
MAX_QUEUE = 6
HOW = (fails, fail_after_last_layer, runs_out_of_memory, return_nan_logits)
FAULTS = ("a model's bug", "Attempting to allocate")
"""What the errors of a failed step say."""

blocks = st.lists(st.integers(0, 2), max_size=5)


@dataclass(frozen=True)
class Wish:
    """The parameters of a request."""

    blocks: list[int]
    over: int
    max_tokens: int
    sampling: Sampling
    stop_at: int | None
    ignore_eos: bool
    n: int
    priority: int
    timeout: float | None
    salt: str
    hold: float
    fault: str | None
    """What of the last choice is broken."""
    fault_at: int


samplings = st.sampled_from(
    [
        Sampling(),
        Sampling(),
        Sampling(logprobs=True, top_logprobs=2),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, seed=2),
    ]
)
picks = st.integers(0, 99)
"""Which of those that are there, counted round."""
wishes = st.builds(
    Wish,
    blocks=blocks,
    over=st.integers(0, 15),
    # Answers that are asked for beyond the room grow until they end, or until they are alone in it.
    max_tokens=st.one_of(*[st.integers(1, MOST_NEW)] * 3, st.just(MOST_GROWN)),
    sampling=samplings,
    stop_at=st.sampled_from([None, None, 0, 5, 9]),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 3]),
    priority=st.sampled_from([0, 0, 1, 2]),
    timeout=st.sampled_from([None, None, 1.0, 4.0]),
    salt=st.sampled_from(["", "", "b"]),
    hold=st.sampled_from([0.0, 0.0, 2.0, 20.0]),
    fault=st.sampled_from([None] * 9 + ["sampler", "detokenizer", "finalize"]),
    fault_at=st.integers(0, 6),
)


@dataclass(eq=False)
class Asked:
    """An accepted request, and its allowed outcomes."""

    request: Request
    handle: Handle
    deadline: float | None
    fault: str | None
    """What of the last choice is broken."""
    fault_at: int
    """Its tokens up to there are right."""
    cancelled: bool = False
    may_fail: list[type[PenstockError]] = field(default_factory=list)
    """Errors that something which happened meanwhile may have caused."""
    ended: list[Finish] = field(default_factory=list)


def settled_memory() -> int:
    """Return what MLX has allocated once it has not changed for a moment: its own threads let go
    of a step's last buffers after they have told that it is computed."""
    found, since, until = mx.get_active_memory(), time.monotonic(), time.monotonic() + 1.0
    while time.monotonic() < min(until, since + 0.01):
        time.sleep(0.001)
        if (now := mx.get_active_memory()) != found:
            found, since = now, time.monotonic()
    return found


class EngineMachine(RuleBasedStateMachine):
    """A core, all its requests, and a clock that does not advance by itself."""

    make: ClassVar[type[Core]] = Core
    kind: Kind = KINDS[0]

    def __init__(self) -> None:
        super().__init__()
        gc.disable()
        self.now = 0.0
        self.send_later = False
        self.tokenizer = Alphabet(ENDS)
        self.asked: list[Asked] = []
        self.cache_limit = mx.set_cache_limit(0)
        mx.disable_compile()  # what mlx-lm compiles keeps its constants, for every shape anew

    def open_core(self) -> None:
        model = self.kind.model
        solo(self.kind, self.kind.pieces[0])  # what a model makes when it runs first stays
        draft = self.kind.draft
        self.before = settled_memory()
        self.others = self.before - weight_bytes(model)
        self.others -= 0 if draft is None else weight_bytes(draft[0])
        self.core = self.make(
            model,
            self.tokenizer,
            clock=lambda: self.now,
            memory_limit=40_000_000,
            max_queue=MAX_QUEUE,
            draft_model=draft,
            **self.kind.settings,
            **self.more_settings(),
        )
        mx.set_cache_limit(0)  # the core has set one
        self.faulty = wrap_model(self.core, Faulty)
        self.opened_bytes = self.core.ledger.used_bytes
        self.failed = 0
        self.core.set_limit(self.fixed + ROOMS[1])

    def start(self, kind: Kind, room: int | None, wishes: list[Wish]) -> None:
        """Open an engine of a drawn kind, and start some requests."""
        self.kind = kind
        self.open_core()
        self.set_limit(room)
        self.submit(wishes)
        self.run_step()

    @property
    def fixed(self) -> int:
        """Bytes that are always reserved."""
        return self.opened_bytes

    @property
    def tight_bytes(self) -> int:
        """Exact bytes of the longest request alone."""
        sequence = self.core.view.sequence_bytes(self.kind.most_prompt + MOST_NEW - 1)
        return sequence.per_sequence + sequence.shared

    def more_settings(self) -> dict[str, Any]:
        """Return additional settings of the core."""
        return {}

    @property
    def reading_bytes(self) -> int:
        """Bytes of arrays that other threads are filling."""
        return 0

    @property
    def open(self) -> list[Asked]:
        return [asked for asked in self.asked if not asked.handle.done]

    # ---- asking

    @initialize(wishes=st.lists(wishes, min_size=2, max_size=4))
    def begin(self, wishes: list[Wish]) -> None:
        """Start some requests."""
        self.open_core()
        self.submit(wishes)
        self.run_step()

    @rule(wishes=st.lists(wishes, min_size=1, max_size=4))
    def submit(self, wishes: list[Wish]) -> None:
        """Submit prompts of a few shared blocks and some more tokens."""
        pieces, size = self.kind.pieces, self.kind.block_size
        for wish in wishes:
            prompt = tuple(t for i in wish.blocks for t in pieces[i])
            prompt += pieces[0][: wish.over % size]
            prompt = (prompt or pieces[2][:1])[: self.kind.most_prompt]
            seed = wish.sampling.seed if wish.sampling.temperature else None
            stop = ()
            if wish.stop_at is not None:
                steps = solo(self.kind, prompt, seed)[wish.stop_at :]
                stop = (spell([step.token for step in steps[:2]]),)
            request = Request(
                prompt=prompt,
                max_tokens=wish.max_tokens,
                sampling=wish.sampling,
                stop=stop,
                ignore_eos=wish.ignore_eos,
                n=wish.n,
                priority=wish.priority,
                timeout_seconds=wish.timeout,
                salt=wish.salt,
                hold_seconds=wish.hold,
            )
            self.ask(request, wish.fault, wish.fault_at)

    # A rule that finds nothing to do returns: as a precondition it would let what is drawn next
    # depend on how quick a disk's thread was.

    @rule(pick=picks, more=st.integers(1, 12))
    def go_on(self, pick: int, more: int) -> None:
        """Submit the next turn of a conversation: prompt, answer, and more."""
        done = [asked for asked in self.asked if asked.handle.done]
        if not done:
            return
        before = done[pick % len(done)]
        said = tuple(before.handle.choices[0].tokens)
        prompt = before.request.prompt + said + self.kind.pieces[1]
        prompt = prompt[: self.kind.most_prompt][: -more or None]
        if len(prompt) > more:
            self.ask(Request(prompt=prompt, max_tokens=8, salt=before.request.salt))

    @rule(pick=picks)
    def outrank(self, pick: int) -> None:
        """Submit enough answers of a high priority to preempt all others."""
        if not any(s.priority < 9 for s in sequences_in(self.core, State.RUNNING)):
            return  # those that outranked others do not give way to their like
        prompt = self.kind.pieces[pick % 3][:3]
        asked = self.ask(Request(prompt=prompt, n=self.kind.places, max_tokens=2, priority=9))
        self.run_step()
        if asked is not None and self.core.ledger.limit_bytes == self.fixed + ROOMS[-1]:
            assert self.core.view.stats().preempted, (
                "lower priorities go on in the way of higher ones"
            )

    def ask(self, request: Request, fault: str | None = None, at: int = 0) -> Asked | None:
        core = self.core
        opened = core.view.stats().waiting
        if fault in ("detokenizer", "finalize"):
            self.tokenizer.breaks = [None] * (request.n - 1) + [-1 if fault == "finalize" else at]
        try:
            handle = core.submit(request)
        except NeverFits as error:
            assert error.needed_bytes > error.room_bytes
            assert error.limit_bytes == core.ledger.limit_bytes
            return None
        except QueueFull as error:
            assert (error.waiting, error.added) == (opened, request.n)
            assert opened + request.n > MAX_QUEUE
            return None
        finally:
            self.tokenizer.breaks.clear()
        assert opened + request.n <= MAX_QUEUE
        if fault == "sampler":
            last = [s for s in core.admission.sequences.values() if s.handle is handle][-1]
            last.sampler = Broken(last.sampler, at)
        timeout = request.timeout_seconds
        deadline = None if timeout is None else self.now + timeout
        self.asked.append(Asked(request, handle, deadline, fault, at))
        return self.asked[-1]

    @rule(pick=picks, over=st.integers(0, 7), close=st.sampled_from([False] * 5 + [True]))
    def finish_all(self, pick: int, over: int, close: bool) -> None:
        """Finish all; request cached prompts alone; perhaps close."""
        self.run_out()
        if known := self.texts(""):
            text = known[pick % len(known)][: self.kind.most_prompt - over]
            self.ask_alone(text[: len(text) - over] or text)
        if close:
            self.close_core()
            self.open_core()

    def ask_alone(self, prompt: tuple[int, ...]) -> None:
        """Submit a prompt, and check that its reusable part is not computed again.

        Recurrent layers resume at a checkpoint alone, and that is what `explain` says.
        """
        explanation = self.core.view.explain(prompt)
        found = explanation.held_tokens
        if explanation.reusable_tokens is not None:
            found = explanation.reusable_tokens
        gone = self.gone
        asked = self.ask(Request(prompt=prompt, max_tokens=2))
        if asked is None:
            return
        self.run_out()
        (usage,) = [finish.usage for finish in asked.ended]
        if self.gone == gone:
            self.judge_cached(usage.cached_tokens, min(found, len(prompt) - 1))

    @property
    def gone(self) -> int:
        """Number of evicted nodes; while it stays, every match is read."""
        return self.core.view.stats().evicted_nodes

    def judge_cached(self, tokens: int, found: int) -> None:
        assert tokens == found

    # ---- time, and what happens in it

    @rule(
        times=st.integers(1, 12),
        seconds=st.sampled_from([0.0, 0.0, 0.0, 0.5, 5.0]),
        send_later=st.booleans(),
    )
    def step(self, times: int, seconds: float, send_later: bool) -> None:
        self.now += seconds
        self.send_later = send_later
        for _ in range(times):
            self.run_step()

    def run_out(self) -> None:
        """Run until no request is left."""
        for _ in range(4_000):
            if not self.run_step():
                break
        assert self.core.view.idle, "answers that never end"
        self.take_in()
        assert not self.open

    def run_step(self) -> bool:
        due = [a for a in self.open if a.deadline is not None and a.deadline <= self.now]
        mx.reset_peak_memory()
        more = self.core.step(send_later=self.send_later)
        taken = mx.get_peak_memory() - self.others + self.core.ledger.by_class()[Bytes.INDEX]
        assert taken <= self.core.ledger.limit_bytes, "the limit was passed during the step"
        self.core.view.check()
        self.take_in()
        assert all(asked.handle.done for asked in due), "still there after the deadline"
        assert more or self.core.view.idle, "a step that does nothing while somebody waits"
        return more

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if not self.open:
            return
        asked = self.open[pick % len(self.open)]
        asked.cancelled = True
        asked.handle.cancel()
        self.take_in()
        assert asked.handle.done
        asked.handle.cancel()

    @rule(how=st.sampled_from(HOW), times=st.sampled_from([1, 1, 2, 3]))
    def fail_a_step(self, how: Fault, times: int) -> None:
        """Let model calls fail; exactly the sequences in them must fail.

        A call that has a chunk beside answers costs nobody: all are computed again, apart.
        """
        if not self.open:
            return
        times = 1 if how is not runs_out_of_memory else times
        self.faulty.arm(how, times)
        for asked in self.open:
            asked.may_fail.append(PenstockError if how is return_nan_logits else StepFailed)
        before = self.failed
        while self.faulty.times and not self.core.view.idle:
            self.run_step()
        while self.core.postprocessor.failed_in_a_row and not self.core.view.idle:
            self.run_step()  # to the end of what began with these calls
        self.faulty.times = 0
        calls = zip(self.faulty.rows, self.faulty.mixed, strict=True)
        rows = [count for count, mixed in calls if not mixed]
        failed = self.failed - before
        if how is runs_out_of_memory:
            # Of prompts each has a second try; of steps in a row all but the first end an answer.
            assert failed < max(1, len(rows)), "one try again before anybody fails"
        elif how is not return_nan_logits:  # a prompt's logits are not looked at
            assert failed >= sum(rows), "who was in a failed call goes on"
            assert rows or not failed, "nobody is at fault for a call with a chunk"
        for asked in self.open:
            asked.may_fail.clear()

    # ---- room

    @rule(room=st.sampled_from([*ROOMS, None]))
    def set_limit(self, room: int | None) -> None:
        room = self.tight_bytes if room is None else room
        self.set_no_limit_at_all()
        for asked in self.open:
            asked.may_fail.append(NeverFits)
        self.core.set_limit(self.fixed + room)
        self.take_in()
        for asked in self.open:
            asked.may_fail.remove(NeverFits)

    def set_no_limit_at_all(self) -> None:
        """Set a limit below the fixed bytes: refused without change."""
        before = self.core.view.stats()
        with pytest.raises(NeverFits) as caught:
            self.core.set_limit(self.fixed - 1)
        assert caught.value.needed_bytes == self.fixed
        assert caught.value.limit_bytes == self.fixed - 1
        assert self.core.view.stats() == before

    @rule(
        nbytes=st.one_of(st.none(), st.integers(1, 100_000)),
        chosen=blocks,
        salt=st.sampled_from(["", "b", "nobody's"]),
    )
    def give_up(self, nbytes: int | None, chosen: list[int], salt: str) -> None:
        """Evict everything unused, or some, as under memory pressure."""
        self.look(chosen, salt)
        prefixes = self.core.prefixes
        before = self.core.ledger.used_bytes
        if nbytes is None:
            prefixes.clear()
            path = {
                node
                for s in self.core.admission.sequences.values()
                if s.kv.pin
                for node in s.kv.pin.path
            }
            assert set(prefixes.tree) == path
        else:
            freed = prefixes.shrink(nbytes)
            assert before - self.core.ledger.used_bytes == freed
            assert freed >= nbytes or not prefixes.evictable_bytes

    def look(self, chosen: list[int], salt: str) -> None:
        prompt = tuple(t for i in chosen for t in self.kind.pieces[i])
        before = self.core.view.stats(), [(n.id, n.hits) for n in cached_nodes(self.core)]
        held = self.core.view.explain(prompt, salt).held_tokens
        assert held == self.found(prompt, salt)
        size = self.kind.block_size
        assert held // size * size <= self.most_shared(prompt, salt)
        assert before == (self.core.view.stats(), [(n.id, n.hits) for n in cached_nodes(self.core)])

    def found(self, prompt: tuple[int, ...], salt: str) -> int:
        """Return the matched tokens of a prompt: whole blocks, and a partial one."""
        prefixes = self.core.prefixes
        match, hashes = prefixes.find(prompt, salt), prefixes.block_hashes(prompt, salt)
        blocks = match.tokens // self.kind.block_size
        root = hashes[blocks - 1] if blocks else prefixes.root(salt)
        leaf = prefixes.find_partial(match, root, prompt[match.tokens : -1])
        return match.tokens if leaf is None else leaf.end

    def most_shared(self, prompt: tuple[int, ...], salt: str, but: Asked | None = None) -> int:
        """Return the tokens of a prompt that any request of this salt may have computed."""
        most = max((common(prompt, text) for text in self.texts(salt, but)), default=0)
        return most // self.kind.block_size * self.kind.block_size

    def texts(self, salt: str, but: Asked | None = None) -> list[tuple[int, ...]]:
        """Return all prompts and answers of a salt, finished or not."""
        return [
            asked.request.prompt + tuple(choice.tokens)
            for asked in self.asked
            if asked.request.salt == salt and asked is not but
            for choice in asked.handle.choices
        ]

    # ---- what must always hold

    def take_in(self) -> None:
        """Read all pending events, and check the finished answers."""
        for asked in self.asked:
            if asked.handle.done:
                continue
            for event in asked.handle.events():
                assert not any(end.choice == event.choice for end in asked.ended), "after the end"
                if isinstance(event, Finish):
                    asked.ended.append(event)
                    self.judge(asked, event)

    def judge(self, asked: Asked, finish: Finish) -> None:
        """Compare an answer with the reference, as far as it went."""
        if finish.reason == "error":
            self.failed += any(words in str(finish.error) for words in FAULTS)
        request, choice = asked.request, asked.handle.choices[finish.choice]
        said = tuple(choice.tokens)
        if finish.reason == "length" and len(said) < request.max_tokens:
            self.judge_outgrown(request, len(said))
            request = request.model_copy(update={"max_tokens": len(said)})
        right = answer(self.kind, request, finish.choice)
        off = common(said, right.tokens)
        if off >= right.sure:
            return  # from a tie on, nothing can be said
        broken = asked.fault if finish.choice == request.n - 1 else None
        self.judge_text(choice, right, finish.reason)
        self.judge_end(asked, finish, right, broken, len(said))
        usage = finish.usage
        assert usage.prompt_tokens == len(request.prompt)
        # An answer that fails at one of the tokens of a step says none of those behind it.
        behind = self.kind.speculative_tokens if finish.reason == "error" else 0
        assert 0 <= usage.completion_tokens - len(said) <= 1 + behind
        if request.n == 1:
            most = self.most_shared(request.prompt, request.salt, asked)
            size = self.kind.block_size
            assert usage.cached_tokens // size * size <= most, "read what nobody had computed"

    def judge_outgrown(self, request: Request, said: int) -> None:
        """Check that a truncated answer does not fit memory even alone."""
        most = self.core.view.fitting_tokens
        assert len(request.prompt) + said >= most, (
            f"{len(request.prompt)} + {said} tokens, {most} fit"
        )

    def judge_text(self, choice: Choice, right: Answer, reason: str) -> None:
        said = tuple(choice.tokens)
        assert said == right.tokens[: len(said)], f"{said} said, {right.tokens} alone"
        if reason in ("stop", "length"):
            assert (said, choice.text) == (right.tokens, right.text)
        else:
            assert spell(said).startswith(choice.text)
            assert reason == "error" or choice.text == spell(said)

    def judge_end(
        self, asked: Asked, finish: Finish, right: Answer, broken: str | None, said: int
    ) -> None:
        reason, error = finish.reason, finish.error
        if reason == "error":
            due = said if broken == "finalize" else asked.fault_at if broken else None
            mine = due == said and isinstance(error, StepFailed)
            assert mine or isinstance(error, tuple(asked.may_fail)), f"failed by itself: {error!r}"
        elif reason == "cancelled":
            assert asked.cancelled
        elif reason == "timeout":
            assert asked.deadline is not None and asked.deadline <= self.now
        else:
            assert (reason, finish.stop) == (right.reason, right.stop)
            assert finish.usage.completion_tokens == right.drawn
            assert broken != "sampler" or asked.fault_at >= right.drawn, "a fault passed over"
            assert broken != "detokenizer" or asked.fault_at >= len(right.tokens)

    def let_mlx_end(self) -> None:
        """Wait a moment for MLX's own threads, as `settled_memory`. Bytes that are lost do not come
        back however long."""
        until = time.monotonic() + 0.5
        expected = self.others + self.core.view.held_bytes
        while not self.reading_bytes and time.monotonic() < until:
            if mx.get_active_memory() == expected:
                break
            time.sleep(0.001)

    @invariant()
    def account_is_right(self) -> None:
        core = self.core
        core.view.check()
        assert core.ledger.used_bytes <= core.ledger.limit_bytes
        self.let_mlx_end()
        found = mx.get_active_memory() - self.others
        expected = core.view.held_bytes + self.reading_bytes
        assert found == expected, f"{found} bytes in use, {expected} held"
        held = core.view.held_bytes + self.reading_bytes + core.ledger.by_class()[Bytes.INDEX]
        assert held <= core.ledger.used_bytes

    @invariant()
    def nothing_is_lost(self) -> None:
        core = self.core
        owners = {id(s.kv.pin) for s in core.admission.sequences.values() if s.kv.pin is not None}
        assert owners == set(map(id, core.prefixes.tree._pins)), "a pin without an owner"
        reached, families = set(), [core.prefixes.tree._tops]
        while families:
            for node in families.pop().values():
                reached.add(node)
                families.append(node.children)
        assert reached == set(cached_nodes(core)), "nodes that cannot be reached"
        self.take_in()
        stats = core.view.stats()
        open_choices = sum(a.request.n - len(a.ended) for a in self.asked)
        placed = stats.prefilling + stats.restoring + stats.running
        assert stats.waiting + placed + stats.preempted == open_choices
        assert len(core.admission.sequences) == open_choices

    def close_core(self) -> None:
        """Close the core and check that all bytes are released."""
        core = self.core
        evict_all(core)
        self.account_is_right()
        assert core.ledger.used_bytes == self.fixed
        assert core.view.stats().nodes == 0
        weights = weights_bytes_of(core)
        core.close()
        assert settled_memory() == self.before, "something outlives the engine"
        left = {kind: n for kind, n in core.ledger.by_class().items() if n}
        held = {Bytes.WEIGHTS: weights, Bytes.INDEX: core.prefixes.fixed_bytes}
        if core.draft.fixed_bytes:
            held[Bytes.DRAFT] = core.draft.fixed_bytes
        assert left == held

    def teardown(self) -> None:
        try:
            if hasattr(self, "core"):
                self.faulty.times = 0
                self.run_out()
                self.close_core()
        finally:
            if hasattr(self, "core"):
                self.core.close()  # again, or what failed above still works in a folder
            mx.set_cache_limit(self.cache_limit)
            mx.enable_compile()
            gc.enable()


class DrawnMachine(EngineMachine):
    """An engine with independently drawn settings, and a tight or loose limit."""

    @initialize(
        kind=drawn_kinds,
        room=st.sampled_from([*ROOMS, None, None]),
        wishes=st.lists(wishes, min_size=2, max_size=4),
    )
    def begin(self, kind: Kind, room: int | None, wishes: list[Wish]) -> None:
        """Open the engine, and start some requests."""
        self.start(kind, room, wishes)
