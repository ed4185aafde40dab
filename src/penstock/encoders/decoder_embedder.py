"""Decoders that embed, such as Qwen3-Embedding: the last token's hidden state, by the engine.

A text is a prompt of which no token is generated. The KV of its first tokens, such as an
instruction, stays in the prefix tree, where texts with the same beginning find it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from penstock.config import WeightsDtype
from penstock.encoders.bert import LEAST_NORM, EncoderRow
from penstock.encoders.encoder import Encoder, encoder_folder, expected_bytes, load_encoder
from penstock.encoders.encoder_engine import EncoderCounts
from penstock.encoders.encoder_spec import EncoderSpec, read_decoder_spec
from penstock.encoders.encoder_tokens import EncoderTokenizer
from penstock.engine.engine import Engine
from penstock.engine.handle import Handle
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.request import Request
from penstock.engine.turns import Turns
from penstock.engine.view import EngineView, Holdings
from penstock.errors import EngineStopped, PenstockError, StepFailed
from penstock.kv.numpy_arrays import Floats
from penstock.ledger import ModelLedger
from penstock.models.encoder_types import embeds_by_decoder
from penstock.models.headless import drop_head, named_as_written
from penstock.models.mlx_lm import ChangedReader, Loaded, folder_widening, load_folder
from penstock.models.source import MLX_LM, checked_source
from penstock.models.unloading import unload

READER = ChangedReader(named_as_written, drop_head)
AT_ONCE = 16
"""Maximum number of a request's texts in the engine."""
THREADS = 4
"""Number of requests whose texts are in the engine at once."""
LOOK_SECONDS = 0.25
"""Interval at which waiting texts check whether their request was cancelled."""


@dataclass(frozen=True, slots=True)
class DecoderEmbedder:
    """A decoder without an output layer, and its tokenizer."""

    loaded: Loaded
    tokenizer: EncoderTokenizer
    spec: EncoderSpec
    nbytes: int


def load_decoder_embedder(
    path_or_name: str | Path, weights_dtype: WeightsDtype = "auto", limit_bytes: int | None = None
) -> DecoderEmbedder:
    """Load a decoder that embeds, from a folder or a name on the Hugging Face hub.

    Raises:
        ModelError: the folder is incomplete or damaged, or its pooling is not supported.
        NeverFits: the weights alone exceed the limit.
    """
    folder = encoder_folder(path_or_name)
    spec, source = read_decoder_spec(folder), checked_source(folder)
    tokenizer = EncoderTokenizer(folder, spec.most_tokens)
    loaded = load_folder(source, weights_dtype, limit_bytes, READER, MLX_LM, {})
    return DecoderEmbedder(loaded, tokenizer, spec, weight_bytes(loaded.model))


def expected_embedder_bytes(
    path_or_name: str | Path, weights_dtype: WeightsDtype, limit_bytes: int
) -> int:
    """Return the bytes of a decoder's weights once loaded, without reading them.

    Raises:
        ModelError: as `load_decoder_embedder`, if the config or a header shows it.
        NeverFits: the weights alone exceed the limit.
    """
    folder = encoder_folder(path_or_name)
    read_decoder_spec(folder)
    source = checked_source(folder)
    widening = folder_widening(source, weights_dtype, limit_bytes, READER)
    widening.check_limit(folder.name)
    return widening.loaded_bytes


def load_any_encoder(
    path_or_name: str | Path, weights_dtype: WeightsDtype, limit_bytes: int
) -> Encoder | DecoderEmbedder:
    """Load an encoder, or a decoder that embeds."""
    if embeds_by_decoder(path_or_name):
        return load_decoder_embedder(path_or_name, weights_dtype, limit_bytes)
    return load_encoder(path_or_name)


def expected_any_bytes(
    path_or_name: str | Path, weights_dtype: WeightsDtype, limit_bytes: int
) -> int:
    """Return the bytes of weights as `load_any_encoder` loads them, without reading them."""
    if embeds_by_decoder(path_or_name):
        return expected_embedder_bytes(path_or_name, weights_dtype, limit_bytes)
    return expected_bytes(path_or_name, limit_bytes)


