"""Routes of the prefix cache, `/v1/cache/...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.engine.offload.tier_kinds import TIER_KINDS
from penstock.engine.stats import Cleared, Stats
from penstock.errors import PenstockError
from penstock.models.input_spans import with_keys
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import NodeView
from penstock.server.access import salt_for
from penstock.server.forms import Each, Name, OnePrompt
from penstock.server.openai.openai_objects import ERRORS
from penstock.server.prompts import MENDED, REWRITTEN, Message, Prompts
from penstock.server.remembered_answers import SHOWN, Opening
from penstock.server.request_body import reading_aside
from penstock.server.service import Service
from penstock.server.templates import shared
from penstock.tiers.worker import TierStats

MOST_NODES = 10_000


class Tier(BaseModel):
    """A storage tier of the cache: memory, disk or remote."""

    state: Literal["on", "off"]
    why: str | None = None
    """Reason the tier is off or accepts no new blocks."""
    used_bytes: int
    limit_bytes: int
    """Limit on `used_bytes`; both are 0 for a store of unknown size."""


class CacheStats(BaseModel):
    """Engine statistics; docs/engine.md describes the fields."""

    stats: Stats
    hit_rate: float
    """Share of prompt tokens read from the cache, 0 to 1."""
    tiers: dict[str, Tier]

    @classmethod
    def of(cls, stats: Stats) -> Self:
        memory = Tier(state="on", used_bytes=stats.used_bytes, limit_bytes=stats.limit_bytes)
        cold = {name: _tier(stats.tiers.get(name)) for name in TIER_KINDS}
        return cls(stats=stats, hit_rate=stats.hit_rate, tiers={"memory": memory, **cold})


def _tier(stats: TierStats | None) -> Tier:
    if stats is None:
        return Tier(state="off", used_bytes=0, limit_bytes=0)
    return Tier(
        state="on" if stats.off is None else "off",
        why=stats.off or stats.full,
        used_bytes=stats.held_bytes,
        limit_bytes=stats.limit_bytes,
    )


class NodeOut(BaseModel):
    """A node of the prefix tree."""

    id: int
    parent: int | None
    """Id of the parent; None for a node at the start of a prompt."""
    start: int
    end: int
    nbytes: int
    pins: int
    hits: int
    idle_seconds: float
    held_seconds: float
    text: str | None = None


class Tree(BaseModel):
    """The prefix tree; parents come before children."""

    nodes: list[NodeOut]
    left_out: int
    """Number of nodes omitted because the tree has too many."""
    count: int
    tokens: int
    nbytes: int


class ExplainRequest(BaseModel):
    """A prompt to look up: messages, text or tokens."""

    model_config = ConfigDict(extra="ignore")

    messages: Each[dict[str, Any]] | None = Field(None, min_length=1, max_length=16_384)
    tools: Each[dict[str, Any]] | None = Field(None, max_length=512)
    prompt: OnePrompt | None = None
    model: Name | None = None
    cache_salt: str | None = Field(None, max_length=1_000)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either messages or prompt")
        return self


def router(service: Service) -> APIRouter:
    router = APIRouter(
        prefix="/v1/cache", tags=["cache"], responses=ERRORS, route_class=reading_aside(service)
    )

    @router.get("/stats")
    async def stats() -> CacheStats:
        """Report the tiers, their bytes, and the hit rate."""
        return CacheStats.of(await service.ask(lambda state: state.stats()))

    @router.get("/tree")
    async def tree(
        text: Annotated[
            bool, Query(description="Whether to include the first words of each node.")
        ] = False,
    ) -> Tree:
        """List the nodes of the prefix tree; includes prompt text only if the query asks for it."""
        views = await service.ask(lambda state: state.tree())
        shown = tree_of(views, MOST_NODES)
        if text:
            await service.work(partial(_add_text, service.tokenizer, shown, views))
        return shown

    @router.post("/explain")
    async def explain(question: ExplainRequest) -> Explanation:
        """Explain how far a prompt would match the cache now."""
        salt = await prefix_salt(service, question)
        tokens, rewritten = await service.work(partial(_read, service, question))
        explained = await service.ask(lambda view: view.explain(tokens, salt, ask_tiers=True))
        if rewritten is None:
            return explained
        return replace(explained, reason=f"{explained.reason}. {rewritten}")

    @router.delete("", responses={202: {"model": Cleared}})
    async def clear(response: Response) -> Cleared:
        """Evict all prefixes not in use, and this model's blocks on disk.

        Status 202 means that the work is incomplete: `pending` names the tier and the reason.
        """
        cleared = await service.aside(service.engine.clear)
        response.status_code = 202 if cleared.pending else 200
        return cleared

    return router


async def prefix_salt(service: Service, question: ExplainRequest) -> str:
    """Return the salt of a prompt's prefixes, which differ by tenant and adapter."""
    adapter, salt = service.adapter_of(question.model), salt_for(question.cache_salt)
    return await service.ask(lambda view: view.salted(salt, adapter))


