"""Replicas of one server in Ray Serve, behind a door that routes prompts by cached prefix.

    client ──HTTP──> Ray's proxy ──> Door ──tokens, keys──> PrefixRouter ──> Replica: server, engine
                                                                ▲               │
                                                                └── summaries ──┘

`door` reads a request's prompt as the server will, and `router` chooses by `penstock.routing`.
`replica` answers with the whole server of `penstock serve`, and `autoscaling` says how many there
should be. `application` puts them together. Needs the extra `ray`; nothing else imports it.
"""
