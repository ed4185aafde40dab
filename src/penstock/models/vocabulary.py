"""Check that a draft model reads and writes the tokens of the model that it drafts for."""

from __future__ import annotations

from typing import Any

from penstock.errors import SettingError

DRAFT_SETTING = "draft_model (--draft-model)"


def check_same_vocabulary(draft: Any, tokenizer: Any) -> None:
    """Raise SettingError unless two tokenizers have the same tokens under the same numbers."""
    theirs, ours = draft.get_vocab(), tokenizer.get_vocab()
    others = len(theirs.items() ^ ours.items())
    if others:
        raise SettingError(
            f"{DRAFT_SETTING}: its tokenizer differs from the model's in {others:,} entries of "
            f"{len(ours):,}; take a model of the same family"
        )