class EmbedderEngine:
    """Computes embeddings on an `Engine`, with the interface of `EncoderEngine`. Thread-safe.

    Args:
        ledger: a model's ledger within a pool.
        turns: turns that the engines of one ledger take on the device.
        settings: settings of the engine.

    Raises:
        NeverFits: the weights and the engine's buffers do not fit.
    """

    def __init__(
        self,
        encoder: DecoderEmbedder,
        ledger: ModelLedger,
        turns: Turns,
        settings: Mapping[str, Any],
    ) -> None:
        self.encoder = encoder
        self.counts = EncoderCounts()
        limit = {"memory_limit": ledger.limit_bytes, "ledger": ledger}
        self._engine = Engine(encoder.loaded.model, turns=turns, **{**settings, **limit})
        context = self._engine.ask(lambda view: view.context_tokens).result()
        if context is not None:
            encoder.tokenizer.most_tokens = min(encoder.tokenizer.most_tokens, context)
        self._workers = ThreadPoolExecutor(THREADS, thread_name_prefix="penstock-embed")

    def encode(self, rows: Sequence[EncoderRow]) -> Future[Floats]:
        """Return a future of a float32 array (rows, width); see `EncoderEngine.encode`."""
        answer: Future[Floats] = Future()
        try:
            self._workers.submit(self._encode, rows, answer)
        except RuntimeError:
            answer.set_exception(EngineStopped("the encoder is closed"))
        return answer

    def holdings(self) -> Future[Holdings]:
        """Return a future of the bytes held, read between two engine steps."""
        return self._engine.ask(EngineView.holdings)

    def evict_prefixes(self, nbytes: int) -> Future[int]:
        return self._engine.evict_prefixes(nbytes)

    def set_limit(self, limit_bytes: int) -> None:
        self._engine.set_limit(limit_bytes)

    def check(self) -> None:
        """Recount all memory between two steps; raise AssertionError if a count differs."""
        self._engine.check()

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def hit_tokens(self) -> int:
        """Return the number of tokens whose KV was in the cache, over all texts."""
        return self._engine.stats().hit_tokens

    def close(self) -> None:
        """Fail open requests, release all bytes and drop the weights."""
        self._engine.close()
        self._workers.shutdown(cancel_futures=True)
        unload(self.encoder.loaded.model)

    # ---- workers

    def _encode(self, rows: Sequence[EncoderRow], answer: Future[Floats]) -> None:
        try:
            values = np.empty((len(rows), self.encoder.spec.width), np.float32)
            group = uuid4().hex
            for start in range(0, len(rows), AT_ONCE):
                part = rows[start : start + AT_ONCE]
                computed = self._part(part, group, answer)
                if computed is None:
                    return
                values[start : start + len(part)] = computed
            if self.encoder.spec.normalizes:
                norms = np.linalg.norm(values, axis=-1, keepdims=True)
                values /= np.maximum(norms, LEAST_NORM)
            with suppress(InvalidStateError):  # cancelled meanwhile
                answer.set_result(values)
        except PenstockError as error:
            with suppress(InvalidStateError):
                answer.set_exception(error)
        # A boundary: an unforeseen error fails this request, and is not lost with the thread.
        except Exception:
            with suppress(InvalidStateError):
                answer.set_exception(StepFailed("the encoder has failed"))
            raise

    def _part(
        self, rows: Sequence[EncoderRow], group: str, answer: Future[Floats]
    ) -> list[Floats] | None:
        """Compute some texts; return None if the request was cancelled."""
        began, handles = time.monotonic(), [self._open(row, group) for row in rows]
        try:
            self._engine.enqueue(handles).result()
            for handle in handles:
                while not handle.done:
                    if answer.done():
                        return None
                    with suppress(TimeoutError):
                        handle.result(LOOK_SECONDS)
                handle.result(0.0)
        finally:
            for handle in handles:
                handle.cancel()
        self.counts.rows += len(rows)
        self.counts.tokens += sum(map(len, rows))
        self.counts.batches += 1
        self.counts.seconds += time.monotonic() - began
        return [_embedding(handle) for handle in handles]

    def _open(self, row: EncoderRow, group: str) -> Handle:
        # The last token is a placeholder that is not computed.
        prompt = (*row.tokens, row.tokens[-1])
        return self._engine.open(Request(prompt=prompt, max_tokens=0, embeds=True, group=group))


def _embedding(handle: Handle) -> Floats:
    embedding = handle.embedding
    if embedding is None:
        raise StepFailed("the encoder has failed")
    return embedding
