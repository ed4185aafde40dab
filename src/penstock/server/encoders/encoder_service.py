"""`EncoderService`: access to an encoder from the event loop, shared by its routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.requests import Request as HttpRequest

from penstock.config import ServerSettings
from penstock.encoders.decoder_embedder import EmbedderEngine
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.encoders.encoder_tokens import TextTooLong, TokenizedText
from penstock.kv.numpy_arrays import Floats
from penstock.models.encoder_types import EMBEDDING, RERANK
from penstock.plurals import counted
from penstock.server.access import KEY_HOLDER
from penstock.server.disconnect import until_gone
from penstock.server.problems import BadRequest, ClientGone, ShuttingDown, TimedOut
from penstock.server.prompt_memory import HOLD, PromptMemory
from penstock.server.prompts import STOP
from penstock.server.second_asking import ALONE, ASKING, Asking, GaveWay
from penstock.server.workers import Workers

MAX_WAITING = 512
"""Maximum number of requests that wait to be tokenized."""
NUMBER_BYTES = 36
"""Memory for a number of a response: as float32, as text and as bytes."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Embeddings or scores of a request's texts."""

    values: Floats
    tokens: int
    """Number of tokens computed."""
    truncated: list[dict[str, int]]
    """Index of each truncated text, and its number of tokens before truncation."""


class EncoderService:
    """Serves one encoder. Methods run on the event loop unless noted."""

    def __init__(
        self,
        engine: EncoderEngine | EmbedderEngine,
        settings: ServerSettings,
        model_name: str,
        memory: PromptMemory,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.model_name = model_name
        self.memory = memory
        self.created = int(time.time())
        self.spec = engine.encoder.spec
        self.tokenizer = engine.encoder.tokenizer
        self.nbytes = engine.encoder.nbytes
        self.draining = False
        self.workers = Workers(MAX_WAITING)
        self.open_requests = 0
        self._answers: dict[Future[Floats], Asking] = {}

    @property
    def kinds(self) -> list[str]:
        return list(EMBEDDING if self.spec.embeds else RERANK)

    def change(self, settings: ServerSettings) -> None:
        """Replace the timeouts, from the next request on."""
        self.settings = settings

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads a body or texts in a worker."""
        return await self.workers.read(call, *args, **kwargs)

    async def encode(
        self, http: HttpRequest, tokenize: Callable[[], Sequence[TokenizedText]]
    ) -> Encoded:
        """Tokenize texts in a worker and compute them; stop if the client disconnects.

        Raises:
            BadRequest: raised by `tokenize`.
            TimedOut: the request took longer than `request_timeout_seconds`.
        """
        if self.draining:
            raise ShuttingDown()
        self.open_requests += 1
        try:
            async with asyncio.timeout(self.settings.request_timeout_seconds):
                return await self._encoded(http, tokenize)
        except TimeoutError:
            raise TimedOut() from None
        finally:
            self.open_requests -= 1

    async def _encoded(
        self, http: HttpRequest, tokenize: Callable[[], Sequence[TokenizedText]]
    ) -> Encoded:
        texts = await until_gone(http, self.work(tokenize))
        tokens = sum(len(text.row) for text in texts)
        if (hold := HOLD.get()) is not None:
            hold.keep(NUMBER_BYTES * len(texts) * (self.spec.labels or self.spec.width))
            hold.settle()
        answer = self.engine.encode([text.row for text in texts])
        self._answers[answer] = ASKING.get(ALONE)
        try:
            values = await until_gone(http, asyncio.wrap_future(answer))
        finally:
            del self._answers[answer]
        if (client := KEY_HOLDER.get()) is not None:
            client.tokens += tokens
        truncated = [
            {"index": index, "tokens": text.tokens}
            for index, text in enumerate(texts)
            if text.truncated
        ]
        return Encoded(values, tokens, truncated)

    # ---- the process

    def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for open ones; return whether all ended. Blocking."""
        self.draining = True
        until = time.monotonic() + timeout_seconds
        while self.open_requests and time.monotonic() < until:
            time.sleep(0.02)
        return not self.open_requests

    def cancel_all(self) -> None:
        self.fail_all(ShuttingDown())

    def fail_all(self, error: BaseException) -> None:
        """End open requests with an error. Thread-safe."""
        for answer in list(self._answers):
            with suppress(InvalidStateError):
                answer.set_exception(error)

    def give_way(self) -> None:
        """End the open requests so that the encoder can be evicted; they are retried."""
        for asking in self._answers.values():
            asking.fails = not asking.has_sent
        self.fail_all(GaveWay())

    def close(self) -> None:
        self.workers.close()


def check_client() -> None:
    """Raise ClientGone if the client of this request has disconnected. Worker thread."""
    if (stop := STOP.get()) is not None and stop.is_set():
        raise ClientGone("the client has closed the connection")


@contextmanager
def reported_lengths(param: str) -> Iterator[None]:
    """Turn TextTooLong into a BadRequest that names both lengths."""
    try:
        yield
    except TextTooLong as error:
        raise BadRequest(
            f"{param}: {counted(error.tokens, 'token')} are more than this model's maximum context "
            f"length of {error.most_tokens} tokens; send less, or truncate: true",
            code="context_length_exceeded",
            param=param,
        ) from None


def hold_tokens(texts: Sequence[TokenizedText]) -> None:
    """Hold memory for the tokens until the response is written."""
    if (hold := HOLD.get()) is not None:
        hold.add_tokens(sum(len(text.row) for text in texts))
