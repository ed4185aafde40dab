"""Replicas of a server in Ray Serve, behind an ingress that routes by cached prefix.

    client ──HTTP──> Ray's proxy ──> Door ──tokens, keys──> PrefixRouter ──> Replica: server, engine
                                                                ▲               │
                                                                └── summaries ──┘

`door` reads a request's prompt as the server will, and `router` chooses by `penstock.routing`.
`replica` answers with the whole server of `penstock serve`, and its `hang_watcher` kills it when it
hangs. `autoscaling` says how many replicas there should be, and `application` puts all together.
Needs the extra `ray`; nothing else imports it.
"""