def tree_of(views: Sequence[NodeView], max_nodes: int) -> Tree:
    shown = sorted(views, key=lambda view: view.start)  # a parent starts before its children
    if len(views) > max_nodes:
        # A node is pinned and touched together with its ancestors: no parent is left out.
        newest = sorted(shown, key=lambda view: (view.idle_seconds, view.start))[:max_nodes]
        kept = {view.id for view in newest}
        shown = [view for view in shown if view.id in kept]
    return Tree(
        nodes=[NodeOut.model_validate(view, from_attributes=True) for view in shown],
        left_out=len(views) - len(shown),
        count=len(views),
        tokens=sum(view.end - view.start for view in views),
        nbytes=sum(view.nbytes for view in views),
    )


def _add_text(tokenizer: Any, tree: Tree, views: Sequence[NodeView]) -> None:
    tokens = {view.id: view.tokens for view in views}
    for node in tree.nodes:
        node.text = str(tokenizer.decode(list(tokens[node.id])))


def _read(service: Service, question: ExplainRequest) -> tuple[tuple[int, ...], str | None]:
    tokens = tokens_of(service, question)
    rewritten, mended = REWRITTEN.get(), MENDED.get()
    if rewritten is None and question.messages is not None:
        rewritten = rewritten_in_front(service.prompts, question.messages, question.tools)
    if mended and question.messages is not None:
        changed = f"For the chat template {', '.join(mended)}"
        rewritten = changed if rewritten is None else f"{rewritten}. {changed}"
    return tokens, rewritten


def tokens_of(service: Service, question: ExplainRequest) -> tuple[int, ...]:
    """Tokenize a prompt as the cache is keyed: image tokens are replaced by the image's key."""
    if question.messages is not None:
        salt = question.cache_salt or ""
        prompt = service.prompts.render(question.messages, question.tools, salt=salt)
        return with_keys(tuple(prompt), prompt.spans)
    if isinstance(question.prompt, str):
        return service.prompts.encode(question.prompt)
    tokens = tuple(question.prompt or ())
    service.check_tokens(tokens)
    return tokens


NO_OPENING = Opening("", "")


def rewritten_in_front(
    prompts: Prompts, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """Describe the text that the template rewrites before the last answer; None if none."""
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers or not answers[-1]:
        return None
    try:
        before = prompts.template_text(messages[: answers[-1]], tools)
        after = prompts.template_text(messages, tools)
    except PenstockError:
        return None
    common = shared(before, after)
    for text, bare in (*prompts.openings, NO_OPENING):
        if before.endswith(text) and common >= len(before) - len(text) + len(bare):
            return None
    ours, theirs = (text[common : common + SHOWN] for text in (before, after))
    return (
        f"The chat template rewrites the text before messages.{answers[-1]}, from "
        f"character {common:,} on: {ours!r} became {theirs!r}"
    )
