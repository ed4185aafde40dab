"""`Engine`: the core and the one thread that owns its arrays, its tree and its ledger."""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar, overload

import mlx.core as mx

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.offload.tier_kinds import TIER_KINDS
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.request import Request
from penstock.engine.stats import Cleared, Stats
from penstock.engine.text_calls import (
    Message,
    Text,
    chat_tokens,
    check_length,
    text_request,
    text_tokens,
)
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped, SettingError
from penstock.kv.checks import loaded_model
from penstock.models.template_renderer import TemplateRenderer
from penstock.prefix.explanation import Explanation

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 120.0
"""Longest wait of a call for the engine's thread, which answers between two steps."""
STEP_SECONDS = 600.0
"""Longest step, and longest call between two steps. An engine that takes longer hangs, as MLX may
in an evaluation, and counts as dead."""
IDLE_SECONDS = 0.2
"""Longest sleep of the idle thread."""
CLEAR_SECONDS = 30.0
"""Longest wait of `clear` for the cold tiers."""
SHARED_TIER = "its blocks are shared with other servers, and stay"
DRAIN_SECONDS = 0.05
"""Seconds between two looks of `drain` at the open requests."""

T = TypeVar("T")
Call = tuple[Callable[[], Any], "Future[Any]"]


class Engine:
    """Many sequences on one model, in a fixed amount of memory. Any thread may call it.

    >>> import penstock
    >>> from penstock.recall import MODEL_PATH
    >>> with penstock.Engine(*penstock.load(MODEL_PATH), memory_limit="300MB") as engine:
    ...     engine.chat("The code of the amber falcon is 4821.")
    ...     talk = [{"role": "user", "content": "The code of the amber falcon is 4821."}]
    ...     talk += [{"role": "assistant", "content": "Noted."}]
    ...     talk += [{"role": "user", "content": "What is the code of the amber falcon?"}]
    ...     "".join(engine.chat(talk, stream=True))
    'Noted.'
    '4821.'

    Args:
        model: mlx-lm's.
        tokenizer: mlx-lm's wrapper; None gives answers without text, and no end of sequence.
        memory_limit: bytes, or a text like "16GB", for all that is ever allocated, the weights
            included; by default a share of the device's recommendation.
        max_kv_size: tokens a sequence sees at most.
        keep: first tokens that it always sees; by default 4,096, or half a smaller window.
        max_batch_size: sequences that run at the same time.
        block_size: tokens of a block, the unit of sharing.
        prefill_chunk: tokens of prompts that are read in one step, at most.
        max_stall_ms: milliseconds for which prompts are read between two decode steps, by the
            speed that was measured at their length; 0 is no bound.
        speculative_tokens: most proposed tokens that a step checks for a sequence; 0 is none.
        draft_model: folder, file or name of a small model with the same tokenizer, whose tokens
            are proposed, or the model and its tokenizer as `load` returns them.
        max_queue: answers that may wait.
        memory_threshold: share of the machine's memory, in use by all programs, from which cold
            prefixes are evicted. By default 0.8 to 0.95, more on larger machines. A device with
            memory of its own has 1: then only the engine's own limit counts.
        hot_cache_only: True promises that there is no cold tier.
        ssd_cache_dir, remote_cache: folder or URL of a cold tier; None is none.
        settings: all other fields of `config.EngineSettings`; sizes may be texts.
        group: the processes among which the model was divided; this one is the first.
        fingerprint: identity of everything but the tokens that KV depends on; by default,
            where there is a cold tier, a hash of the weights and of the settings.

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone are over the limit.
        SettingError: a setting is out of its range.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        loaded_model("Engine", model)
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Held to put a call into the queue, and to close the queue for good."""
        self._closed = False
        self._closing = False
        self._templates = TemplateRenderer()
        self._begun_at = time.monotonic()
        """Start of what the thread does now, on the clock of `time.monotonic`."""
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        started: Future[Core] = Future()
        self._calls.put((lambda: Core(model, tokenizer, **settings), started))
        self._thread.start()
        try:
            # Arrays belong to the thread that made them: the core is made there.
            self._core = started.result()
            self._core.intake.grammars.reserve = self._reserve_grammars
        except BaseException:
            self._closing = True
            self._thread.join(ANSWER_SECONDS)
            raise
        atexit.register(self.close)

    @overload
    def generate(self, prompt: str, *, stream: Literal[False] = ..., **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: str, *, stream: Literal[True], **settings: Any) -> Text: ...

    def generate(self, prompt: str, *, stream: bool = False, **settings: Any) -> str | Text:
        """Continue a text, without a chat template.

        Args:
            prompt: the text.
            stream: return an iterator over the text as it becomes certain, and do not wait.
            settings: fields of `Request` and of `Sampling` by their names: `max_tokens`, `stop`,
                `temperature`, `top_p`, `seed`, ... A `stop` may be one text.

        Raises:
            SettingError: there is no such setting, it is out of its range, or no tokenizer.
            PenstockError: as `submit` and `Handle.result`.
        """
        tokens = text_tokens(self._core.tokenizer, prompt)
        return self._text(text_request(tokens, goes_on=True, settings=settings), stream)

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = ...,
        template_args: Mapping[str, Any] | None = ...,
        **settings: Any,
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[True],
        template_args: Mapping[str, Any] | None = ...,
        **settings: Any,
    ) -> Text: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: bool = False,
        template_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> str | Text:
        """Answer a conversation, by the model's chat template.

        Reasoning and calls of tools stay in the text as the model writes them.

        Args:
            messages: `role` and `content` of each, the oldest first; or one text, the user's.
            stream: as in `generate`.
            template_args: arguments of the template, as `enable_thinking`; `tools` are rendered
                where it knows them, and `chat_template` stands in its place.
            settings: as in `generate`.

        Raises:
            SettingError: as `generate`; or a message has no role that templates know.
            ModelError: the model has no chat template, or it refuses the messages, does not end,
                or takes too much memory.
            PenstockError: as `submit` and `Handle.result`.
        """
        tokens = chat_tokens(self._core.tokenizer, messages, template_args or {}, self._templates)
        return self._text(text_request(tokens, goes_on=False, settings=settings), stream)

    def _text(self, request: Request, stream: bool) -> str | Text:
        check_length(request, self._wait(self.ask(lambda view: view.context_tokens)))
        text = Text(self.submit(request))
        if stream:
            return text
        with text:
            return text.rest()

    def submit(self, request: Request) -> Handle:
        """Take a request in and return the handle of its events.

        Raises:
            NeverFits: prompt and answer would not fit, even if all else were evicted.
            QueueFull: too many are waiting.
            SettingError: a token that the model does not have, or a grammar that is none.
            EngineStopped: the engine is closed or being drained, or its thread has died.
        """
        if not isinstance(request, Request):
            raise SettingError(
                f"submit takes a penstock.Request, not a {type(request).__name__}; "
                f"engine.generate and engine.chat take text"
            )
        handle = self.open(request)
        self._wait(self._later(lambda core: core.enqueue(handle)))
        return handle

    def open(self, request: Request) -> Handle:
        """Return a handle whose request is not taken in yet.

        For callers that must not wait: `engine.enqueue([handle])` takes it in. A caller that does
        not wait for that any more cancels the handle. A grammar is compiled here, which may take a
        second the first time: nothing for an event loop's own thread.

        Raises:
            SettingError: the grammar is none.
        """
        constraint = self._core.intake.constraint(request)
        return Handle(request, self._cancel, lambda: self.alive, constraint)

    def enqueue(self, handles: Sequence[Handle]) -> Future[Explanation | None]:
        """Take in the requests of handles that `open` returned, all or none; never waits.

        Returns:
            How far the first prompt matches by now, None if that could not be told; or an error, as
            `submit` raises it.
        """
        return self._later(lambda core: _enqueue(core, handles))

    def ask(self, question: Callable[[EngineView], T]) -> Future[T]:
        """Have the engine's thread answer a question between two steps; never waits.

        In an event loop: `await asyncio.wrap_future(engine.ask(EngineView.stats))`.

        Returns:
            The answer, or the error raised; EngineStopped if the engine is gone before.
        """
        return self._later(lambda core: question(core.view))

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests in, and wait until the open ones have ended.

        Returns:
            Whether they have; if not, `close` cancels them. True if the engine is gone.
        """
        until = time.monotonic() + timeout_seconds
        try:
            self._wait(self._later(lambda core: core.drain()))
            while not self._wait(self.ask(lambda view: view.idle)):
                if time.monotonic() >= until:
                    return False
                time.sleep(DRAIN_SECONDS)
        except EngineStopped:
            pass
        return True

    def stats(self) -> Stats:
        """Return all figures, as they are between two steps."""
        return self._wait(self.ask(EngineView.stats))

    def explain(self, tokens: Sequence[int], salt: str = "") -> Explanation:
        """Return how far a prompt would match now, and why no further."""
        return self._wait(self.ask(lambda view: view.explain(tokens, salt, ask_tiers=True)))

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; the excess goes at once.

        Raises:
            NeverFits: weights, tails and buffers alone are over it.
        """
        self._wait(self._later(lambda core: core.set_limit(limit_bytes)))

    def bound_process(self) -> None:
        """Hold the whole process to the memory limit and 120 MB, not the ledger alone.

        This is for a process that only serves this model. Cold prefixes make room for the memory of
        its libraries, and half of the limit stays the engine's.
        """
        self._wait(self._later(lambda core: core.bound_process()))

    def clear(self, timeout_seconds: float = CLEAR_SECONDS) -> Cleared:
        """Evict all prefixes that no sequence reads, in the cold tiers too, and wait for those.

        Returns:
            How much that was, and which tiers have not removed their blocks, or not within the
            time; they do before anything is read from them.
        """
        cleared, answers = self._wait(self._later(lambda core: core.clear()))
        until = time.monotonic() + timeout_seconds
        for name, answer in answers.items():
            removed, why = None, SHARED_TIER
            if not TIER_KINDS[name].is_shared:
                why = f"it has not ended within {timeout_seconds:.0f} s"
                with suppress(TimeoutError):
                    removed = answer.result(max(0.0, until - time.monotonic()))
                    why = "it is off; its blocks are removed before it is used again"
            if removed is None:
                cleared.pending[name] = why
            else:
                cleared.tier_blocks[name] = removed
        return cleared

    def preload(self) -> int:
        """Restore the most valuable prefixes from the cold tiers, as far as memory is free.

        Returns:
            Tokens that the prefix tree has more than before.
        """
        return self._wait(self._later(lambda core: core.preload()))

    def set_aside_prompts(self, nbytes: int) -> int:
        """Set bytes of the ledger aside for texts and tokens of prompts that a server holds.

        Returns:
            The bytes that were set aside: half of the free bytes at most.
        """
        return self._wait(self._later(lambda core: core.set_aside_prompts(nbytes)))

    def check(self) -> None:
        """Recount everything from the arrays, and raise AssertionError if something differs."""
        self._wait(self.ask(EngineView.check))

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs, and does not hang."""
        return self._thread.is_alive() and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether a step, or a call between two steps, takes longer than `STEP_SECONDS`."""
        return self._thread.is_alive() and time.monotonic() - self._begun_at > STEP_SECONDS

    def close(self) -> None:
        """Cancel open requests, release everything, end the thread. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._templates.close()
        if not self.hangs:
            self._thread.join(ANSWER_SECONDS)
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- between the threads

    def _cancel(self, handle: Handle) -> None:
        self._later(lambda core: core.cancel(handle))

    def _reserve_grammars(self, nbytes: int) -> None:
        if threading.current_thread() is self._thread:
            self._core.reserve_grammars(nbytes)
        else:
            self._wait(self._later(lambda core: core.reserve_grammars(nbytes)))

    def _later(self, call: Callable[[Core], T]) -> Future[T]:
        """Have the engine's thread call `call(core)` between two steps; never waits."""
        answer: Future[T] = Future()
        with self._gate:
            if not (self._closing or self._closed):
                self._calls.put((lambda: call(self._core), answer))
                return answer
        answer.set_exception(EngineStopped("the engine is closed"))
        return answer

    def _wait(self, answer: Future[T]) -> T:
        seconds = ANSWER_SECONDS
        try:
            return answer.result(seconds)
        except TimeoutError:
            if not answer.cancel():  # it is being done, or it raised a TimeoutError of its own
                seconds = STEP_SECONDS
                concurrent.futures.wait([answer], seconds)
                if answer.done():
                    return answer.result()
            raise TimeoutError(
                f"the engine thread did not respond within {seconds:.0f} s; a step may be hung"
            ) from None

    def _run(self) -> None:
        """Run the engine's thread: make the core, then serve calls and run steps until closed."""
        make, started = self._calls.get()
        try:
            try:
                core = make()
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread
                started.set_exception(error)
                return
            self._begun_at = time.monotonic()
            started.set_result(core)
            try:
                worked = False
                while not self._closing:
                    self._serve(wait=core.view.idle and not worked)
                    self._begun_at = time.monotonic()
                    # With nothing to do a step still evicts for other programs.
                    worked = core.step(send_later=True)
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
                core.close(EngineStopped(f"the engine's thread has died: {fault}"))
                raise
            core.close()
        finally:
            self._refuse_calls()
            # A stream whose thread is gone would abort the process when the interpreter ends.
            mx.clear_streams()

    def _serve(self, *, wait: bool) -> None:
        """Execute the queued calls; if `wait`, wait a moment for the first."""
        try:
            call, answer = self._calls.get(timeout=IDLE_SECONDS) if wait else self._calls.get(False)
            while True:
                self._begun_at = time.monotonic()
                try:
                    if answer.set_running_or_notify_cancel():
                        answer.set_result(call())
                except BaseException as error:  # noqa: BLE001 - handed to the caller
                    answer.set_exception(error)
                call, answer = self._calls.get(False)
        except queue.Empty:
            return

    def _refuse_calls(self) -> None:
        with self._gate:
            self._closed = True
        while not self._calls.empty():
            _, answer = self._calls.get()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineStopped("the engine is closed"))


