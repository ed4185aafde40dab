"""Retentions: state that layers resume from besides plain KV, one module per kind."""
