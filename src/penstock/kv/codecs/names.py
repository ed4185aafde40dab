"""Codec names in settings: `affine4`, `k8v4`, `kivi4/turbo3.5`."""

from __future__ import annotations

import re

from penstock.kv.codecs.affine import Affine
from penstock.kv.codecs.coded import Codec
from penstock.kv.codecs.kivi import Kivi
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.codecs.turbo import Turbo

RAW = "raw"
AUTO = {"auto2.5x": "kivi6/turbo6", "auto3.5x": "kivi5/turbo3", "auto5x": "kivi3/turbo2.5"}
"""Codecs with the lowest KL divergence on a real model, by compression ratio over float16.

Figures are in benchmarks/notes/real.md. Valid for head sizes that are a multiple of 64; see
docs/codecs.md for 80, 96 and 112.
"""
CODECS: tuple[type[Codec], ...] = (Affine, Turbo, Kivi)
"""All codecs; to add one, add a file to this folder and an entry here."""
FORMS = "; ".join(
    [
        RAW,
        *(codec.FORMS for codec in CODECS),
        "k8v4, k4v2, k8v4g32, ...",
        f"KEYS/VALUES of any two, such as kivi4/turbo3.5; {', '.join(AUTO)}",
    ]
)
_PAIR = re.compile(r"k([2-8])v([2-8])(g(?:32|64|128))?")


def parse_scheme(text: str) -> Scheme:
    """Return the scheme that a setting names; raises ValueError for other names.

    >>> [parse_scheme(text).name for text in ("k8v4", "4", "auto3.5x")]
    ['rot8/rot4', 'affine4', 'kivi5/turbo3']
    """
    word = text.strip().lower()
    word = AUTO.get(word, word)
    if pair := _PAIR.fullmatch(word):
        group = pair[3] or ""
        word = f"rot{pair[1]}{group}/rot{pair[2]}{group}"
    first, slash, second = word.partition("/")
    keys = _side(first, text, keys=True)
    alike = (keys.of_values if keys is not None else None) or first
    values = _side(second if slash else alike, text, keys=False)
    names = [RAW if codec is None else codec.name for codec in (keys, values)]
    named = names[0] if names[0] == names[1] or (not slash and names[1] == alike) else None
    return Scheme(named or "/".join(names), keys, values)


def _side(word: str, text: str, *, keys: bool) -> Codec | None:
    if word == RAW:
        return None
    for kind in CODECS:
        try:
            codec = kind.parse(word, keys=keys)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from None
        if codec is not None:
            return codec
    raise ValueError(f"{text!r} is not a codec; supported: {FORMS}")
