"""Ledgers of several models within one: nothing passes the limit of all, nothing is lost."""

from __future__ import annotations

import random

import pytest

from penstock.errors import LedgerFull, NeverFits
from penstock.ledger import Kind, Ledger, ModelLedger, Reservation


def test_bytes_of_all_models_share_one_limit() -> None:
    whole = Ledger(1_000)
    first, second = ModelLedger(whole, 0), ModelLedger(whole, 0)
    nodes = first.reserve(Kind.NODES, 700)
    with pytest.raises(LedgerFull, match=r"301 B; 300 B of the limit of 1.00 kB"):
        second.reserve(Kind.TAILS, 301)
    second.reserve(Kind.TAILS, 300)
    assert (whole.used_bytes, first.crowded, second.crowded) == (1_000, True, True)
    nodes.release()
    assert (second.free_bytes, second.crowded) == (700, False)


def test_bytes_of_pinned_models_reduce_limit_of_others() -> None:
    whole = Ledger(1_000)
    pinned, other = ModelLedger(whole, 0), ModelLedger(whole, 0)
    pinned.reserve(Kind.WEIGHTS, 400)
    other.beside_bytes = 400
    assert (other.limit_bytes, other.crowded) == (600, False)
    with pytest.raises(NeverFits, match="601 B can never fit in the limit of 600 B"):
        other.reserve(Kind.TAILS, 601)


def test_advance_is_used_before_free_bytes() -> None:
    whole = Ledger(1_000)
    model, other = ModelLedger(whole, 500), ModelLedger(whole, 0)
    assert (model.free_bytes, other.free_bytes) == (1_000, 500)
    model.reserve(Kind.WEIGHTS, 300)
    assert whole.used_bytes == 500
    model.reserve(Kind.BUFFERS, 250)
    assert whole.used_bytes == 550
    model.end_advance()
    assert whole.by_class()[Kind.WEIGHTS] == 300
    model.close()
    assert whole.used_bytes == 0


def test_lowered_shared_limit_leaves_negative_room() -> None:
    whole = Ledger(1_000)
    first, second = ModelLedger(whole, 0), ModelLedger(whole, 0)
    first.reserve(Kind.NODES, 500)
    second.reserve(Kind.NODES, 300)
    assert whole.set_limit(600) == 200
    assert (first.room_bytes, second.room_bytes) == (-200, -200)
    assert second.set_limit(600) == 200


def test_totals_match_for_random_operations() -> None:
    rng, whole = random.Random(7), Ledger(10_000)
    models = [ModelLedger(whole, 500) for _ in range(3)]
    held: list[tuple[ModelLedger, Reservation]] = []
    for _ in range(2_000):
        model = rng.choice(models)
        try:
            if held and rng.random() < 0.6:
                index = rng.randrange(len(held))
                if rng.random() < 0.5:
                    held[index][1].resize(rng.randrange(3_000))
                else:
                    held.pop(index)[1].release()
            else:
                held.append((model, model.reserve(rng.choice(list(Kind)), rng.randrange(3_000))))
        except (LedgerFull, NeverFits):
            pass
        advances = sum(m._advance.nbytes for m in models)
        assert whole.used_bytes == sum(r.nbytes for _, r in held) + advances <= 10_000
    for model in models:
        recount = dict.fromkeys(Kind, 0)
        for owner, reservation in held:
            recount[reservation.kind] += reservation.nbytes if owner is model else 0
        model.check(recount)
        model.close()
    assert whole.used_bytes == 0
