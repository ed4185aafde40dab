"""Execution of one engine on several processes in lockstep."""
