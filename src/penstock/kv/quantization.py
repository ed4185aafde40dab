"""Rule of quantization: which tokens and layers are encoded, and by which codecs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm

from penstock.config import BLOCK_SIZE
from penstock.errors import SettingError
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Scales
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scales import digest
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape

FORMAT = 2
"""Version of the codecs, to be increased whenever one produces different bits."""


@dataclass(frozen=True, slots=True)
class QuantizationRule:
    scheme: Scheme
    first_tokens: int
    """Number of leading tokens of every prompt that stay raw, in whole blocks."""
    raw_layers: frozenset[int]
    least_tokens: int = 0

    @staticmethod
    def block_size(codec: str | None, every: int = 1) -> int:
        """Return the default block size: a multiple of `every` and of the codec's span."""
        spans = [every]
        if isinstance(codec, str):
            with suppress(ValueError):  # `of` reports invalid names
                spans += [part.span for part in parse_scheme(codec).codecs]
        together = lcm(*spans)
        return -(-BLOCK_SIZE // together) * together

    @classmethod
    def of(
        cls,
        codec: str | None,
        *,
        block_size: int,
        first_tokens: int,
        skip_layers: Collection[int] = (),
        least_tokens: int = 0,
    ) -> QuantizationRule:
        """Return the rule that the settings describe.

        Args:
            codec: name of a scheme; None to encode nothing.
            block_size: tokens per block; blocks are encoded as a whole.
            first_tokens: number of leading tokens that stay raw, rounded up to whole blocks.
            skip_layers: layers that stay raw.
            least_tokens: prompts with fewer tokens stay raw.

        Raises:
            SettingError: a setting is invalid.
        """
        for name, tokens in (
            ("kv_cache_min_quantize_tokens", least_tokens),
            ("kv_cache_raw_first_tokens", first_tokens),
        ):
            if not isinstance(tokens, int):
                raise SettingError(f"{name} must be a whole number, not {tokens!r}")
            if tokens < 0:
                raise SettingError(f"{name} must be at least 0, not {tokens}")
        if codec is None:
            return ALL_RAW
        if not isinstance(codec, str):
            raise SettingError(f"kv_cache_quantization must be a name like '8', not {codec!r}")
        try:
            scheme = parse_scheme(codec)
        except ValueError as error:
            raise SettingError(f"kv_cache_quantization: {error}") from None
        if not scheme.codecs:
            return ALL_RAW
        for part in scheme.codecs:
            if block_size % part.span:
                raise SettingError(
                    f"kv_cache_quantization {scheme.name}: {part.name} encodes {part.span} "
                    f"tokens together, which do not divide a block_size of {block_size}"
                )
        first = -(-first_tokens // block_size) * block_size
        return cls(scheme, first, frozenset(skip_layers), least_tokens)

    @property
    def is_raw(self) -> bool:
        return not self.scheme.codecs

    def scaled(self, measure: Callable[[], tuple[Scales, ...]]) -> QuantizationRule:
        return replace(self, scheme=self.scheme.scaled(measure))

    def encoded(self, segment: Segment, ops: CodeOps) -> Segment:
        return segment.encoded(self.scheme, ops, self.raw_layers)

    @property
    def identity(self) -> str:
        """Key for fingerprints: rules with equal keys encode a prompt to the same bits."""
        layers = ",".join(map(str, sorted(self.raw_layers)))
        scales = f":{digest(self.scheme.scales)}" if self.scheme.scales else ""
        tokens = f"{self.first_tokens}:{self.least_tokens}"
        return f"{FORMAT}:{self.scheme.name}:{layers}:{tokens}{scales}"

    def token_bits(self, shapes: Sequence[LayerShape]) -> tuple[int, int]:
        """Return the bits per token of encoded and of raw sides; SettingError if unsupported."""
        if unknown := sorted(self.raw_layers - set(range(len(shapes)))):
            raise SettingError(
                f"kv_cache_skip_layers {unknown}: the model's layers with keys and values, counted "
                f"without any others, are 0 to {len(shapes) - 1}"
            )
        if not shapes:
            raise SettingError(f"kv_cache_quantization {self.scheme.name}: the model has no KV")
        coded = left = 0
        for number, shape in enumerate(shapes):
            sides = ((self.scheme.keys, shape.key_dim), (self.scheme.values, shape.value_dim))
            for codec, dim in sides:
                if codec is None or number in self.raw_layers:
                    left += shape.kv_heads * dim * shape.dtype.size * 8
                    continue
                try:
                    coded += shape.kv_heads * codec.token_bits(dim)
                except ValueError as error:
                    raise SettingError(
                        f"kv_cache_quantization {self.scheme.name}: layer {number}: {error}"
                    ) from None
        return coded, left


ALL_RAW = QuantizationRule(Scheme("raw", None, None), 0, frozenset())
