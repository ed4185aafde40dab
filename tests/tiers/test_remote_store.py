"""Blocks in a shared remote store: requests and tolerated answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
from objects_in_memory import InMemory
from test_disk_store import chain, keys_of

from penstock.errors import SettingError
from penstock.plugins.remote import RemoteStore, check_url, object_urls, shown
from penstock.plugins.remote import remote_store as store_module
from penstock.prefix.block_hashes import checkpoint_hash, hash_blocks, root_hash
from penstock.tiers.disk import HostArray, Record
from penstock.tiers.record import TOKENS, Target, decode, encode
from penstock.tiers.store import READERS

FINGERPRINT = "a model"
BLOCK = 4


def opened(values: InMemory, **more: object) -> RemoteStore:
    given = {"fingerprint": FINGERPRINT, "timeout_seconds": 5.0, "ttl_seconds": 3_600, **more}
    return RemoteStore(values, **given)  # type: ignore[arg-type]


def blocks(count: int, seed: int = 0) -> list[Record]:
    """Return the blocks of a prompt with their tokens, as the engine writes them."""
    tokens = np.random.default_rng(seed).integers(0, 1_000, count * BLOCK).astype(np.uint32)
    block_hashes = hash_blocks(tokens, BLOCK, root_hash(FINGERPRINT))
    found = []
    for i, record in enumerate(chain(count, seed)):
        of = HostArray("uint32", (BLOCK,), tokens[i * BLOCK :][:BLOCK].view(np.uint8))
        parent = block_hashes[i - 1] if i else root_hash(FINGERPRINT)
        found.append(Record(block_hashes[i], parent, i, {TOKENS: of, **record.arrays}))
    return found


def read(store: RemoteStore, records: Sequence[Record]) -> int:
    """Restore blocks as a request does, and check their contents."""
    rooms = [
        {name: np.zeros_like(array.data) for name, array in record.arrays.items()}
        for record in records
    ]
    targets = [
        {
            name: Target(array.dtype, array.shape, np.array_split(room[name], 3))
            for name, array in record.arrays.items()
        }
        for record, room in zip(records, rooms, strict=True)
    ]
    store.prepare(keys_of(records))
    count = store.restore(keys_of(records), targets)
    for record, room in zip(records[:count], rooms, strict=False):
        assert {name: array.data.tobytes() for name, array in record.arrays.items()} == {
            name: data.tobytes() for name, data in room.items()
        }
    return count


@pytest.mark.parametrize("piece_bytes", [100, 1_001, 10**6])
def test_blocks_of_one_store_are_read_by_other(piece_bytes: int) -> None:
    values, records = InMemory(), blocks(20)
    one, other = opened(values), opened(values, piece_bytes=piece_bytes)
    assert {one.write(record) for record in records} == {"written"}
    assert [one.write(record) for record in records[:2]] == ["known"] * 2
    assert decode(values.values[one.name(records[3].key)]).key == records[3].key
    assert read(other, records) == 20
    assert other.write(records[0]) == "known"
    assert values.puts == 20
    assert set(values.pieces) == {piece_bytes}
    assert other.counts.read_bytes == sum(map(len, values.values.values()))


def test_buffer_bytes_are_four_pieces_per_reader() -> None:
    """Client buffer, response, its slice, and the piece itself."""
    assert store_module.buffer_bytes(1_000) - store_module.buffer_bytes(0) == 4_000 * READERS
    assert store_module.buffer_bytes(0) == 16_384 * 200, "names of values that were seen"


def test_unknown_prompt_takes_one_small_query() -> None:
    values, records = InMemory(), blocks(200)
    store = opened(values)
    values.asked.clear()
    assert store.held(keys_of(records)) == 0
    assert values.asked == [8]
    for record in records:
        store.write(record)
    other = opened(values)
    values.asked.clear()
    assert other.held(keys_of(records)) == 200
    assert values.asked == [8, 64, 128]
    assert other.held(keys_of(records)) == 200
    assert values.asked == [8, 64, 128], "what was seen lately is not asked for again"


def test_shared_store_lists_no_chains() -> None:
    """It is not known which of its values are this server's, or used."""
    store = opened(InMemory())
    store.write(blocks(1)[0])
    assert store.chains(1 << 30) == []


def test_cached_existence_of_keys_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    values, records = InMemory(), blocks(3)
    store = opened(values)
    for record in records:
        store.write(record)
    values.values.clear()
    assert store.held(keys_of(records)) == 3
    now = time.monotonic() + store_module.SEEN_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert store.held(keys_of(records)) == 0


def test_cached_existence_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SEEN_KEYS", 5)
    values = InMemory()
    store = opened(values)
    for record in blocks(9):
        store.write(record)
    assert len(store._seen) == 5


def test_chain_is_read_up_to_first_gap() -> None:
    values, records = InMemory(), blocks(12)
    store = opened(values)
    for record in records:
        store.write(record)
    del values.values[store.name(records[9].key)]
    assert read(opened(values), records) == 9
    assert read(store, records) == 9, "it is a miss for who has seen it, too"
    assert store.counts.missing_blocks == 1
    assert store.write(records[9]) == "written"
    assert read(store, records) == 12


