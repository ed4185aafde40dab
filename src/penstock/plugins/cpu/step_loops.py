"""Compiled jobs of a forward pass: storing new keys and values, and running jobs in sequence."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from penstock.plugins.cpu.attention_tiles import HALF_BYTES, halve_function
from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import array_at, barrier, call, table_at


class AppendTable(IntEnum):
    """Table entries of the job that scales queries and stores new keys and values."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    ROWS = 3
    SIDES = 4
    """Queries, keys and values, (rows, stride) float32, from columns 0, KEYS and VALUES on."""
    STRIDE = 5
    KEYS = 6
    VALUES = 7
    HEADS = 8
    KV_HEADS = 9
    KEY_DIM = 10
    VALUE_DIM = 11
    SCALE = 12
    """Address of the scale of the attention scores, float32."""
    QUERIES = 13
    """Result: scaled queries, (rows, heads, key_dim) float32."""
    PLACES = 14
    """Address of a row's first key, bytes between heads, and both for values, (rows, 4)."""
    NUMBER_BYTES = 15
    """Bytes of an element of the stored keys and values: 4 for float32, 2 for float16."""


class ProgramTable(IntEnum):
    """Table entries of the job that runs other jobs in sequence."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    JOBS = 3
    """Addresses of each job and of its table, (count, 2)."""
    COUNT = 4


@cache
def append_loop() -> int:
    """Compile the job of `AppendTable`; return its address."""
    return function_address("append", _compile_append)


def _compile_append() -> Any:
    from numba import carray, cfunc, njit, types

    array, table_of, address_of, words = array_at(), table_at(), pointer(), len(AppendTable)
    (THREADS, _, _, ROWS, SIDES, STRIDE, KEYS, VALUES, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, SCALE,
     QUERIES, PLACES, NUMBER_BYTES) = map(int, AppendTable)  # fmt: skip
    halve, half_bytes = halve_function(), HALF_BYTES

    @njit(nogil=True)
    def copy_heads(from_address, heads, dim, address, head_bytes, nbytes):  # type: ignore[no-untyped-def]
        if nbytes == half_bytes:
            for head in range(heads):
                halve((from_address + 4 * head * dim, address + head * head_bytes, dim))
            return
        row = array(from_address, 1, heads * dim)[0]
        for head in range(heads):
            into = array(address + head * head_bytes, 1, dim)[0]
            for place in range(dim):  # assigning arrays may raise, for which Numba allocates
                into[place] = row[head * dim + place]

    def append(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        rows, kv_heads = table[ROWS], table[KV_HEADS]
        sides = array(table[SIDES], rows, table[STRIDE])
        queries = array(table[QUERIES], rows, table[HEADS] * table[KEY_DIM])
        places = carray(address_of(table[PLACES]), (rows, 4), np.int64)
        scale = array(table[SCALE], 1, 1)[0, 0]
        for row in range(thread, rows, table[THREADS]):
            for number in range(queries.shape[1]):
                queries[row, number] = sides[row, number] * scale
            of_row = table[SIDES] + 4 * row * table[STRIDE]
            copy_heads(of_row + 4 * table[KEYS], kv_heads, table[KEY_DIM], places[row, 0],
                       places[row, 1], table[NUMBER_BYTES])  # fmt: skip
            copy_heads(of_row + 4 * table[VALUES], kv_heads, table[VALUE_DIM], places[row, 2],
                       places[row, 3], table[NUMBER_BYTES])  # fmt: skip

    return cfunc(types.void(types.int64, types.int64))(append)


@cache
def program_loop() -> int:
    """Compile the job of `ProgramTable`; return its address."""
    return function_address("program", _compile_program)


def _compile_program() -> Any:
    from numba import carray, cfunc, types

    table_of, address_of, wait, run = table_at(), pointer(), barrier(), call(2)
    words, (threads, _, _, of_jobs, count) = len(ProgramTable), map(int, ProgramTable)

    def program(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        jobs = carray(address_of(table[of_jobs]), (table[count], 2), np.int64)
        waited = 0
        for number in range(len(jobs)):
            run(jobs[number, 0], (thread, jobs[number, 1]))
            waited = wait(address, table[threads], waited)

    return cfunc(types.void(types.int64, types.int64))(program)
