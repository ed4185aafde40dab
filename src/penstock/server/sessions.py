"""Routes to save and load conversations, `/v1/sessions/...`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as PathField
from pydantic import BaseModel

from penstock.engine.engine import Engine
from penstock.engine.session_files import SavedSession, load_session, save_session
from penstock.errors import CacheFileError, SettingError
from penstock.server.cache_routes import ExplainRequest, prefix_salt, tokens_of
from penstock.server.engine_client import EngineState
from penstock.server.openai.openai_objects import ERRORS
from penstock.server.problems import BadRequest, NotFound, ServerError
from penstock.server.request_body import reading_aside
from penstock.server.service import Service

SUFFIX = ".tar"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Name = Annotated[
    str, PathField(pattern=f"^{_NAME.pattern}$", description="Letters, digits, - and _.")
]


class SessionOut(BaseModel):
    name: str
    tokens: int | None = None
    nbytes: int


class Sessions(BaseModel):
    """Response that lists all saved sessions."""

    sessions: list[SessionOut]


class Removed(BaseModel):
    """Response that names the removed session."""

    name: str


def router(service: Service) -> APIRouter:
    router = APIRouter(
        prefix="/v1/sessions",
        tags=["sessions"],
        responses=ERRORS,
        route_class=reading_aside(service),
    )

    def file_of(name: str) -> Path:
        return (_folder(service) / f"{name}{SUFFIX}").absolute()

    @router.get("")
    async def sessions() -> Sessions:
        """List the saved sessions."""
        return await service.aside(partial(_listed, _folder(service)))

    @router.post("/{name}/save")
    async def save(name: Name, question: ExplainRequest) -> SessionOut:
        """Save the cached prefix of a conversation, replacing any session of that name."""
        file = file_of(name)
        tokens = await service.work(partial(tokens_of, service, question))
        salt = await prefix_salt(service, question)
        act = partial(save_session, _engine(service), file, tokens, salt)
        return _session_out(name, await service.aside(partial(_without_paths, service, file, act)))

    @router.post("/{name}/load")
    async def load(name: Name) -> SessionOut:
        """Load a session, so that the next request of that conversation reuses its KV."""
        file = file_of(name)
        if not file.is_file():
            raise NotFound(f"there is no session {name}")
        act = partial(load_session, _engine(service), file)
        return _session_out(name, await service.aside(partial(_without_paths, service, file, act)))

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
            "this server saves no sessions: start it with --session-dir and --ssd-cache-dir",
            code="no_sessions",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _engine(service: Service) -> Engine:
    if not isinstance(service.engine, Engine):
        raise BadRequest("the engine of this server saves no sessions", code="no_sessions")
    return service.engine


def _without_paths(service: Service, file: Path, act: Callable[[], SavedSession]) -> SavedSession:
    """Save or load a session; remove paths on this machine from error messages."""
    try:
        return act()
    except (SettingError, CacheFileError) as error:
        folder = service.engine.ask(_cold_folder).result()
        text = str(error).replace(str(file), file.name).replace(str(folder), "--ssd-cache-dir")
        raise ServerError(text, status=error.status, code="invalid_value") from error


def _cold_folder(view: EngineState) -> Path | None:
    """Return the cold tier's folder as `session_files` writes it in errors."""
    folder = view.limits.ssd_cache_dir
    return None if folder is None else folder.absolute()


def _listed(folder: Path) -> Sessions:
    paths = sorted(
        path for path in folder.glob(f"*{SUFFIX}") if _NAME.fullmatch(path.stem) and path.is_file()
    )
    return Sessions(
        sessions=[SessionOut(name=path.stem, nbytes=path.stat().st_size) for path in paths]
    )


def _session_out(name: str, session: SavedSession) -> SessionOut:
    return SessionOut(name=name, tokens=session.tokens, nbytes=session.nbytes)
