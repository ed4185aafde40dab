"""Calls of tools: what a request allows, and the grammars that keep an answer to it."""
