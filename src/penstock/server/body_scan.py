"""Memory estimate for parsing a JSON body, computed while the body arrives."""

from __future__ import annotations

import re

OBJECT_BYTES = 72
"""Upper bound on the size of an empty object or list."""
ENTRY_BYTES = 40
NAME_BYTES = 100

_WIDE_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
_ESCAPE_BYTES = 3
"""Length of a match of `_WIDE_ESCAPE`, less one: bytes kept in case a part splits an escape."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_NOT_WIDE = bytes(range(0xF0))


class BodyScan:
    r"""Scanner of a JSON body that arrives in parts; linear in time, not recursive.

    >>> scan = BodyScan()
    >>> for part in (b'{"a": [1, "[[[', b'[\\"]", []]}'):
    ...     scan.add(part)
    >>> scan.nbytes, scan.depth
    (25, 3)
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.depth = 0
        self._open = 0
        self._in_text = False
        self._backslash = b""
        """Backslash at the end of the last part, if it escapes the next character."""
        self._objects = 0
        """Bytes of objects, entries and names."""
        self._width = 1
        """Bytes per character that Python needs for the widest character so far."""
        self._end = b""

    @property
    def cost(self) -> tuple[int, int]:
        """Upper bounds on memory during and after parsing, in bytes."""
        size, width = self.nbytes, self._width
        return size * (2 + 3 * width) + self._objects, size * (1 + width) + self._objects

    def add(self, part: bytes) -> None:
        self.nbytes += len(part)
        brackets = part.count(b"[") + part.count(b"{")
        self._objects += OBJECT_BYTES * brackets + ENTRY_BYTES * part.count(b",")
        self._objects += NAME_BYTES * part.count(b":")
        self._widen(part)
        self._descend(part)

    def _widen(self, part: bytes) -> None:
        if self._width == 4:
            return
        if not part.isascii():
            self._width = 4 if part.translate(None, _NOT_WIDE) else max(2, self._width)
        joined = self._end + part
        self._end = joined[-_ESCAPE_BYTES:]
        if b"\\u" in joined:
            self._width = 4 if _WIDE_ESCAPE.search(joined) else max(2, self._width)

    def _descend(self, part: bytes) -> None:
        """Update the depth from brackets outside strings; arbitrary after a syntax error."""
        part = self._backslash + part
        odd = (len(part) - len(part.rstrip(b"\\"))) % 2
        self._backslash = b"\\" if odd else b""
        part = part[: len(part) - odd].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        outside = b"".join(pieces[self._in_text :: 2]).translate(None, _NO_BRACKETS)
        self._in_text ^= len(pieces) % 2 == 0
        depth, deepest = self._open, self.depth
        for bracket in outside:
            depth += 1 if bracket in b"[{" else -1
            if depth > deepest:
                deepest = depth
        self._open, self.depth = depth, deepest
