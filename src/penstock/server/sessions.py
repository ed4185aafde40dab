"""Conversations that are put aside under a name, and gone on with later: `/v1/sessions/...`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as PathField
from pydantic import BaseModel

from penstock.engine.session_files import SavedSession, load_session, save_session
from penstock.server.cache_routes import ExplainRequest, tokens_of
from penstock.server.openai_objects import ERRORS
from penstock.server.problems import BadRequest, NotFound
from penstock.server.request_body import reading_aside
from penstock.server.service import Service

SUFFIX = ".tar"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Name = Annotated[
    str, PathField(pattern=f"^{_NAME.pattern}$", description="Letters, digits, - and _.")
]


class SessionOut(BaseModel):
    """Saved session."""

    name: str
    tokens: int | None = None
    """Tokens of the saved prompt; None where the file was not opened."""
    nbytes: int
    """Size of the session's file, in bytes."""


class Sessions(BaseModel):
    """All saved sessions."""

    sessions: list[SessionOut]


class Removed(BaseModel):
    """A session that is gone."""

    name: str


def router(service: Service) -> APIRouter:
    """Make the routes; they need the key if the server has one."""
    router = APIRouter(
        prefix="/v1/sessions",
        tags=["sessions"],
        responses=ERRORS,
        route_class=reading_aside(service),
    )

    def file_of(name: str) -> Path:
        return _folder(service) / f"{name}{SUFFIX}"

    @router.get("")
    async def sessions() -> Sessions:
        """Tell of all sessions that were saved."""
        return await service.aside(partial(_listed, _folder(service)))

    @router.post("/{name}/save")
    async def save(name: Name, question: ExplainRequest) -> SessionOut:
        """Save the cached prefix of a conversation; a session of that name is replaced."""
        file = file_of(name)
        tokens = await service.work(partial(tokens_of, service, question))
        salt = question.cache_salt or ""
        done = await service.aside(partial(save_session, service.engine, file, tokens, salt))
        return _session_out(name, done)

    @router.post("/{name}/load")
    async def load(name: Name) -> SessionOut:
        """Take a session in: the next request with that conversation finds it."""
        file = file_of(name)
        if not file.is_file():
            raise NotFound(f"there is no session {name}")
        return _session_out(name, await service.aside(partial(load_session, service.engine, file)))

    @router.delete("/{name}")
    async def remove(name: Name) -> Removed:
        """Remove a session's file."""
        file = file_of(name)
        if not file.is_file():
            raise NotFound(f"there is no session {name}")
        file.unlink(missing_ok=True)
        return Removed(name=name)

    return router


def _folder(service: Service) -> Path:
    folder = service.settings.session_dir
    if folder is None:
        raise BadRequest(
            "this server keeps no sessions: start it with --session-dir and --ssd-cache-dir",
            code="no_sessions",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _listed(folder: Path) -> Sessions:
    paths = sorted(path for path in folder.glob(f"*{SUFFIX}") if _NAME.fullmatch(path.stem))
    return Sessions(
        sessions=[SessionOut(name=path.stem, nbytes=path.stat().st_size) for path in paths]
    )


def _session_out(name: str, session: SavedSession) -> SessionOut:
    return SessionOut(name=name, tokens=session.tokens, nbytes=session.nbytes)