def _enqueue(core: Core, handles: Sequence[Handle]) -> Explanation | None:
    """Take requests in, all or none, and return how far the first one's prompt matches by now."""
    taken: list[Handle] = []
    try:
        core.intake.check_queue(handles)
        block_hashes = []
        for handle in handles:
            block_hashes.append(core.enqueue(handle))
            taken.append(handle)
    except BaseException:
        for handle in taken:
            core.cancel(handle)
        raise
    first = handles[0].request
    try:
        return core.view.explain(first.prompt, first.salt, block_hashes=block_hashes[0])
    # A boundary: an explanation may fail, an answer may not.
    except Exception as error:
        logger.error("a prompt could not be explained: %s", type(error).__name__)
        logger.debug("traceback of the error above", exc_info=error)
        return None


def follow(model: Any, tokenizer: Any, group: ProcessGroup, **settings: Any) -> None:
    """Be a rank of a group but the first: run the steps that rank 0 runs, until it closes.

    Args:
        model: this rank's part.
        tokenizer: as rank 0 has it.
        group: the group.
        settings: of the engine, as rank 0 has them; limits and folders may be this machine's own.

    Raises:
        RanksBroken: this rank cannot go on; the process must end, for the others wait for it.
    """
    core = Core(model, tokenizer, group=group, **settings)
    try:
        while not core.closed:
            core.step()
    except BaseException as error:
        core.close(EngineStopped(f"this rank has failed: {type(error).__name__}: {error}"))
        raise
