"""Parsing and formatting of sizes in bytes. One GB is 10^9 bytes, one GiB 2^30."""

from __future__ import annotations

import re
from decimal import Decimal

from penstock.errors import SettingError

KV_SHARE = 0.25
"""Minimum share of the memory limit for KV and buffers if `auto` converts weights to float32."""
LEAST_BESIDE_BYTES = 32_000_000
"""Minimum bytes beyond the weights in a proposed memory limit."""

_UNITS = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {"B": 1, **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}
_BY_LOWER |= {unit.lower(): 1000**i for i, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Parse a size: "16GB" is 16 x 10^9 bytes, "16GiB" is 16 x 2^30, "16G" is "16GB".

    A bare number is bytes; case and spaces do not matter.

    >>> parse_bytes("1.5GB"), parse_bytes("1 GiB"), parse_bytes(4096)
    (1500000000, 1073741824, 4096)
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SettingError(
            f"{text!r} is not a size; write a number and a unit, like 16GB or 512MiB"
        )
    return int(Decimal(match[1]) * unit)


def round_up(size_bytes: int) -> str:
    """Format a size as a flag value, rounded up.

    >>> round_up(31_000_001), round_up(16_010_000_000)
    ('32MB', '16.1GB')
    """
    if size_bytes < 10**10:
        return f"{-(-size_bytes // 10**6)}MB"
    return f"{-(-size_bytes // 10**8) / 10}GB"


def packed_matrix_bytes(
    rows: int, columns: int, bits: int, group: int, scale_bytes: int = 4, *, sides: int = 2
) -> int:
    """Return the bytes of a matrix of 4, 5, 6 or 8-bit codes, as packed for a CPU.

    Rows are padded to a multiple of 16. Each group of columns has a scale and an offset of
    `scale_bytes` each, or only a scale if `sides` is 1.

    >>> packed_matrix_bytes(32, 32, 5, 32), packed_matrix_bytes(1, 32, 4, 32, 2)
    (896, 320)
    >>> packed_matrix_bytes(1, 32, 4, 32, 2, sides=1)
    288
    """
    numbers = -(-rows // 16) * 16 * columns
    return numbers * max(4, bits) // 8 + sides * scale_bytes * numbers // group


def enough_for(weight_bytes: int) -> str:
    """Return a memory limit sufficient for `weight_bytes`, as a flag value.

    >>> enough_for(98_000_000), enough_for(16_000_000_000)
    ('131MB', '21.4GB')
    """
    beside = max(LEAST_BESIDE_BYTES, int(weight_bytes * KV_SHARE / (1 - KV_SHARE)))
    return round_up(weight_bytes + beside)


def format_bytes(count: int) -> str:
    """Format a size with three or four digits, in powers of 1000.

    >>> format_bytes(147_456)
    '147.5 kB'
    """
    if abs(count) < 1000:
        return f"{count} B"
    value = float(count)
    for prefix in "kMGT":
        value /= 1000
        digits = 1 if abs(value) >= 100 else 2
        if abs(round(value, digits)) < 1000 or prefix == "T":
            break
    return f"{value:,.{digits}f} {prefix}B"
