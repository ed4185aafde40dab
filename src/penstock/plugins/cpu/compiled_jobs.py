"""Compiled loops on two threads that meet within microseconds.

A job is a compiled function of a thread's number and the address of a table of 64-bit integers.
The second thread looks for the next job for about a millisecond, and yields its processor while it
does; then it sleeps.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.cpu_rows import cores

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

TICKET, DONE, HOT, FUNCTION, TABLE, LEAVES = 0, 8, 16, 24, 32, 33
"""Places on a board: the number of the last job, of the last one that the second thread ended,
whether it looks for jobs, the job itself, and the address of a function as in a table. Those that
change are a cache line apart."""
BOARD_WORDS = 40
THREADS, BARRIER, LEAVE = 0, 1, 2
"""First entries of a job's table: number of threads, how often one of them has waited, and the
address of a function that lets another thread run."""
SPINS_BEFORE_YIELD = 200
SPINS_BEFORE_SLEEP = 20_000


@cache
def call(arguments: int) -> Any:
    """Return a function for compiled loops: call an address with so many 64-bit integers."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def call(context: Any, address: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            from numba.core import cgutils

            word = ir.IntType(64)
            kind = ir.FunctionType(ir.VoidType(), [word] * arguments)
            function = builder.inttoptr(given[0], ir.PointerType(kind))
            builder.call(function, cgutils.unpack_tuple(builder, given[1], arguments))
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, arguments)), generate

    return call


@cache
def _atomics() -> tuple[Any, Any, Any]:
    """Return functions for compiled loops on the integer at an address: add, load, and pause."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    word = ir.IntType(64)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")

    @intrinsic  # type: ignore[untyped-decorator]
    def add(context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = builder.inttoptr(values[0], ir.PointerType(word))
            return builder.atomic_rmw("add", place, values[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def load(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = builder.inttoptr(values[0], ir.PointerType(word))
            return builder.load_atomic(place, "seq_cst", align=8)

        return types.int64(types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def pause(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            name, arguments = ("llvm.x86.sse2.pause", []) if is_x86 else ("llvm.aarch64.hint", [1])
            words = [ir.IntType(32)(number) for number in arguments]
            kind = ir.FunctionType(ir.VoidType(), [x.type for x in words])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), words)
            return context.get_dummy_value()

        return types.void(), generate

    return add, load, pause


@cache
def _leave() -> int:
    """Return the address of the C library's function that lets another thread run."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@cache
def barrier() -> Any:
    """Return a function for compiled loops that waits until all threads of a job have come.

    It takes the table's address and how often the thread has waited before; returns one more.
    """
    from numba import njit

    add, load, pause = _atomics()
    spins_before_yield, place, of_leave = SPINS_BEFORE_YIELD, 8 * BARRIER, 8 * LEAVE
    leave = call(1)

    @njit(nogil=True)
    def wait(table, threads, waited):  # type: ignore[no-untyped-def]
        waited += 1
        if threads > 1:
            add(table + place, 1)
            spins = 0
            while load(table + place) < waited * threads:
                pause()
                spins += 1
                if spins % spins_before_yield == 0:
                    leave(load(table + of_leave), (0,))
        return waited

    return wait


