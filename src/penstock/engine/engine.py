"""`Engine`: a thread-safe interface to the core, which runs on its own thread."""

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
    check_answer,
    check_length,
    text_request,
    text_tokens,
)
from penstock.engine.turns import Turns
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped, SettingError
from penstock.kv.checks import loaded_model
from penstock.models.constants import evaluate
from penstock.models.image_reader import ImageReader, image_reader
from penstock.models.template_renderer import TemplateRenderer
from penstock.prefix.explanation import Explanation

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 120.0
"""Timeout of a call to the engine's thread, which serves calls between steps."""
STEP_SECONDS = 600.0
"""Seconds after which a step or call counts as hung, and the engine as dead. MLX evaluations may
hang."""
IDLE_SECONDS = 0.2
CROWDED_SECONDS = 0.005
"""Maximum wait for a call while requests wait for memory of other models."""
CLEAR_SECONDS = 30.0
"""Default timeout of `clear` for the cold tiers."""
SHARED_TIER = "its blocks are shared with other servers, and stay"
DRAIN_SECONDS = 0.05
"""Interval at which `drain` checks for open requests."""

T = TypeVar("T")
Call = tuple[Callable[[], Any], "Future[Any]"]


class Engine:
    """Engine that runs many sequences on one model in a fixed amount of memory. Thread-safe.

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
        model: model, as loaded by mlx-lm.
        tokenizer: mlx-lm's tokenizer wrapper; None disables text output and end-of-sequence tokens.
        memory_limit: limit of all allocated memory, weights included, in bytes or as a string like
            "16GB"; by default a share of the device's recommended size.
        max_kv_size: maximum number of tokens that a sequence attends to.
        keep: number of first tokens that stay visible; by default 4,096, or half a smaller window.
        max_batch_size: maximum number of sequences that run at the same time.
        block_size: number of tokens per block, the unit of prefix sharing.
        prefill_chunk: maximum number of prompt tokens computed in one step.
        max_stall_ms: maximum milliseconds of prefill between two decode steps, estimated from
            measured speed; 0 means no limit.
        speculative_tokens: maximum number of proposed tokens per sequence and step; 0 disables
            speculative decoding.
        draft_model: folder, file or name of a small model with the same tokenizer that proposes
            tokens, or a pair of model and tokenizer as returned by `load`; or "mtp" for the
            multi-token head of `model`, loaded with `mtp=True`.
        max_queue: maximum number of waiting answers.
        memory_threshold: share of the machine's memory, in use by all programs, from which cold
            prefixes are evicted. By default 0.8 to 0.95, more on larger machines. On a device with
            its own memory, it is 1: only the engine's own limit applies.
        hot_cache_only: True asserts that no cold tier is configured.
        ssd_cache_dir, remote_cache: folder or URL of a cold tier; None disables it.
        settings: any other fields of `config.EngineSettings`; sizes may be strings.
        group: processes among which the model is divided; this process is the first.
        ledger: a `ModelLedger` if several engines share a limit; by default, a new ledger.
        turns: mutual exclusion of the engines that share a ledger; required with `ledger`.
        fingerprint: identifies everything besides the tokens that KV depends on; with a cold tier
            it defaults to a hash of the weights and the settings.

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone exceed the memory limit.
        SettingError: a setting is out of range.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, turns: Turns | None = None, **settings: Any
    ) -> None:
        loaded_model("Engine", model)
        evaluate(model)
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Guards `_calls` against additions once the engine has closed."""
        self._closed = False
        self._closing = False
        self._templates = TemplateRenderer()
        self._turns = Turns() if turns is None else turns
        self._begun_at = time.monotonic()
        """Start of the current step or call, on the clock of `time.monotonic`."""
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
        """Generate a continuation of a text, without a chat template.

        Args:
            prompt: text to continue.
            stream: whether to return an iterator over the text at once, instead of the whole text.
            settings: fields of `Request` and `Sampling` by name, such as `max_tokens`, `stop`,
                `temperature`, `top_p` and `seed`. `stop` may be a single string.

        Raises:
            SettingError: a setting is unknown or out of range, or the engine has no tokenizer.
            PenstockError: raised by `submit` or `Handle.result`.
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
        """Generate the next message of a conversation, with the model's chat template.

        Reasoning and tool calls stay in the text as the model writes them.

        Args:
            messages: dicts with `role` and `content`, oldest first; or one string, the user's text.
            stream: as in `generate`.
            template_args: template arguments such as `enable_thinking`; `tools` are rendered if the
                template supports them, and `chat_template` replaces the template.
            settings: as in `generate`.

        Raises:
            SettingError: as in `generate`; or a message has an unknown role.
            ModelError: the model has no chat template, or the template rejects the messages, does
                not terminate, or takes too much memory.
            PenstockError: raised by `submit` or `Handle.result`.
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
        """Queue a request and return its handle.

        An answer ends before `max_tokens` if its sequence runs out of memory. A `max_tokens` above
        both the model's context and `max_kv_size` is refused, except `Request.ENDLESS`; `open`
        accepts any number.

        Raises:
            NeverFits: prompt and answer would not fit, even if everything else were evicted.
            QueueFull: the queue is full.
            SettingError: a token is outside the vocabulary, the grammar is invalid, or `max_tokens`
                is more than an answer could have.
            EngineStopped: the engine is closed or draining, or its thread has died.
        """
        if not isinstance(request, Request):
            raise SettingError(
                f"submit takes a penstock.Request, not a {type(request).__name__}; "
                f"engine.generate and engine.chat take text"
            )
        handle = self.open(request)

        def enqueue(core: Core) -> None:
            check_answer(request, core.view.context_tokens, core.limits.max_kv_size)
            core.enqueue(handle)

        self._wait(self._later(enqueue))
        return handle

    def open(self, request: Request) -> Handle:
        """Create the handle of a request without queuing the request.

        For callers that must not wait: `engine.enqueue([handle])` queues the request. A caller that
        stops waiting for `enqueue` must cancel the handle. A grammar is compiled here, which may
        take a second the first time: do not call this on the thread of an event loop.

        Raises:
            SettingError: the grammar is invalid, or there is no such adapter.
        """
        request = self._core.intake.keyed(request)
        constraint = self._core.intake.constraint(request)
        return Handle(request, self._cancel, lambda: self.alive, constraint)

    def enqueue(self, handles: Sequence[Handle]) -> Future[Explanation | None]:
        """Queue the requests of handles returned by `open`, all or none; never waits.

        Returns:
            A future of the first prompt's prefix match, None if explaining it failed. It raises the
            errors of `submit`.
        """
        return self._later(lambda core: _enqueue(core, handles))

    def ask(self, question: Callable[[EngineView], T]) -> Future[T]:
        """Call `question` on the engine's thread between two steps; never waits.

        In an event loop: `await asyncio.wrap_future(engine.ask(EngineView.stats))`.

        Returns:
            A future of the answer or the error raised; EngineStopped if the engine stops first.
        """
        return self._later(lambda core: question(core.view))

    def drain(self, timeout_seconds: float) -> bool:
        """Stop accepting requests, and wait until the open ones have finished.

        Returns:
            False if requests are still open at the timeout; `close` cancels them. True if the
            engine has stopped.
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
        return self._wait(self.ask(EngineView.stats))

    def explain(
        self, tokens: Sequence[int], salt: str = "", *, adapter: str | None = None
    ) -> Explanation:
        """Explain how much of a prompt the cache matches now, and why it matches no more."""
        return self._wait(
            self.ask(lambda view: view.explain(tokens, view.salted(salt, adapter), ask_tiers=True))
        )

    def set_limit(self, limit_bytes: int) -> None:
        """Change the memory limit; evict and preempt at once until it is met.

        Raises:
            NeverFits: weights, tails and buffers alone exceed the new limit.
            SettingError: the model is divided among several processes.
        """
        self._wait(self._later(lambda core: core.set_limit(limit_bytes)))

    def bound_process(self) -> None:
        """Keep the resident memory of the process within the memory limit plus 120 MB.

        Use it in a process that only serves this model. Cold prefixes are evicted to make room for
        the memory of libraries; half of the limit always remains for the engine.
        """
        self._wait(self._later(lambda core: core.bound_process()))

    def clear(self, timeout_seconds: float = CLEAR_SECONDS) -> Cleared:
        """Evict all prefixes not in use by a sequence, from memory and from the cold tiers.

        Returns:
            The evicted nodes, bytes and blocks, and the tiers that have not removed their blocks in
            time. A late tier removes them before it is read again.
        """
        cleared, answers = self._wait(self._later(lambda core: core.clear()))
        until = time.monotonic() + timeout_seconds
        for name, answer in answers.items():
            removed, why = None, SHARED_TIER
            if not TIER_KINDS[name].is_shared:
                why = f"it did not finish within {timeout_seconds:.0f} s"
                with suppress(TimeoutError):
                    removed = answer.result(max(0.0, until - time.monotonic()))
                    why = "it is off; its blocks are removed before it is used again"
            if removed is None:
                cleared.pending[name] = why
            else:
                cleared.tier_blocks[name] = removed
        return cleared

    def evict_prefixes(self, nbytes: int) -> Future[int]:
        """Evict the least valuable prefixes; never waits. Returns a future of the bytes freed."""
        return self._later(lambda core: core.evict_prefixes(nbytes))

    def preload(self) -> int:
        """Restore the most valuable prefixes from the cold tiers; return the tokens added."""
        return self._wait(self._later(lambda core: core.preload()))

    def set_aside_prompts(self, nbytes: int) -> int:
        """Reserve memory for a server's prompts, at most half of what is free; return the bytes."""
        return self._wait(self._later(lambda core: core.set_aside_prompts(nbytes)))

    def check(self) -> None:
        """Recount all memory from the arrays, and raise AssertionError if a count differs."""
        self._wait(self.ask(EngineView.check))

    @property
    def alive(self) -> bool:
        """Whether the engine's thread is running and does not hang."""
        return self._thread.is_alive() and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether the current step or call has taken longer than `STEP_SECONDS`."""
        return self._thread.is_alive() and time.monotonic() - self._begun_at > STEP_SECONDS

    @property
    def image_reader(self) -> ImageReader | None:
        """The model's image processor; None if this engine accepts only text."""
        core = self._core
        return image_reader(core.runner.model) if core.group.size == 1 else None

    def close(self) -> None:
        """Cancel open requests, free all memory and end the thread. Idempotent."""
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
        """Call `call(core)` on the engine's thread between two steps; never waits."""
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
            if not answer.cancel():  # it is running, or raised a TimeoutError itself
                seconds = STEP_SECONDS
                concurrent.futures.wait([answer], seconds)
                if answer.done():
                    return answer.result()
            raise TimeoutError(
                f"the engine thread did not respond within {seconds:.0f} s; a step may be hung"
            ) from None

    def _run(self) -> None:
        """Run the engine's thread: create the core, then serve calls and run steps until closed."""
        make, started = self._calls.get()
        try:
            try:
                with self._turns.turn(self):  # it measures peak memory, which is per process
                    core = make()
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread
                started.set_exception(error)
                return
            self._begun_at = time.monotonic()
            started.set_result(core)
            try:
                worked = False
                while not self._closing:
                    first = self._next_call(self._wait_seconds(core, worked))
                    self._begun_at = time.monotonic()  # waiting for the turn counts, too
                    with self._turns.turn(self):
                        worked = self._work(core, first)
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
                with self._turns.turn(self):
                    core.close(EngineStopped(f"the engine's thread has died: {fault}"))
                raise
            with self._turns.turn(self):
                core.close()
        finally:
            self._turns.forget(self)
            self._refuse_calls()
            # A stream whose thread is gone would abort the process when the interpreter ends.
            mx.clear_streams()

    def _work(self, core: Core, call: Call | None) -> bool:
        """Serve calls and run steps until the turn ends; return whether the last step had work."""
        while True:
            self._serve(call)
            self._begun_at = time.monotonic()
            # Even an idle step evicts prefixes when other programs need memory.
            shared = self._turns.is_contended
            worked = core.step(send_later=not shared, shared=shared, pending=self._is_pending)
            if self._closing or not worked or self._turns.is_over(self):
                core.send()
                return worked
            call = self._next_call(0)

    def _is_pending(self) -> bool:
        return self._closing or self._turns.is_contended or not self._calls.empty()

    @staticmethod
    def _wait_seconds(core: Core, worked: bool) -> float:
        if worked:
            return 0
        if core.view.idle:
            return IDLE_SECONDS
        return CROWDED_SECONDS if core.ledger.crowded else 0

    def _next_call(self, seconds: float) -> Call | None:
        try:
            return self._calls.get(timeout=seconds) if seconds else self._calls.get(False)
        except queue.Empty:
            return None

    def _serve(self, call: Call | None) -> None:
        """Execute a call and all calls queued after it."""
        while call is not None:
            make, answer = call
            self._begun_at = time.monotonic()
            try:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(make())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                answer.set_exception(error)
            call = self._next_call(0)

    def _refuse_calls(self) -> None:
        with self._gate:
            self._closed = True
        while not self._calls.empty():
            _, answer = self._calls.get()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineStopped("the engine is closed"))


def _enqueue(core: Core, handles: Sequence[Handle]) -> Explanation | None:
    """Queue requests, all or none, and explain the prefix match of the first prompt."""
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
        return core.view.explain(first.keyed_prompt, first.salt, block_hashes=block_hashes[0])
    # A failed explanation must not fail the request.
    except Exception as error:
        logger.error("could not explain the cache hits of a prompt: %s", type(error).__name__)
        logger.debug("traceback of the failed explanation", exc_info=error)
        return None


def follow(model: Any, tokenizer: Any, group: ProcessGroup, **settings: Any) -> None:
    """Run a rank other than 0: repeat the steps of rank 0 until it closes.

    Args:
        model: this rank's part of the model.
        tokenizer: same tokenizer as on rank 0.
        group: process group of the ranks.
        settings: engine settings of rank 0; limits and folders may differ on this machine.

    Raises:
        RanksBroken: this rank cannot continue; its process must exit, as the other ranks wait for
            it.
    """
    core = Core(model, tokenizer, group=group, **settings)
    try:
        while not core.closed:
            core.step()
    except BaseException as error:
        core.close(EngineStopped(f"this rank has failed: {type(error).__name__}: {error}"))
        raise
