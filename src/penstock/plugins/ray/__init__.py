"""Replicas of a server in Ray Serve, behind an ingress that routes by cached prefix.

    client ──HTTP──> Ray's proxy ──> Door ──tokens, keys──> PrefixRouter ──> Replica: server, engine
                                                                ▲               │
                                                                └── summaries ──┘

`door` tokenizes prompts exactly like the server, and `router` chooses a replica with
`penstock.routing`. `replica` runs the whole server of `penstock serve`, `hang_watcher` kills it if
it hangs, and `autoscaling` sets the number of replicas. `application` assembles them. Needs the
extra `ray`.
"""
