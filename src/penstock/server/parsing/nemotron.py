"""Nemotron Nano 2 and Super 1.5: a JSON list of calls between tags."""

from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

NEMOTRON = TaggedJson(
    ("<TOOLCALL>",), ("</TOOLCALL>",), shape=json_shape("<TOOLCALL>[", "]</TOOLCALL>")
)
FORMATS = (NamedCalls("nemotron", NEMOTRON, all_of("<TOOLCALL>")),)
