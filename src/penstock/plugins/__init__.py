"""Plug-ins, loaded by entry points; no other module imports them."""
