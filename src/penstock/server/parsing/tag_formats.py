"""Call formats with a tag for each argument."""

from __future__ import annotations

import re

from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import CallShape, ParameterTags
from penstock.server.parsing.tag_calls import KEY, NAME, TagCalls


def _argument_pairs(prefix: str, *, spaced: bool = True) -> TagCalls:
    """Return GLM's format: one tag for the name and one for the value of each argument."""
    line = "\n" if spaced else ""
    between = f"</{prefix}arg_key>{line}<{prefix}arg_value>"
    tags = ParameterTags(
        f"<{prefix}arg_key>", between, between, f"</{prefix}arg_value>", after=line
    )
    mark = f"{prefix}tool_call>"
    return TagCalls(
        CallShape(
            f"<{mark}", "", line, "", f"</{mark}", separator=None, tags=tags, names=r"[^\s<]+"
        )
    )


def _functions(opening: str, closing: str, gap: str) -> TagCalls:
    """Return the format of Qwen3-Coder and Seed-OSS, which differ in marks and line ends."""
    head = f">{gap}"
    tags = ParameterTags("<parameter=", head, head, "</parameter>", gap=gap, after="\n")
    shape = CallShape(
        *(opening, "\n<function=", ">\n", "</function>", f"\n{closing}"), separator=None, tags=tags
    )
    # Templates with `| string` write Python's None; those with `| tojson` write null.
    return TagCalls(shape, nulls=("null", "None"), python=not gap)


def _invocations(prefix: str, closing: str) -> CallShape:
    """Return the shape of MiniMax M2 and Muse Spark, with names in attributes."""
    tag = f'<{prefix}parameter name="'
    tags = ParameterTags(tag, '">', '">', f"</{prefix}parameter>", after="\n")
    return CallShape(
        *(f"<{closing}>", f'\n<{prefix}invoke name="', '">\n', f"</{prefix}invoke>"),
        closing=f"\n</{closing}>",
        tags=tags,
        names=r'[^"]+',
    )


def _dsml(opening: str) -> TagCalls:
    """Return the format of DeepSeek V3.2 and V4, whose tags distinguish strings from JSON."""
    tag = "｜DSML｜"
    tags = ParameterTags(
        f'<{tag}parameter name="',
        '" string="true">',
        '" string="false">',
        end=f"</{tag}parameter>",
        after="\n",
    )
    shape = CallShape(
        *(f"<{tag}{opening}>", f'\n<{tag}invoke name="', '">\n', f"</{tag}invoke>"),
        closing=f"\n</{tag}{opening}>",
        tags=tags,
    )
    argument = (
        rf'\s*<{tag}parameter\s+name="{KEY}"'
        r'(?:\s+string="(?:(?P<text>true)|false)"|(?P<text>))\s*>'
    )
    return TagCalls(shape, argument=argument)


GLM, GLM_COMPACT = _argument_pairs(""), _argument_pairs("", spaced=False)
LONGCAT = _argument_pairs("longcat_")
QWEN3_CODER = _functions("<tool_call>", "</tool_call>", "\n")
SEED = _functions("<seed:tool_call>", "</seed:tool_call>", "")
MINIMAX_M2 = TagCalls(_invocations("", "minimax:tool_call"))
MUSE_SPARK = TagCalls(
    _invocations("atem:", "atem:function_calls"),
    head=rf'\s*<atem:invoke\s+(?:[^>]*?\s)?name="{NAME}">',
    argument=rf'\s*<atem:parameter\s+(?:[^>]*?\s)?name="{KEY}"[^>]*?>',
    doubled=True,
)
MINICPM5 = TagCalls(
    CallShape(
        *("<function name=", '"', '">', "", "</function>"),
        separator=None,
        tags=ParameterTags('<param name="', '">', '">', "</param>"),
    ),
    head=rf"""\s*["']?{NAME}["']?\s*>""",
    argument=rf"""\s*<param\s+name\s*=\s*["']?{KEY}["']?\s*>""",
    python=True,
    wrapped=("<![CDATA[", "]]>"),
)
KIMI_K3 = TagCalls(
    CallShape(
        *("<|open|>tools<|sep|>", '<|open|>call tool="', '" index="1"<|sep|>'),
        *("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
        separator=None,  # the next call has another number
        tags=ParameterTags(
            *('<|open|>argument key="', '" type="string"<|sep|>', '" type="TYPE"<|sep|>'),
            end="<|close|>argument<|sep|>",
            outside=("<|open|>", "<|close|>call", "<|close|>json"),
        ),
        names=r'[^"&]+',
    ),
    head=rf'\s*<\|open\|>call\s+tool="{NAME}"[^<>]*<\|sep\|>',
    argument=(
        rf'\s*<\|open\|>argument\s+key="{KEY}"'
        r'(?:\s+type="(?:(?P<text>string)|[^"]*)"|(?P<text>))\s*<\|sep\|>'
    ),
    escaped=True,
    block=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
)
DSML, DSML_TOOLS = _dsml("function_calls"), _dsml("tool_calls")
_SPACED_PAIRS = re.compile(r"</arg_key>(?:\n|\\n)")
"""Pattern of a line end between an argument's tags, in a template or in a string literal."""


def _pairs(template: str) -> TagCalls:
    return GLM_COMPACT if template and not _SPACED_PAIRS.search(template) else GLM


FORMATS = (
    NamedCalls("seed", SEED, all_of(SEED.shape.opening, "<function=")),
    NamedCalls("glm47", GLM, variant=_pairs),
    NamedCalls("kimi_k3", KIMI_K3),
    NamedCalls("laguna", GLM),
    NamedCalls("longcat", LONGCAT),
    NamedCalls("minicpm5", MINICPM5),
    NamedCalls("minimax_m2", MINIMAX_M2),
    NamedCalls("muse_spark", MUSE_SPARK),
    NamedCalls("qwen3_coder", QWEN3_CODER),
)
