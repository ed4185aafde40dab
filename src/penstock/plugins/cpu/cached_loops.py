"""Loops over NumPy arrays, compiled by Numba, whose machine code is cached."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address

KINDS: dict[str, Any] = {"f": np.float32, "i": np.int64, "s": np.int32, "u": np.uint64}
Value: TypeAlias = npt.NDArray[Any] | int


class CachedLoop:
    """A compiled function of arrays and integers. It releases the GIL and returns nothing.

    Args:
        name: name of the function, including all parameters that its code depends on.
        arguments: its arguments, separated by spaces: "i" for an integer, else the dtype of a
            contiguous array, see `KINDS`, and the number of its dimensions, at most three.
        loop: imports Numba and returns the function, compiled by `njit`. Called only if its machine
            code is not cached.
    """

    def __init__(self, name: str, arguments: str, loop: Callable[[], Any]) -> None:
        self._name = f"{name} {arguments}"
        self._arguments = [_Argument(KINDS[a[0]], int(a[1:] or 0)) for a in arguments.split()]
        self._loop = loop
        self._function: Any = None

    @property
    def is_compiled(self) -> bool:
        return self._function is not None

    def compile(self) -> None:
        """Load the machine code, or compile the function, which takes some seconds."""
        address = function_address(self._name, partial(_compile, self._arguments, self._loop))
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)

    def __call__(self, *values: Value) -> None:
        """Run the function.

        Raises:
            TypeError: an array is not contiguous, or has another dtype or number of dimensions.
        """
        words: list[int] = []
        for value, argument in zip(values, self._arguments, strict=True):
            words += argument.words(value)
        table = np.array(words, np.int64)
        if not self.is_compiled:
            self.compile()
        self._function(table.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Argument:
    """An array, or an integer if it has no dimensions."""

    dtype: type[np.generic]
    dimensions: int

    def words(self, value: Value) -> tuple[int, ...]:
        """Return an array's address and shape, or an integer."""
        if isinstance(value, int):
            return (value,)
        fits = value.dtype == self.dtype and value.ndim == self.dimensions
        if not fits or not value.flags.c_contiguous:
            kind = f"{value.dtype} of shape {value.shape} and strides {value.strides}"
            raise TypeError(f"{self.dtype.__name__}, {self.dimensions}-d, contiguous: not {kind}")
        return (value.__array_interface__["data"][0], *value.shape)


def _compile(arguments: Sequence[_Argument], loop: Callable[[], Any]) -> Any:
    from numba import carray, cfunc, njit, types

    call, address_of = loop(), pointer()
    readers, place = [], 0
    for argument in arguments:
        readers.append(_reader(argument, place))
        place += 1 + argument.dimensions
    size = place

    @njit
    def nothing(table):  # type: ignore[no-untyped-def]
        return ()

    def with_next(before: Any, reader: Any) -> Any:
        @njit
        def both(table):  # type: ignore[no-untyped-def]
            return before(table) + (reader(table),)  # noqa: RUF005 - Numba knows no other way

        return both

    values = reduce(with_next, readers, nothing)

    def run(address):  # type: ignore[no-untyped-def]
        call(*values(carray(address_of(address), (size,), np.int64)))

    return cfunc(types.void(types.int64))(run)


def _reader(argument: _Argument, place: int) -> Any:
    """Compile access to an argument, whose words begin at `place`."""
    from numba import carray, njit

    address_of, kind = pointer(), argument.dtype

    def none(table):  # type: ignore[no-untyped-def]
        return table[place]

    def one(table):  # type: ignore[no-untyped-def]
        return carray(address_of(table[place]), (table[place + 1],), kind)

    def two(table):  # type: ignore[no-untyped-def]
        shape = table[place + 1], table[place + 2]
        return carray(address_of(table[place]), shape, kind)

    def three(table):  # type: ignore[no-untyped-def]
        shape = table[place + 1], table[place + 2], table[place + 3]
        return carray(address_of(table[place]), shape, kind)

    return njit((none, one, two, three)[argument.dimensions])
