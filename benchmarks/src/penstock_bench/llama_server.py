"""llama.cpp's server by the package `xllamacpp`, which comes with it compiled.

It needs nothing else of this package, so that another environment's Python can run the file, as
the command of `--llama-server`.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading


def main() -> None:
    """Serve a GGUF file until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", type=int, default=1, help="number of slots")
    parser.add_argument("-c", type=int, default=0, help="tokens of all slots; 0: the model's")
    parser.add_argument("-t", type=int, default=os.cpu_count(), help="number of threads")
    given = parser.parse_args()
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = given.model
    settings.hostnames, settings.port = [given.host], given.port
    settings.n_parallel, settings.n_ctx = given.np, given.c
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = given.t
    server = xllamacpp.Server(settings)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    del server


if __name__ == "__main__":
    main()
