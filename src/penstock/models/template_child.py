"""Render chat templates in a process with limited memory and CPU time.

`template_trial` and `template_renderer` run this file by its path. It imports nothing from
penstock, so it starts fast. It exits with `TOO_LARGE` if memory runs out, is killed by a signal if
CPU time runs out, and otherwise exits with 0. Errors of the template are returned to the caller of
a request, and ignored in sample conversations.

    CPU_SECONDS MEMORY_BYTES            render the template on stdin with sample conversations
    CPU_SECONDS MEMORY_BYTES requests   read one request per line and answer each with one line
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

TOO_LARGE = 3
LINE_CHARACTERS = 200
USER = {"role": "user", "content": "Hello"}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"text": "Tern."}},
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up.", "parameters": {"type": "object"}},
}
TALKS = (
    [USER],
    [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Hi"},
        USER,
    ],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "A bird.", "tool_call_id": "call00001", "name": "look_up"},
    ],
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def bound_memory(nbytes: int) -> None:
    """Limit the memory of this process, if the system supports it."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def bound_time(seconds: float) -> None:
    """Kill this process after `seconds` more of CPU time; 0 removes the limit.

    On systems without such a limit, the parent's timeout applies.
    """
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)


def environment() -> Any:
    """Return a sandboxed Jinja environment with the extensions that transformers provides."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    class TemplateDict:
        """Replacement for `dict` that does not expose the type itself."""

        def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
            return dict(*args, **entries)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class TemplateNamespace(Namespace):
        """Namespace without private or special attributes."""

        def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be among `attributes`
            entries = dict(*args[1:], **attributes)
            for name in entries:
                TemplateNamespace.check_name(name)
            Namespace.__init__(args[0], entries)

        def __setitem__(self, name: str, value: Any) -> None:
            TemplateNamespace.check_name(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def check_name(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}")

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals["dict"] = TemplateDict()
    jinja.globals["namespace"] = TemplateNamespace
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja


def compiled(jinja: Any, source: str) -> Any:
    """Compile a template; raise MemoryError if constant expressions exceed the memory limit.

    Jinja evaluates them when it compiles, but ignores their errors.
    """
    from jinja2.nodes import EvalContext, Expr, Impossible

    for node in jinja.parse(source).find_all(Expr):
        try:
            node.as_const(EvalContext(jinja))
        except Impossible as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
    return jinja.from_string(source)


def render(source: str, cpu_seconds: float) -> None:
    """Render each sample conversation as transformers does, ignoring errors of the template."""
    jinja = environment()  # not timed: importing Jinja can take a second
    bound_time(cpu_seconds)
    for tools in (None, [TOOL]):
        for talk in TALKS:
            variables = {"messages": talk, "tools": tools, "documents": None, **TOKENS}
            try:
                compiled(jinja, source).render(add_generation_prompt=True, **variables)
            except MemoryError:
                sys.exit(TOO_LARGE)
            except Exception:  # noqa: BLE001 - a template raises anything
                continue


def program(file: str, name: str) -> Callable[..., str]:
    spec = importlib.util.spec_from_file_location("template_program", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., str] = getattr(module, name)
    return function


def refusal(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:LINE_CHARACTERS]}".removesuffix(": ")


def serve(cpu_seconds: float) -> None:
    """Answer requests on standard input, one JSON line each, until end of file."""
    jinja = environment()
    renderers: dict[str, Callable[..., str]] = {}
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            source, function = request["source"], request["program"]
            key = json.dumps([source, function])
            if function is not None and key not in renderers:
                renderers = {key: program(*function)}
            bound_time(cpu_seconds)
            if key not in renderers:
                renderers = {key: compiled(jinja, source).render}
            text = renderers[key](**request["given"])
            bound_time(0)
            much = len(text) > request["most_characters"]
            answer = json.dumps({"characters": len(text)} if much else {"text": text})
        except MemoryError:
            sys.exit(TOO_LARGE)
        except Exception as error:  # noqa: BLE001 - a template raises anything
            bound_time(0)
            answer = json.dumps({"refusal": refusal(error)})
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    bound_memory(int(sys.argv[2]))
    if "requests" in sys.argv:
        serve(float(sys.argv[1]))
    else:
        render(sys.stdin.buffer.read().decode("utf-8", "replace"), float(sys.argv[1]))
