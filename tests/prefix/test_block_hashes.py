"""Block hashes: equal for equal prefixes only."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prefix import as_tokens, hash_blocks, root_hash
from penstock.prefix.block_hashes import checkpoint_hash, is_hash_of

ROOT = root_hash("model")


def test_chain_hash_matches_docs() -> None:
    """Literal values: records on disk are found by these hashes, so they must never change."""
    raw = np.array([7, 8, 9, 10], "<u4").tobytes()
    first = blake2b(ROOT + raw[:8], digest_size=16).digest()
    second = blake2b(first + raw[8:], digest_size=16).digest()
    assert hash_blocks([7, 8, 9, 10], 2, ROOT) == [first, second]
    assert root_hash("model", "tenant").hex() == "559d29e10eedf58de8effdebe3ce1442"
    assert (
        hash_blocks([1, 2], 2, root_hash("model", "tenant"))[0].hex()
        == "85f74ef1b7cbf8607603da68841440a3"
    )


@settings(derandomize=True, database=None, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.data()
)
def test_hashes_agree_on_common_whole_blocks(
    a: list[int], b: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 5))
    if data.draw(st.booleans()):
        b = a[: data.draw(st.integers(0, len(a)))] + b
    ours, theirs = hash_blocks(a, size, ROOT), hash_blocks(b, size, ROOT)
    assert len(ours) == len(a) // size
    for i, (x, y) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (x == y) == (a[: i * size] == b[: i * size])
    assert len({*ours, *theirs}) == len(
        {tuple(t[: i * size]) for t in (a, b) for i in range(1, len(t) // size + 1)}
    )


def test_chain_continues_from_parent_hash() -> None:
    tokens = list(range(20))
    whole = hash_blocks(tokens, 4, ROOT)
    assert hash_blocks(tokens[8:], 4, whole[1]) == whole[2:]


def test_lists_and_integer_arrays_hash_equally() -> None:
    tokens = [0, 1, 2**31, 2**32 - 1]
    wanted = hash_blocks(tokens, 2, ROOT)
    for dtype in (np.uint32, np.int64, np.uint64, ">u4", ">i8"):
        assert hash_blocks(np.array(tokens, dtype), 2, ROOT) == wanted
    assert hash_blocks(tuple(tokens), 2, ROOT) == wanted
    assert hash_blocks([np.int64(t) for t in tokens], 2, ROOT) == wanted
    every_second = np.repeat(np.array(tokens, np.uint32), 2)[::2]
    assert hash_blocks(every_second, 2, ROOT) == wanted
    assert hash_blocks([], 2, ROOT) == hash_blocks(np.array([], np.int32), 2, ROOT) == []


@pytest.mark.parametrize("tokens", [[-1], [2**32], np.array([-1]), np.array([2**32])])
def test_out_of_range_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"outside of 0\.\.4294967295"):
        as_tokens(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens", [[1.0], ["1"], [[1]], np.array([1.0]), np.array([[1]]), np.array([True])]
)
def test_non_integer_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(TypeError, match="one row of integers"):
        as_tokens(tokens)  # type: ignore[arg-type]


def test_root_hash_separates_fingerprint_and_salt() -> None:
    roots = [
        root_hash(a, b) for a, b in [("m", ""), ("m", "a"), ("ma", ""), ("", "ma"), ("n", "a")]
    ]
    assert len(set(roots)) == len(roots)
    assert root_hash("m", "a") == root_hash(b"m", b"a")
    first = [hash_blocks([1, 2, 3], 3, root)[0] for root in roots]
    assert len(set(first)) == len(first)


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks([1], 0, ROOT)
    with pytest.raises(ValueError, match="16 bytes"):
        hash_blocks([1], 1, b"short")


def test_is_hash_of_depends_on_tokens_parent_and_block_size() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    keys = hash_blocks(tokens, 2, ROOT)
    assert is_hash_of(keys[-1], ROOT, tokens, 4)
    assert is_hash_of(hash_blocks(tokens, 8, ROOT)[0], ROOT, tokens)
    assert is_hash_of(keys[3], keys[1], tokens[4:], 2)
    wrong = (
        (keys[0], ROOT, tokens, 4),
        (keys[-1], keys[0], tokens, 4),
        (keys[-1], ROOT, tokens[::-1], 4),
        (keys[-1], ROOT, tokens, 1),
        (keys[-1], ROOT, tokens, 0),
        (keys[-1], ROOT, tokens, -4),
        (keys[-1], ROOT, tokens[:7], 4),
        (keys[-1], ROOT, tokens[:0], 4),
        (keys[-1], ROOT[:-1], tokens, 4),
    )
    assert [is_hash_of(*one) for one in wrong] == [False] * len(wrong)


def test_checkpoint_hash_differs_from_block_hash() -> None:
    (key,) = hash_blocks([1, 2], 2, ROOT)
    own = checkpoint_hash(key)
    assert len(own) == len(key) and own not in (key, checkpoint_hash(ROOT))
    assert is_hash_of(own, key, None) and not is_hash_of(key, key, None)
    assert not is_hash_of(own, ROOT, None)
