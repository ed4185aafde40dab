"""URLs of object stores: validation, and opening the store.

To add a kind of store, add a module, its schemes to `PACKAGES`, and a line to `open_objects`.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import SettingError
from penstock.plugins.remote.objects import Objects

PACKAGES = {
    **dict.fromkeys(("redis", "rediss", "unix"), "redis"),
    **dict.fromkeys(("s3", "gs", "az", "file"), "obstore"),
}
"""Package of the client library by URL scheme."""


def open_objects(
    url: str, *, ttl_seconds: int, timeout_seconds: float, put_seconds: float
) -> Objects:
    """Create the client for a store's URL, without connecting.

    Args:
        url: URL of the store.
        ttl_seconds: lifetime of values; Redis only.
        timeout_seconds: timeout of reads.
        put_seconds: timeout of writes.

    Raises:
        SettingError: the URL is not supported.
        OSError: the client cannot be created.
    """
    check_url(url)
    seconds = {"timeout_seconds": timeout_seconds, "put_seconds": put_seconds}
    # Imported only if used, because the packages are optional.
    if PACKAGES[urlsplit(url).scheme] == "redis":
        from penstock.plugins.remote.redis_objects import RedisObjects

        return RedisObjects(url, ttl_seconds=ttl_seconds, **seconds)
    from penstock.plugins.remote.obstore_objects import ObstoreObjects

    return ObstoreObjects(url, **seconds)


def check_url(url: str) -> None:
    """Raise SettingError for an unsupported URL; the message contains no secrets."""
    problem = _problem(url)
    if problem is not None:
        raise SettingError(f"remote_cache (--remote-cache): {problem}")


def _problem(url: str) -> str | None:
    scheme = url.partition("://")[0]
    if scheme not in PACKAGES or "://" not in url:
        return f"the URL begins with none of {', '.join(f'{known}://' for known in PACKAGES)}"
    package = PACKAGES[scheme]
    try:
        parts = urlsplit(url)
        names_port = parts.port is not None
    except ValueError:
        return "the URL is invalid; a password in it must be percent-encoded"
    where = parts.path if scheme in ("unix", "file") else parts.hostname
    if not where or parts.fragment:
        return f"the URL names no store; write it as {_EXAMPLES[scheme]}"
    if package == "obstore" and ("@" in parts.netloc or names_port or parts.query):
        return (
            f"{scheme}:// takes no password, port or option; they come from the environment, as "
            "AWS_ACCESS_KEY_ID and AWS_ENDPOINT do"
        )
    if package == "redis":
        known = all(name == "db" or name.startswith("ssl_") for name, _ in parse_qsl(parts.query))
        if not known or (scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path)):
            return (
                f"write the URL as {_EXAMPLES[scheme]}, with only ssl_... options, and with a "
                "percent-encoded password"
            )
    if find_spec(package) is None:
        return (
            f"{scheme}:// needs the package {package}, which is not installed: "
            f"pip install {package}"
        )
    return None


_EXAMPLES = {
    "redis": "redis://user:password@host:6379/0",
    "rediss": "rediss://user:password@host:6379/0?ssl_ca_certs=/etc/ssl/ca.pem",
    "unix": "unix:///run/valkey/valkey.sock",
    "s3": "s3://bucket/folder",
    "gs": "gs://bucket/folder",
    "az": "az://account/container/folder",
    "file": "file:///srv/penstock",
}


def shown(url: str) -> str:
    """Return a valid URL without user, password and options.

    >>> shown("redis://somebody:secret@cache:6379/0?ssl_ca_certs=x")
    'redis://cache:6379/0'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