def test_chain_is_rewritten_after_missing_block() -> None:
    values, records = InMemory(), blocks(5)
    store = opened(values)
    for record in records:
        store.write(record)
    values.values.clear()
    assert read(store, records) == 0
    assert [store.write(record) for record in records] == ["written"] * 5


@pytest.mark.parametrize("at", [0, 3, 100])
def test_checkpoints_are_searched_from_end(at: int) -> None:
    values, records = InMemory(), blocks(120)
    store = opened(values)
    for record in records:
        store.write(record)
    assert store.held(keys_of(records), resumable=True) == 0
    states = {"states.0": HostArray("uint8", (4,), np.zeros(4, np.uint8))}
    key = records[at].key
    checkpoint = Record(checkpoint_hash(key), key, at + 1, states)
    store.write(checkpoint)
    assert opened(values).held(keys_of(records), resumable=True) == at + 1
    assert read(store, [checkpoint]) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_record_with_other_tokens_is_removed(depth: int) -> None:
    """The checksum is valid: anyone who may write to the store can make one."""
    values, records, others = InMemory(), blocks(3), blocks(3, seed=1)
    store = opened(values)
    for record in records:
        store.write(record)
    right, wrong = records[depth], others[depth]
    liar = Record(right.key, right.parent, right.depth, wrong.arrays)
    values.values[store.name(right.key)] = encode(liar, FINGERPRINT)
    assert read(store, records) == depth
    assert store.counts.damaged_blocks == 1
    assert store.name(right.key) not in values.values


@pytest.mark.parametrize("piece_bytes", [100, 10**6])
def test_any_flipped_bit_is_detected(piece_bytes: int) -> None:
    values, (record,) = InMemory(), blocks(1)
    store = opened(values, piece_bytes=piece_bytes)
    store.write(record)
    raw = values.values[store.name(record.key)]
    for bit in np.random.default_rng(0).integers(0, 8 * len(raw), 60):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        values.values[store.name(record.key)] = bytes(flipped)
        assert read(store, [record]) == 0, bit
        store.write(record)
    assert store.counts.damaged_blocks == 60
    assert read(store, [record]) == 1


@pytest.mark.parametrize("act", ["get", "has"])
def test_late_response_counts_as_fault(act: str) -> None:
    values, records = InMemory(), blocks(8)
    store = opened(values, timeout_seconds=0.5)
    for record in records:
        store.write(record)
    if act == "has":
        store._seen.clear()
    values.seconds = 0.6
    values.pieces.clear()
    with pytest.raises(TimeoutError, match=r"0\.5 s"):
        read(store, records)
    assert len(values.pieces) <= 2, "the others were not even asked for"


def test_refusing_store_gets_no_more_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    values, records = InMemory(), blocks(4)
    store = opened(values)
    values.takes = False
    assert {store.write(record) for record in records} == {"refused"}
    assert (values.puts, store.counts.refused_blocks) == (1, 4)
    assert store.held(keys_of(records)) == 0
    values.takes = True
    monkeypatch.setattr(store, "_full_until", 0.0)
    assert store.write(records[0]) == "written"


def test_slow_connection_is_closed() -> None:
    values = InMemory()
    values.seconds = 0.02
    with pytest.raises(TimeoutError):
        opened(values, timeout_seconds=0.01)
    assert values.closed == 1


# ---- URLs


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host", "begins with none of redis://"),
        ("redis:/host", "begins with none of redis://"),
        ("secret@host:6379", "begins with none of"),
        ("redis://:se/cret@host", "percent-encoded"),
        ("redis://me:12/secret@host", "percent-encoded"),
        ("redis://:p#secret@host", "percent-encoded"),
        ("redis://host/0?password=secret", "ssl_"),
        ("redis://host:70000", "percent-encoded"),
        ("s3://key:secret@bucket", "environment"),
        ("s3://bucket?secret=1", "environment"),
        ("redis://", "names no store"),
        ("unix://", "names no store"),
        ("file://", "names no store"),
        ("s3://", "names no store"),
    ],
)
def test_invalid_url_is_refused_without_repeating_it(url: str, words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        check_url(url)
    assert "secret" not in str(caught.value) and "cret@" not in str(caught.value)


def test_missing_package_is_named_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_urls, "find_spec", lambda name: None)
    for url, package in (("redis://h", "redis"), ("s3://bucket/folder", "obstore")):
        with pytest.raises(SettingError, match=f"pip install {package}$"):
            check_url(url)


@pytest.mark.skipif(find_spec("redis") is None, reason="redis is not installed")
@pytest.mark.parametrize(
    "url",
    [
        "redis://me:se%20cret@host:6379/3",
        "rediss://:secret@host/0?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=true",
        "unix://:secret@localhost/run/valkey.sock?db=1",
    ],
)
def test_displayed_url_hides_secrets(url: str) -> None:
    check_url(url)
    assert "cret" not in shown(url) and "ssl" not in shown(url)
    assert shown(url).startswith(url.partition("://")[0])
