"""Object store in a bucket or a folder; the only module that imports `obstore`.

Credentials come from the environment variables that clients of these stores use. The expiry of
values is left to the bucket's lifecycle rules.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import from_url

from penstock.plugins.remote.objects import ObjectPiece, described


class ObstoreObjects:
    def __init__(self, url: str, *, timeout_seconds: float, put_seconds: float) -> None:
        self._url = url
        with self._in_words():
            if url.startswith("file://"):
                # Accessible only by its owner, because blocks reveal prompts.
                folder = Path(unquote(urlsplit(url).path))
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._quick = self._patient = from_url(url)
            else:
                self._quick = _bucket(url, timeout_seconds)
                self._patient = _bucket(url, put_seconds)

    def get(self, name: str, offset: int, nbytes: int) -> ObjectPiece | None:
        with self._in_words():
            try:
                response = obstore.get(
                    self._quick, name, options={"range": (offset, offset + nbytes)}
                )
                return ObjectPiece(response.meta["size"], memoryview(response.bytes()))
            except FileNotFoundError:
                return None
            except BaseError:  # the value may end before `offset`
                size = obstore.head(self._quick, name)["size"]
                if offset < size:
                    raise
                return ObjectPiece(size, b"")

    def put(self, name: str, raw: bytes) -> bool:
        with self._in_words():
            try:
                obstore.put(self._patient, name, raw, use_multipart=False)
            except (PermissionDeniedError, PermissionError):
                return False
        return True

    def has(self, names: Sequence[str]) -> list[bool]:
        with self._in_words():
            return asyncio.run(self._all_there(names))

    async def _all_there(self, names: Sequence[str]) -> list[bool]:
        return await asyncio.gather(*[self._is_there(name) for name in names])

    async def _is_there(self, name: str) -> bool:
        try:
            await obstore.head_async(self._quick, name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        with self._in_words():
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self._quick, name)

    def close(self) -> None: ...

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise ConnectionError(described(error, self._url)) from None


def _bucket(url: str, seconds: float) -> Any:
    limit = timedelta(seconds=seconds)
    return from_url(
        url,
        client_options={
            "timeout": limit,
            "connect_timeout": limit,
            # Read from the environment here, because these options replace those from there.
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        },
        retry_config={"max_retries": 0, "retry_timeout": limit},  # the tier decides when to retry
    )
