"""`/docs`: Swagger UI, with all files served locally."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from penstock.server.paths import REFERENCE

FILES_PATH = f"{REFERENCE}/files"
FILES = ("fastapi_offline", "static")
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def add_reference(app: FastAPI) -> None:
    page = get_swagger_ui_html(
        # Relative, so that the page works behind a proxy that adds a path.
        openapi_url="openapi.json",
        title=f"{app.title}: interfaces",
        swagger_js_url="docs/files/swagger-ui-bundle.js",
        swagger_css_url="docs/files/swagger-ui.css",
        swagger_favicon_url="favicon.ico",
        swagger_ui_parameters={"validatorUrl": None},  # else it uploads the document
    )
    content = bytes(page.body)
    headers = {
        "Content-Security-Policy": _policy(content.decode()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @app.api_route(REFERENCE, methods=["GET", "HEAD"], include_in_schema=False)
    async def reference() -> HTMLResponse:
        return HTMLResponse(content, headers=headers)

    app.mount(FILES_PATH, StaticFiles(packages=[FILES]))


def _policy(page: str) -> str:
    """Return a security policy that allows the page's inline script, and no external content.

    Swagger UI sets styles dynamically, and its images are `data:` URLs.
    """
    digests = [b64encode(sha256(s.encode()).digest()).decode() for s in _INLINE.findall(page)]
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
