"""Engines that share prefixes through a real store that hangs, is killed and corrupted.

`A` reads a prompt first; `B` is another process' engine as far as anybody can tell: it shares
nothing with A but the store.
"""

from __future__ import annotations

import logging
import random
import shutil
import signal
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cold_engine
import numpy as np
import pytest
from cold_engine import BLOCK, SOON, files, said, settle, ssd, submit
from core_parts import evict_all, hash_prompt
from engine_faults import VOCABULARY_TOKENS
from numpy.typing import NDArray
from redis_server import RedisServer, free_port
from safetensors.numpy import load

from penstock.engine.core import Core
from penstock.engine.schedule import restoring as restoring_module
from penstock.errors import SettingError
from penstock.plugins.remote import Objects, open_objects
from penstock.plugins.remote import remote_store as store_module
from penstock.prefix.block_hashes import checkpoint_hash, root_hash
from penstock.tiers.disk import HostArray
from penstock.tiers.record import FORMAT, TOKENS, Record, decode, encode, header
from penstock.tiers.worker import ColdTier, TierStats

PROMPT = tuple((7 * i + 3) % VOCABULARY_TOKENS for i in range(200))
"""Twelve whole blocks and eight tokens."""
WHOLE = 12 * BLOCK
FAMILIES = ("llama", "gemma2", "falcon_h1")
"""Plain, with windows, and with recurrent layers, whose checkpoints are records of their own."""
Bytes = NDArray[np.uint8]
PROMPTLY = 10.0
"""Seconds for an answer of a small model whatever the store does, on a machine that others use."""


