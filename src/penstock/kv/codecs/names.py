"""Names of codecs in settings: `affine4`, `k8v4`, `kivi4/turbo3.5`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.kv.codecs import affine, turbo
from penstock.kv.codecs.affine import Affine
from penstock.kv.codecs.coded import Codec, Scales
from penstock.kv.codecs.kivi import Kivi
from penstock.kv.codecs.turbo import Turbo

RAW = "raw"
AUTO = {"auto2.5x": "kivi6/turbo6", "auto3.5x": "kivi5/turbo3", "auto5x": "kivi3/turbo2.5"}
"""Codecs of least KL on a real model (docs/real.md) that take so many times less than float16. That
is for heads of a multiple of 64; docs/codecs.md has the codecs for heads of 80, 96 and 112."""
FORMS = (
    "raw; affine2 to affine6 and affine8 (or 2, 3, 4, 5, 6, 8), with g32 or g128 behind it for "
    "other groups than 64; rot2 to rot6, rot8; turbo2, turbo2.5, ..., turbo6, turbo8; "
    "kivi2 to kivi6, kivi8; k8v4, k4v2, k8v4g32, ...; KEYS/VALUES of any two, as "
    "kivi4/turbo3.5; auto2.5x, auto3.5x, auto5x"
)
_AFFINE = re.compile(r"(affine|rot)?([2-8])(?:g(32|64|128))?")
_TURBO = re.compile(r"turbo([1-8])(\.5)?")
_KIVI = re.compile(r"kivi([2-8])")
_PAIR = re.compile(r"k([2-8])v([2-8])(g(?:32|64|128))?")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How keys are held, and how values are; None: as they are."""

    name: str
    keys: Codec | None
    values: Codec | None
    scales: tuple[Scales, ...] = ()
    """Scales of the keys' channels, by layer; empty means 1 everywhere."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs of keys and of values, without None."""
        return tuple(codec for codec in (self.keys, self.values) if codec is not None)

    def scaled(self, measure: Callable[[], tuple[Scales, ...]]) -> Scheme:
        """Return it with the scales that `measure` tells, if the keys' codec can use any."""
        if self.keys is None or not self.keys.takes_scales:
            return self
        scales = measure()
        return replace(self, scales=scales if any(scales) else ())

    def of_layer(self, number: int) -> Scheme:
        """Return the codecs of one layer."""
        if self.keys is None or not self.scales:
            return self
        return replace(self, keys=self.keys.scaled(self.scales[number]), scales=())

    def token_bits(self, key_dim: int, value_dim: int, dtype_bits: int) -> int:
        """Return the bits of one token of one head, both sides.

        Raises:
            ValueError: heads of this size cannot be held so; says why.
        """
        sides = ((self.keys, key_dim), (self.values, value_dim))
        return sum(
            dim * dtype_bits if codec is None else codec.token_bits(dim) for codec, dim in sides
        )

    def ratio(self, key_dim: int, value_dim: int, dtype_bits: int = 16) -> float:
        """Return how many times less it takes than numbers of so many bits."""
        wide = (key_dim + value_dim) * dtype_bits
        return float(Fraction(wide, self.token_bits(key_dim, value_dim, dtype_bits)))


def parse_scheme(text: str) -> Scheme:
    """Return the codecs that a setting names.

    >>> [parse_scheme(text).name for text in ("k8v4", "4", "auto3.5x")]
    ['rot8/rot4', 'affine4', 'kivi5/turbo3']

    Raises:
        ValueError: there is none of this name; says which there are.
    """
    word = text.strip().lower()
    word = AUTO.get(word, word)
    if pair := _PAIR.fullmatch(word):
        group = pair[3] or ""
        word = f"rot{pair[1]}{group}/rot{pair[2]}{group}"
    first, slash, second = word.partition("/")
    keys = _side(first, text, keys=True)
    # Values have no channel that is large in all tokens: what is by channel is for keys alone.
    alike = f"affine{keys.bits}" if isinstance(keys, Kivi) else first
    values = _side(second if slash else alike, text, keys=False)
    if isinstance(values, Kivi):
        raise ValueError(f"{text}: {values.name} is for keys; hold the values as affine or turbo")
    names = [RAW if codec is None else codec.name for codec in (keys, values)]
    named = names[0] if names[0] == names[1] or (not slash and names[1] == alike) else None
    return Scheme(named or "/".join(names), keys, values)


def _side(word: str, text: str, *, keys: bool) -> Codec | None:
    if word == RAW:
        return None
    if (match := _AFFINE.fullmatch(word)) and int(match[2]) in affine.BITS:
        return Affine(int(match[2]), int(match[3] or 64), rotated=match[1] == "rot")
    if match := _TURBO.fullmatch(word):
        bits = int(match[1])
        half = match[2] is not None
        if 1 < bits in turbo.STEPS and (not half or bits + 1 in turbo.STEPS):
            return Turbo(bits, half, unbiased=keys)
    if (match := _KIVI.fullmatch(word)) and int(match[1]) in affine.BITS:
        return Kivi(int(match[1]))
    raise ValueError(f"{text!r} is no codec; there are {FORMS}")
