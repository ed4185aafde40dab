"""Nemotron Nano 2 and Super 1.5: a JSON list of calls between tags."""

from penstock.server.parsing.tagged import TaggedJson

NEMOTRON = TaggedJson(("<TOOLCALL>",), ("</TOOLCALL>",), json_marks=("<TOOLCALL>[", "]</TOOLCALL>"))
