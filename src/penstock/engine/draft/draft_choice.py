"""Choice of what drafts tokens: nothing, a head or drafter of the model, or a draft model."""

from __future__ import annotations

from typing import Any

from penstock.engine.draft.draft import Draft, NoDraft
from penstock.engine.draft.draft_parts import DRAFT_SETTING, open_draft_model
from penstock.engine.draft.head_draft import BlockDraft, HeadDraft
from penstock.engine.foundation import Foundation
from penstock.engine.schedule.kv_stores import KVStores
from penstock.errors import SettingError
from penstock.models.head_source import head_of


def open_draft(source: Any, tokenizer: Any, base: Foundation, stores: KVStores) -> Draft | NoDraft:
    """Open what proposes tokens beside known text; `NoDraft` if `source` is None.

    Args:
        source: see `draft_model` of `Engine`.
        tokenizer: tokenizer of the main model.

    Raises:
        LedgerFull, ModelError: see `open_draft_model`.
        SettingError: the model was loaded without a head, or see `open_draft_model`.
    """
    if source is None:
        return NoDraft()
    if base.group.size > 1:
        raise SettingError(
            f"{DRAFT_SETTING} does not work with a model on several machines, which would not "
            f"measure the same; leave it out"
        )
    if not base.limits.speculative_tokens:  # the main model cannot verify several tokens
        return NoDraft()
    if head_of({"draft_model": source}) is None:
        return open_draft_model(source, tokenizer, base, stores)
    if base.runner.block_tokens:
        return BlockDraft(base.runner, base.tails)
    if not base.runner.predicts:
        raise SettingError(
            f"{DRAFT_SETTING}: the model was loaded without a multi-token head or drafter; "
            f"load it with mtp=True, or mtp=FOLDER"
        )
    return HeadDraft(base.runner, base.tails)
