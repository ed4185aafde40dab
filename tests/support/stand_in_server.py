"""A small HTTP server with OpenAI's chat completions and no model, for client tests.

It answers with the numbers of the conversation's messages, and does wrong on demand.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StandIn:
    """Its behavior, and the requests it received."""

    key: str | None = None
    fault: str | None = None
    """`status`, `event`, `cut`, `page` or `no usage`: what goes wrong."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @property
    def said(self) -> list[list[str]]:
        """The message contents of each request."""
        return [[message["content"] for message in body["messages"]] for body in self.bodies]


@contextmanager
def stand_in(**how: Any) -> Iterator[StandIn]:
    """Serve on a free port until left."""
    state = StandIn(**how)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def handler(state: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.fault == "page":
                self.whole(200, b"<html>hello</html>")
            elif self.known():
                self.whole(200, {"object": "list", "data": [{"id": "counter"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.known():
                return
            state.bodies.append(body)
            if state.fault == "status":
                self.whole(429, {"error": {"message": "too many wait", "type": "x", "code": None}})
                return
            words = ["message", f" {len(body['messages'])}"]
            if body["stream"]:
                self.stream(words)
            else:
                choice = {"message": {"content": "".join(words)}, "finish_reason": "stop"}
                self.whole(200, {"choices": [choice], "usage": usage()})

        def stream(self, words: list[str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b": a comment\n\n")
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for word in words:
                self.event({"choices": [{"delta": {"content": word}, "finish_reason": None}]})
            if state.fault == "cut":
                return
            if state.fault == "event":
                self.event({"error": {"message": "the engine has stopped"}})
                return
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            if state.fault != "no usage":
                self.event({"choices": [], "usage": usage()})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, data: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

        def whole(self, status: int, content: Any) -> None:
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def known(self) -> bool:
            if state.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
                return True
            self.whole(401, {"error": {"message": "the key is wrong"}})
            return False

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def usage() -> dict[str, Any]:
    return {
        "prompt_tokens": 20,
        "completion_tokens": 2,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 15},
    }