@pytest.fixture(autouse=True)
def retried_soon(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ColdTier.__init__.__kwdefaults__, "retry_seconds", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a store of each kind."""
    if request.param == "redis":
        return str(request.getfixturevalue("store").url)
    pytest.importorskip("obstore")
    return f"file://{tmp_path}/shared"


def running(
    url: str | None, family: str = "llama", folder: Path | None = None, **settings: Any
) -> Any:
    more = {} if url is None else {"remote_cache": url, "remote_cache_timeout_seconds": SOON}
    return cold_engine.running(folder, family, **{**more, **settings})


def ask(core: Core, tokens: Sequence[int] = PROMPT) -> tuple[tuple[int, ...], float]:
    """Return the answer, and the cached share of the prompt."""
    handle = submit(core, tokens)
    settle(core)
    (found,) = handle.result(0.0)
    usage = found.finish.usage
    return said(handle), usage.cached_tokens / usage.prompt_tokens


def alone(family: str = "llama", tokens: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """Return the answer of an engine with an empty cache."""
    with running(None, family) as core:
        return ask(core, tokens)[0]


def write(url: str, family: str = "llama") -> None:
    """Let engine A prefill the prompt and write it."""
    with running(url, family) as core:
        assert ask(core) == (alone(family), 0.0)


def remote(core: Core) -> TierStats:
    return core.view.stats().tiers["remote"]


def name_of(core: Core, block: int) -> str:
    """Return the name of a block's value."""
    return name(core, hash_prompt(core, PROMPT)[block])


def name(core: Core, key: bytes) -> str:
    return f"{FORMAT}/{root_hash(core.view.fingerprint).hex()}/{key.hex()}.safetensors"


def changed(raw: bytes, change: Callable[[str, Bytes], Bytes]) -> bytes:
    """Return a record with other values and a valid hash."""
    record = decode(raw)
    arrays = {
        of: HostArray(array.dtype, array.shape, change(of, array.data))
        for of, array in record.arrays.items()
    }
    wrong = Record(record.key, record.parent, record.depth, arrays)
    return encode(wrong, header(raw)["fingerprint"])


# ---- what A has read is served to B


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_one_engine_are_reused_by_other(url: str, family: str) -> None:
    expected = alone(family)
    write(url, family)
    with running(url, family) as core:
        text, cached = ask(core)
        assert text == expected
        assert cached >= 0.9
        assert core.view.stats().restored_tokens == WHOLE
        counts = remote(core).counts
        assert counts.written_blocks == 0, "what is there is not written again"
        assert ask(core)[0] == expected
        assert remote(core).counts.read_blocks == counts.read_blocks, "then it is in memory"


def test_socket_and_tls_connections_work(tmp_path: Path) -> None:
    """A local socket, and TLS with a checked certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, *made.split(), *name], check=True, capture_output=True, timeout=60)
    port, socket = free_port(), tmp_path / "socket"
    options = {
        "unixsocket": str(socket),
        "tls-port": str(port),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
        "requirepass": "se cret",
    }
    server = RedisServer(tmp_path, **options)
    try:
        write(f"unix://:se%20cret@localhost{socket}")
        tls = f"rediss://:se%20cret@127.0.0.1:{port}/0"
        with running(f"{tls}?ssl_ca_certs={certificate}") as core:
            assert ask(core) == (alone(), WHOLE / 200)
        with running(tls) as core:
            assert ask(core) == (alone(), 0.0)
            assert "CERTIFICATE_VERIFY_FAILED" in str(remote(core).off)
    finally:
        server.close()


def test_stored_value_is_a_cache_file_and_expires(store: RedisServer) -> None:
    with running(store.url, remote_cache_ttl_seconds=1_000) as core:
        ask(core)
        ask(core)
        names = store.names()
        assert len(names) == 207 // BLOCK
        assert all(name.startswith(f"{FORMAT}/") for name in names)
        assert all(0 < store.client.ttl(name) <= 1_000 for name in names)
        assert store.calls("set") == len(names), "each was sent once"
        arrays = load(store.client.get(name_of(core, 3)))
        assert arrays["tokens"].tolist() == list(PROMPT[3 * BLOCK : 4 * BLOCK])
    with running(store.url, remote_cache_ttl_seconds=5_000) as core:
        ask(core)
    assert all(store.client.ttl(key) > 1_000 for key in names), "what is used stays"


def test_file_store_folder_is_private(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    folder = tmp_path / "shared"
    write(f"file://{folder}")
    assert folder.stat().st_mode & 0o077 == 0
    assert len(files(folder)) == 207 // BLOCK


def test_check_detects_wrong_restored_kv(store: RedisServer) -> None:
    """Negative control: wrong values under a valid hash change the text."""
    write(store.url)
    for each in store.names():
        raw = store.client.get(each)
        store.client.set(each, changed(raw, lambda of, data: data if of == TOKENS else data ^ 0x80))
    with running(store.url) as core:
        assert ask(core)[0] != alone()
        assert core.view.stats().restored_tokens == WHOLE


# ---- with a folder beside it


def test_blocks_missing_in_one_tier_are_restored_from_other(
    store: RedisServer, tmp_path: Path
) -> None:
    expected = alone()
    with running(store.url, folder=tmp_path / "a") as core:
        assert ask(core)[0] == expected
    assert len(files(tmp_path / "a")) == len(store.names()) == 207 // BLOCK
    with running(store.url, folder=tmp_path / "b") as core:
        assert ask(core) == (expected, WHOLE / 200)
        assert remote(core).counts.read_blocks == 12
        ask(core)  # asked for again: worth the disk
        assert len(files(tmp_path / "b")) >= 12
        evict_all(core)
        assert ask(core) == (expected, WHOLE / 200)
        assert remote(core).counts.read_blocks + ssd(core).counts.read_blocks == 24
    store.client.flushall()
    with running(store.url, folder=tmp_path / "b") as core:
        assert ask(core)[0] == expected
        assert core.view.stats().restored_tokens == WHOLE
        ask(core)
    assert len(store.names()) >= 12, "what the store lost comes back from who has it"


def test_hanging_store_does_not_block_disk_hits(
    store: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone()
    with running(store.url, folder=tmp_path / "a") as core:
        ask(core)
    with running(store.url, folder=tmp_path / "a", remote_cache_timeout_seconds=2.0) as core:
        settle(core)
        store.send(signal.SIGSTOP)
        began = time.monotonic()
        handle = submit(core, PROMPT)
        while not handle.ends:
            core.step()
        assert time.monotonic() - began < 1.5, "the store was not waited for"
        assert said(handle) == expected
        assert core.view.stats().restored_tokens == WHOLE
        store.send(signal.SIGCONT)


# ---- tampered with


@pytest.mark.parametrize("block", [0, 5, 11])
@pytest.mark.parametrize("at", ["header", "numbers"])
def test_flipped_bit_is_a_miss_and_rewritten(store: RedisServer, block: int, at: str) -> None:
    expected = alone()
    write(store.url)
    dice = random.Random(block)
    with running(store.url) as core:
        value = name_of(core, block)
        length = store.client.strlen(value)
        head = 8 + int.from_bytes(store.client.getrange(value, 0, 7), "little")
        place = dice.randrange(8, head) if at == "header" else dice.randrange(head, length)
        (byte,) = store.client.getrange(value, place, place)
        store.client.setrange(value, place, bytes([byte ^ 1 << dice.randrange(8)]))
        assert ask(core)[0] == expected
        assert core.view.stats().restored_tokens == block * BLOCK
        assert remote(core).counts.damaged_blocks == 1
        assert remote(core).off is None
    with running(store.url) as core:
        assert ask(core)[0] == expected
        assert core.view.stats().restored_tokens == WHOLE, "it was computed, and written again"


def another_version(raw: bytes) -> bytes:
    return raw.replace(FORMAT.encode(), b"penstock-block-0")


def another_model(raw: bytes) -> bytes:
    return encode(decode(raw), "another model")


def other_tokens(raw: bytes) -> bytes:
    """Return a record of other tokens under this name, with a valid hash."""
    return changed(raw, lambda of, data: data[::-1].copy() if of == TOKENS else data)


def cut_short(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def too_long(raw: bytes) -> bytes:
    return raw + bytes(5_000_000)


def nothing(raw: bytes) -> bytes:
    return b"x"


@pytest.mark.parametrize(
    "change", [another_version, another_model, other_tokens, cut_short, too_long, nothing]
)
def test_corrupted_or_invalid_value_is_a_miss(
    store: RedisServer, change: Callable[[bytes], bytes]
) -> None:
    expected = alone()
    write(store.url)
    with running(store.url) as core:
        value = name_of(core, 4)
        store.client.set(value, change(store.client.get(value)))
        assert ask(core)[0] == expected
        assert core.view.stats().restored_tokens == 4 * BLOCK
        assert (remote(core).counts.damaged_blocks, remote(core).off) == (1, None)


def test_hybrid_without_checkpoint_recomputes(store: RedisServer) -> None:
    expected = alone("falcon_h1")
    write(store.url, "falcon_h1")
    with running(store.url, "falcon_h1") as core:
        keys = hash_prompt(core, PROMPT)
        checkpoint = name(core, checkpoint_hash(keys[-1]))
        place = store.client.strlen(checkpoint) - 100
        (byte,) = store.client.getrange(checkpoint, place, place)
        store.client.setrange(checkpoint, place, bytes([byte ^ 4]))
        assert ask(core) == (expected, 0.0)
        assert remote(core).counts.damaged_blocks == 1


def test_other_fingerprint_finds_nothing(store: RedisServer) -> None:
    write(store.url)
    with running(store.url, max_kv_size=512) as core:
        assert ask(core)[1] == 0.0
    with running(store.url, "gemma2") as core:
        assert ask(core) == (alone("gemma2"), 0.0)


def test_value_evicted_by_store_is_a_miss(store: RedisServer) -> None:
    write(store.url)
    with running(store.url) as core:
        settle(core)
        store.client.delete(name_of(core, 7))
        assert ask(core)[0] == alone()
        assert core.view.stats().restored_tokens == 7 * BLOCK
        evict_all(core)
        store.client.flushall()  # behind the back of who has just seen all of it
        assert ask(core)[0] == alone()
        assert remote(core).counts.missing_blocks >= 1
        assert remote(core).off is None


# ---- killed, hung, slow, full, locked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("act", ["has", "get", "put"])
def test_answers_survive_store_faults(
    store: RedisServer, act: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.plugins.remote.redis_objects import RedisObjects

    monkeypatch.setattr(restoring_module, "ASK_SECONDS", 0.5)
    expected, other = alone(), PROMPT[::-1]
    expected_other = alone(tokens=other)
    write(store.url)
    real = getattr(RedisObjects, act)
    left = [3]

    def strikes(objects: Objects, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            store.send(number)
        return real(objects, *arguments)

    with running(store.url, remote_cache_timeout_seconds=0.5) as core:
        settle(core)
        monkeypatch.setattr(RedisObjects, act, strikes)
        began = time.monotonic()
        handles = [submit(core, PROMPT), submit(core, other)]
        while not all(handle.ends for handle in handles):
            core.step()
            core.view.check()
        assert [said(handle) for handle in handles] == [expected, expected_other]
        assert time.monotonic() - began < PROMPTLY
        until = time.monotonic() + SOON
        while not remote(core).faults:
            core.step()
            assert time.monotonic() < until
        assert left[0] <= 0, "nothing has happened to the store"
        monkeypatch.setattr(RedisObjects, act, real)
        for _ in range(3):  # while it is off nobody waits for it
            evict_all(core)
            assert ask(core)[0] == expected
        if number == signal.SIGKILL:
            store.start()
        else:
            store.send(signal.SIGCONT)
        until = time.monotonic() + SOON
        while remote(core).off is not None:
            assert time.monotonic() < until
            time.sleep(0.01)
        for _ in range(3):
            evict_all(core)
            assert ask(core)[0] == expected
        assert core.view.stats().restored_tokens >= WHOLE, "it is used again"


def test_dead_store_is_logged_once_and_not_awaited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("redis")
    caplog.set_level(logging.WARNING)
    with running("redis://127.0.0.1:1/0") as core:
        for _ in range(3):
            assert ask(core)[0] == alone()
        assert "Connection refused" in str(remote(core).off)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("the remote cache redis://127.0.0.1:1/0 failed; switched off")


def test_wrong_password_is_reported_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path, requirepass="right-one")
    try:
        with running(server.url) as core:
            assert ask(core)[0] == alone()
            assert remote(core).off is None
            shown = repr(core.limits) + repr(core.view.stats())
        with running(server.url.replace("right-one", "wrong-one")) as core:
            assert ask(core) == (alone(), 0.0)
            assert "password" in str(remote(core).off)
            shown += repr(core.limits) + repr(core.view.stats())
    finally:
        server.close()
    assert "switched off" in caplog.text
    for secret in ("right-one", "wrong-one"):
        assert secret not in caplog.text
        assert secret not in shown


def test_full_store_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, **{"maxmemory-policy": "noeviction"})
    try:
        write(server.url)
        server.client.config_set("maxmemory", "100kb")
        with running(server.url) as core:
            assert ask(core)[1] >= 0.9
            other = PROMPT[::-1]
            assert ask(core, other) == (alone(tokens=other), 0.0)
            assert remote(core).counts.refused_blocks > 0
            assert (remote(core).off, remote(core).faults) == (None, 0)
        assert remote(core).counts.refused_blocks > 1
        assert caplog.text.count("pausing writes") == 1
    finally:
        server.close()


@pytest.mark.parametrize("way", ["user", "replica"])
def test_read_only_store_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    server = RedisServer(tmp_path)
    try:
        write(server.url)
        url = server.url
        if way == "user":
            server.client.acl_setuser(
                "reader", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@read"]
            )
            url = server.url.replace("redis://", "redis://reader:pw@")
        else:
            server.client.replicaof("127.0.0.1", str(free_port()))  # of one that is not there
        with running(url) as core:
            assert ask(core)[1] >= 0.9
            other = PROMPT[::-1]
            assert ask(core, other) == (alone(tokens=other), 0.0)
            assert remote(core).counts.refused_blocks > 0
            assert (remote(core).off, remote(core).faults) == (None, 0)
        assert caplog.text.count("pausing writes") == 1
    finally:
        server.close()


def test_clear_keeps_remote_blocks(store: RedisServer) -> None:
    write(store.url)
    with running(store.url) as core:
        ask(core)
        core.clear()
        settle(core)
        assert len(store.names()) == 207 // BLOCK


def test_explain_names_remote_cache(store: RedisServer) -> None:
    write(store.url)
    with running(store.url) as core:
        found = core.view.explain(PROMPT, ask_tiers=True)
        assert (found.held_tokens, found.tier_tokens) == (0, WHOLE)
        assert "192 tokens are in the remote cache" in found.reason


# ---- what it takes


@pytest.mark.parametrize("nbytes", [1_000_000, 4_000_000])
def test_memory_to_read_value_matches_reservation(store: RedisServer, nbytes: int) -> None:
    objects = open_objects(store.url, ttl_seconds=60, timeout_seconds=SOON, put_seconds=SOON)
    store.client.set("value", bytes(20_000_000))
    tracemalloc.start()
    try:
        objects.get("value", 0, nbytes)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        found = objects.get("value", nbytes, nbytes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        objects.close()
    assert found is not None and (found.nbytes, len(found.raw)) == (20_000_000, nbytes)
    assert nbytes < peak - before <= store_module.COPIES * nbytes


def test_value_is_assembled_from_partial_reads(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header may be split over many reads."""
    expected = alone()
    write(store.url)
    monkeypatch.setattr("penstock.plugins.remote.remote_tier.PIECE_BYTES", 1_000)
    with running(store.url) as core:
        assert ask(core) == (expected, WHOLE / 200)
        assert store.calls("getrange") > 10 * 12


# ---- what cannot be


def test_invalid_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(SettingError, match="ssl_") as caught, running("redis://h/0?x=secret"):
        pass
    assert "secret" not in str(caught.value)


def test_hot_cache_only_excludes_remote_cache() -> None:
    with (
        pytest.raises(SettingError, match="hot_cache_only") as caught,
        running("redis://:secret@host", hot_cache_only=True),
    ):
        pass
    assert "secret" not in str(caught.value)