@cache
def _board_loops() -> tuple[Any, Any, Any, Any]:
    """Compile the second thread's loop, the start of a job, its end, and a job of one thread."""
    from numba import cfunc, njit, types

    add, load, pause = _atomics()
    run, leave = call(2), call(1)
    ticket, done, hot = 8 * TICKET, 8 * DONE, 8 * HOT
    function, table, leaves = 8 * FUNCTION, 8 * TABLE, 8 * LEAVES
    spins_before_yield, spins_before_sleep = SPINS_BEFORE_YIELD, SPINS_BEFORE_SLEEP

    def serve(board):  # type: ignore[no-untyped-def]
        """Return 0 once the board is closed, 1 after a while without a job."""
        if load(board + hot) == 0:
            add(board + hot, 1)
        spins = 0
        while True:
            if load(board + ticket) != load(board + done):
                if load(board + function) == 0:
                    return 0
                run(load(board + function), (1, load(board + table)))
                add(board + done, 1)
                spins = 0
            elif spins < spins_before_sleep:
                pause()
                spins += 1
                if spins % spins_before_yield == 0:
                    leave(load(board + leaves), (0,))
            else:
                add(board + hot, -1)
                if load(board + ticket) == load(board + done):
                    return 1
                add(board + hot, 1)  # a job came meanwhile
                spins = 0

    @njit(nogil=True)
    def end(board, address, entries):  # type: ignore[no-untyped-def]
        run(address, (0, entries))
        spins = 0
        while load(board + ticket) != load(board + done):
            pause()
            spins += 1
            if spins % spins_before_yield == 0:
                leave(load(board + leaves), (0,))

    def start(board, address, entries):  # type: ignore[no-untyped-def]
        """Return 1 if the job has ended; 0 if the second thread must be woken for it."""
        add(board + function, address - load(board + function))
        add(board + table, entries - load(board + table))
        add(board + ticket, 1)
        if load(board + hot) == 0:
            return 0
        end(board, address, entries)
        return 1

    def finish(board, address, entries):  # type: ignore[no-untyped-def]
        end(board, address, entries)
        return 1

    def alone(address, entries):  # type: ignore[no-untyped-def]
        run(address, (0, entries))
        return 1

    def callable_of(function: Any, arguments: int) -> Any:
        words = [types.int64] * arguments
        address = function_address(
            f"board {function.__name__}", lambda: cfunc(types.int64(*words))(function)
        )
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)

    return (
        callable_of(serve, 1),
        callable_of(start, 3),
        callable_of(finish, 3),
        callable_of(alone, 2),
    )


class Team:
    """The calling thread and a second one, if there are two processors."""

    def __init__(self) -> None:
        self.threads = min(2, cores())
        _, self._start, self._finish, self._alone = _board_loops()
        self._board = np.zeros(BOARD_WORDS, np.int64)
        self._board[LEAVES] = _leave()
        self._address = self._board.ctypes.data
        self._wake = threading.Semaphore(0)
        self._space: Floats = np.empty(0, np.float32)
        if self.threads > 1:
            arguments = (self._board, self._wake)
            name = "penstock-layers"
            threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()

    def __del__(self) -> None:
        if self.threads > 1:
            self._board[FUNCTION] = 0
            self._board[TICKET] += 1
            self._wake.release()

    def space(self, floats: int) -> Floats:
        """Return working memory of at least so many numbers, for one job at a time."""
        if len(self._space) < floats:
            self._space = np.empty(floats, np.float32)
        return self._space

    def run(self, function: int, table: Integers) -> None:
        """Run a job on all threads.

        Args:
            function: address of a function of a thread's number and a table's address.
            table: (n,), whose first entries, up to `LEAVE`, are set here.
        """
        table[THREADS], table[BARRIER], table[LEAVE] = self.threads, 0, _leave()
        entries = table.ctypes.data
        if self.threads == 1:
            self._alone(function, entries)
        elif not self._start(self._address, function, entries):
            self._wake.release()
            self._finish(self._address, function, entries)


def _serve(board: Integers, wake: threading.Semaphore) -> None:
    serve, _, _, _ = _board_loops()
    while True:
        wake.acquire()
        if not serve(board.ctypes.data):
            return


class _OfThread(threading.local):
    team: Team | None = None


_of_thread = _OfThread()


def team() -> Team:
    """Return the team of the calling thread."""
    if _of_thread.team is None:
        _of_thread.team = Team()
    return _of_thread.team


@cache
def array_at() -> Any:
    """Return a function for compiled loops: the float32 array (rows, columns) at an address."""
    from numba import carray, njit

    address_of = pointer()

    @njit(nogil=True)
    def array(address, rows, columns):  # type: ignore[no-untyped-def]
        return carray(address_of(address), (rows, columns), np.float32)

    return array


@cache
def table_at() -> Any:
    """Return a function for compiled loops: the 64-bit integers (count,) at an address."""
    from numba import carray, njit

    address_of = pointer()

    @njit(nogil=True)
    def table(address, count):  # type: ignore[no-untyped-def]
        return carray(address_of(address), (count,), np.int64)

    return table
