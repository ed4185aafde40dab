"""Compiled loops on two threads that synchronize within microseconds.

A job is a compiled function of a thread's number and the address of a table of 64-bit integers.
The second thread polls for the next job for about a millisecond, yielding its processor, and then
blocks reading a pipe, to which the first thread writes with the next job. One call of compiled code
starts a job, wakes the second thread and waits for it, so that no Python signal handler can
interrupt it. Closing the pipe ends the second thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
import weakref
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address, library_function
from penstock.plugins.cpu.cpu_rows import cores

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

TICKET, DONE, HOT, FUNCTION, TABLE = 0, 8, 16, 24, 32
"""Indices on a board: number of the last job, number of the last job that the second thread
finished, whether it polls, and the job itself. Variable ones are a cache line apart."""
BOARD_YIELD, READ, READ_END, WRITE, WRITE_END, BYTE = 33, 34, 35, 36, 37, 38
"""Indices on a board of the addresses of C library functions, the ends of the pipe, and a buffer
for a byte from the pipe."""
BOARD_WORDS = 40
THREADS, BARRIER, YIELD = 0, 1, 2
"""First entries of a job's table: number of threads, number of arrivals at barriers, and the
address of `sched_yield`."""
SPINS_BEFORE_YIELD = 200
SPINS_BEFORE_SLEEP = 20_000
LOAD_SECONDS, LOAD_WEIGHT = 0.02, 0.05
"""Time between two readings of the load, and their weight in the mean."""
HIGH, LOW = 0.1, 0.4
"""Mean of free processors for a second thread below which the load is high, or stays high."""


@cache
def call(arguments: int) -> Any:
    """Return a Numba intrinsic that calls an address with `arguments` 64-bit integers.

    It returns a 64-bit integer, which is undefined for functions that return nothing.
    """
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def call(context: Any, address: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            from numba.core import cgutils

            word = ir.IntType(64)
            kind = ir.FunctionType(word, [word] * arguments)
            function = builder.inttoptr(given[0], ir.PointerType(kind))
            return builder.call(function, cgutils.unpack_tuple(builder, given[1], arguments))

        return types.int64(types.int64, types.UniTuple(types.int64, arguments)), generate

    return call


@cache
def _atomics() -> tuple[Any, Any, Any]:
    """Return Numba intrinsics for atomic `add` and `load` at an address, and `pause`."""
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
def barrier() -> Any:
    """Compile a barrier, which waits until all threads of a job have reached it.

    It takes the table's address, the number of threads, and the number of barriers that the thread
    has passed; it returns this number plus 1.
    """
    from numba import njit

    add, load, pause = _atomics()
    spins_before_yield, place, yield_place = SPINS_BEFORE_YIELD, 8 * BARRIER, 8 * YIELD
    call_yield = call(1)

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
                    call_yield(load(table + yield_place), (0,))
        return waited

    return wait


@cache
def board_loops() -> tuple[Any, Any, Any]:
    """Compile the second thread's loop, and runs of a job on both threads and on one.

    Raises ImportError if Numba is needed and cannot be imported.
    """

    def loop(name: str, arguments: int) -> Any:
        address = function_address(f"board {name}", partial(_compile_board_loop, name, arguments))
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)

    return loop("serve", 1), loop("together", 3), loop("alone", 2)


def _compile_board_loop(name: str, arguments: int) -> Any:
    from numba import cfunc, types

    return cfunc(types.int64(*[types.int64] * arguments))(_board_functions()[name])


@cache
def _board_functions() -> dict[str, Any]:
    """Return the uncompiled functions of `board_loops`, by name."""
    add, load, pause = _atomics()
    run, call_yield, call_file = call(2), call(1), call(3)
    ticket, done, hot, function, table = (8 * x for x in (TICKET, DONE, HOT, FUNCTION, TABLE))
    yield_place, byte = 8 * BOARD_YIELD, 8 * BYTE
    read, read_end, write, write_end = (8 * x for x in (READ, READ_END, WRITE, WRITE_END))
    spins_before_yield, spins_before_sleep = SPINS_BEFORE_YIELD, SPINS_BEFORE_SLEEP

    def serve(board):  # type: ignore[no-untyped-def]
        """Run jobs until the pipe is closed."""
        add(board + hot, 1)
        spins = 0
        while True:
            if load(board + ticket) != load(board + done):
                run(load(board + function), (1, load(board + table)))
                add(board + done, 1)
                spins = 0
            elif spins < spins_before_sleep:
                pause()
                spins += 1
                if spins % spins_before_yield == 0:
                    call_yield(load(board + yield_place), (0,))
            else:
                add(board + hot, -1)
                if load(board + ticket) == load(board + done):  # no job was added meanwhile
                    sleep = load(board + read)
                    if call_file(sleep, (load(board + read_end), board + byte, 1)) == 0:
                        return 0
                add(board + hot, 1)
                spins = 0

    def together(board, address, entries):  # type: ignore[no-untyped-def]
        add(board + function, address - load(board + function))
        add(board + table, entries - load(board + table))
        add(board + ticket, 1)
        if load(board + hot) == 0:
            wake = load(board + write)
            call_file(wake, (load(board + write_end), board + byte, 1))
        run(address, (0, entries))
        spins = 0
        while load(board + ticket) != load(board + done):
            pause()
            spins += 1
            if spins % spins_before_yield == 0:
                call_yield(load(board + yield_place), (0,))
        return 0

    def alone(address, entries):  # type: ignore[no-untyped-def]
        run(address, (0, entries))
        return 0

    return {"serve": serve, "together": together, "alone": alone}


class OtherLoad:
    """Mean number of runnable threads of other programs, over about half a second.

    Args:
        file: descriptor of Linux's `/proc/loadavg`; None if there is none, and the load is never
            high.
        processors: number of processors of the machine.
    """

    def __init__(self, file: int | None, processors: int) -> None:
        self._file = file
        self._next_seconds = 0.0
        self._mean = 0.0
        self._is_high = False
        self._free = processors - 1

    def is_high(self, own: int) -> bool:
        """Return whether a second thread would often wait for a processor.

        Args:
            own: number of running threads of the caller.
        """
        now = time.monotonic()
        if self._file is not None and now >= self._next_seconds:
            self._next_seconds = now + LOAD_SECONDS
            try:
                runnable = int(os.pread(self._file, 64, 0).split()[3].partition(b"/")[0])
            except (OSError, ValueError, IndexError):  # another system's file
                self._file, self._is_high = None, False
                return False
            self._mean += LOAD_WEIGHT * (max(0, runnable - own) - self._mean)
            self._is_high = self._mean > self._free - (LOW if self._is_high else HIGH)
        return self._is_high


@cache
def _load_file() -> int | None:
    """Open the file of Linux that has the number of runnable threads; None if there is none."""
    try:
        return os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


class Team:
    """The calling thread and, if there are two processors, a second one, which run jobs.

    While other programs keep the processors busy, the calling thread runs jobs alone: of two
    threads that wait for each other, one would often wait for a processor.

    Args:
        load: load of other programs, by default this machine's.
    """

    def __init__(self, load: OtherLoad | None = None) -> None:
        self.threads = min(2, cores())
        self.active = self.threads
        """Number of threads that run the next job."""
        self._load = OtherLoad(_load_file(), os.cpu_count() or 1) if load is None else load
        _, self._together, self._alone = board_loops()
        self._board = np.zeros(BOARD_WORDS, np.int64)
        self._address = self._board.ctypes.data
        self._space: Floats = np.empty(0, np.float32)
        if self.threads > 1:
            self._read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)  # if the pipe is full, the thread will wake anyway
            self._close = weakref.finalize(self, os.close, write_end)
            self._close.atexit = False
            for name, entry in (("sched_yield", BOARD_YIELD), ("read", READ), ("write", WRITE)):
                self._board[entry] = library_function(name)
            self._board[READ_END], self._board[WRITE_END] = self._read_end, write_end
            arguments = (self._board, self._read_end)
            name = "penstock-layers"
            threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()
            _teams.add(self)

    def space(self, floats: int) -> Floats:
        """Return reusable working memory of at least `floats` float32, for one job at a time."""
        if len(self._space) < floats:
            self._space = np.empty(floats, np.float32)
        return self._space

    def prepare(self, tables: Integers) -> None:
        """Set the entries up to `YIELD` of tables (..., n)."""
        tables[..., THREADS], tables[..., BARRIER] = self.active, 0
        tables[..., YIELD] = self._board[BOARD_YIELD]

    def run(self, function: int, table: Integers) -> None:
        """Run a job on all threads.

        Args:
            function: address of the job.
            table: its table, (n,), whose entries up to `YIELD` are set here.
        """
        self.prepare(table)
        if self.active == 1:
            self._alone(function, table.ctypes.data)
        else:
            self._together(self._address, function, table.ctypes.data)
        if self.threads > 1:  # behind the job, whose other tables have the number of threads, too
            self.active = 1 if self._load.is_high(self.active) else self.threads

    def run_alone(self, function: int, table: Integers) -> None:
        """Run a job on the calling thread only; see `run`."""
        self.prepare(table)
        table[THREADS] = 1
        self._alone(function, table.ctypes.data)

    def go_on_alone(self) -> None:
        """Run further jobs on one thread, after a fork that did not copy the second one."""
        self.threads = self.active = 1
        self._close()
        os.close(self._read_end)


def _serve(board: Integers, read_end: int) -> None:
    serve, _, _ = board_loops()
    serve(board.ctypes.data)
    os.close(read_end)


class _OfThread(threading.local):
    team: Team | None = None


_of_thread = _OfThread()
_teams: weakref.WeakSet[Team] = weakref.WeakSet()
"""All teams of two threads in this process."""


def team() -> Team:
    """Return the team of the calling thread, created on first use."""
    if _of_thread.team is None:
        _of_thread.team = Team()
    return _of_thread.team


def _leave_teams_of_parent() -> None:
    """Close the teams copied by a fork, whose second threads exist only in the parent process."""
    for parents_team in list(_teams):
        parents_team.go_on_alone()
    _teams.clear()
    _of_thread.team = None


os.register_at_fork(after_in_child=_leave_teams_of_parent)


@cache
def array_at() -> Any:
    """Compile access to the float32 array (rows, columns) at an address."""
    from numba import carray, njit

    address_of = pointer()

    @njit(nogil=True)
    def array(address, rows, columns):  # type: ignore[no-untyped-def]
        return carray(address_of(address), (rows, columns), np.float32)

    return array


@cache
def table_at() -> Any:
    """Compile access to the array of 64-bit integers (count,) at an address."""
    from numba import carray, njit

    address_of = pointer()

    @njit(nogil=True)
    def table(address, count):  # type: ignore[no-untyped-def]
        return carray(address_of(address), (count,), np.int64)

    return table
