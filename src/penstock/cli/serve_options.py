"""The flags of `penstock serve` alone, each with its unit and its environment variable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from penstock.cli.settings_file import read_config

ServedModel: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="Folder of a model, or its Hugging Face name (owner/model).",
        envvar="PENSTOCK_MODEL",
        show_default="the embedded model",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with settings: a key for each flag, as max-kv-size = 8192. Flags and "
        "environment win over it.",
        envvar="PENSTOCK_CONFIG",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Name under which the model is served.",
        envvar="PENSTOCK_MODEL_NAME",
        metavar="NAME",
        show_default="its folder's name",
    ),
]
Host: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Address to listen on; any but this machine's own needs --api-key.",
        envvar="PENSTOCK_HOST",
        metavar="ADDRESS",
    ),
]
Port: TypeAlias = Annotated[
    int,
    typer.Option(
        help="TCP port to listen on; 0 takes a free one.",
        envvar="PENSTOCK_PORT",
        metavar="NUMBER",
        min=0,
        max=65_535,
    ),
]
APIKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="What clients must show, as a bearer token or in x-api-key. Other users of this "
        "machine can read flags, but not the environment.",
        envvar="PENSTOCK_API_KEY",
        metavar="TEXT",
        show_default="none",
    ),
]
CORSOrigins: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Origin whose pages may call the server from a browser; may be repeated. * is "
        "all, and needs --api-key.",
        envvar="PENSTOCK_CORS_ORIGIN",
        metavar="ORIGIN",
    ),
]
MemoryThreshold: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Evict cold prefixes while the machine as a whole uses more than this share "
        "of its memory; at 1 the own limit alone counts.",
        envvar="PENSTOCK_MEMORY_THRESHOLD",
        metavar="SHARE",
        show_default="0.8 to 0.95, more on larger machines",
    ),
]
MaxBatchSize: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Run at most this many sequences at the same time.",
        envvar="PENSTOCK_MAX_BATCH_SIZE",
        metavar="NUMBER",
        min=1,
    ),
]
PrefillChunk: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Read this many tokens of prompts between two decode steps.",
        envvar="PENSTOCK_PREFILL_CHUNK",
        metavar="TOKENS",
        min=1,
    ),
]
MaxQueue: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Answers that may wait for their place; more are refused with 429.",
        envvar="PENSTOCK_MAX_QUEUE",
        metavar="NUMBER",
        min=1,
    ),
]
MaxConnections: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Connections at the same time; more are closed at once, but for /health and /ready.",
        envvar="PENSTOCK_MAX_CONNECTIONS",
        metavar="NUMBER",
        min=1,
    ),
]
MaxTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Tokens of an answer whose request does not say how many.",
        envvar="PENSTOCK_MAX_TOKENS",
        metavar="TOKENS",
        min=1,
    ),
]
KeepBillingHeader: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--keep-billing-header",
        help="Leave Claude Code's x-anthropic-billing-header in the prompt. It changes, and behind "
        "it nothing is shared.",
        envvar="PENSTOCK_KEEP_BILLING_HEADER",
    ),
]
RequestTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        help="From a request's arrival to its last token, at most.",
        envvar="PENSTOCK_REQUEST_TIMEOUT",
        metavar="SECONDS",
    ),
]
DrainTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Go on with open answers for this long when told to stop.",
        envvar="PENSTOCK_DRAIN_TIMEOUT",
        metavar="SECONDS",
    ),
]
HotCacheOnly: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--hot-cache-only",
        help="Promise that prefixes are kept in memory alone: no folder, no thread, no file.",
        envvar="PENSTOCK_HOT_CACHE_ONLY",
    ),
]
SSDCacheDir: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Keep prefixes in this folder too, so that they survive eviction and restarts; it is "
        "made if it is not there. Prompts can be told from what lies in it.",
        envvar="PENSTOCK_SSD_CACHE_DIR",
        metavar="FOLDER",
        show_default="none: memory only",
    ),
]
SSDCacheLimit: TypeAlias = Annotated[
    str,
    typer.Option(
        help="The folder's size is never over this, whoever shares it: 500MB, 100GB.",
        envvar="PENSTOCK_SSD_CACHE_LIMIT",
        metavar="BYTES",
    ),
]
SSDWriteBudget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Write at most this much into the folder in a day, to spare the disk.",
        envvar="PENSTOCK_SSD_WRITE_BUDGET",
        metavar="BYTES",
        show_default="no limit",
    ),
]
SSDPreload: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--ssd-preload",
        help="Read from that folder, before the first request, what is worth most and fits in "
        "free memory.",
        envvar="PENSTOCK_SSD_PRELOAD",
    ),
]
RemoteCache: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Share prefixes with other servers through a store: redis://, rediss:// or unix:// "
        "for Valkey and Redis; s3://, gs://, az:// or file://. Who can read it can tell prompts. "
        "Other users of this machine can read flags, but not the environment.",
        envvar="PENSTOCK_REMOTE_CACHE",
        metavar="URL",
        show_default="none",
    ),
]
RemoteCacheTTL: TypeAlias = Annotated[
    int,
    typer.Option(
        help="Let Valkey or Redis keep a block for this long after its last use.",
        envvar="PENSTOCK_REMOTE_CACHE_TTL",
        metavar="SECONDS",
    ),
]
RemoteCacheTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Leave the store alone for half a minute if an answer takes longer.",
        envvar="PENSTOCK_REMOTE_CACHE_TIMEOUT",
        metavar="SECONDS",
    ),
]
SessionDir: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Keep conversations that clients save under a name in this folder; needs "
        "--ssd-cache-dir.",
        envvar="PENSTOCK_SESSION_DIR",
        metavar="FOLDER",
        show_default="none",
    ),
]
KVCacheSkipLayers: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Numbers of layers that stay in full precision, with commas between; recurrent ones "
        "are not counted.",
        envvar="PENSTOCK_KV_CACHE_SKIP_LAYERS",
        metavar="LAYERS",
        show_default="none",
    ),
]
KVCacheQuantize: TypeAlias = Annotated[
    Literal["active", "at-rest"],
    typer.Option(
        help="When blocks are held so. at-rest: once nobody who runs reads them; the answer that "
        "computes them has full precision, later ones read codes. active: as soon as they are "
        "whole; an answer is the same cold and from the cache, and prompts are read a block at a "
        "time.",
        envvar="PENSTOCK_KV_CACHE_QUANTIZE_WHEN",
    ),
]
Pipeline: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--pipeline",
        help="With mlx.launch: give each process whole layers, instead of heads of every layer.",
        envvar="PENSTOCK_PIPELINE",
    ),
]
InRay: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Serve by replicas in Ray Serve; needs the extra ray, and RAY_ADDRESS where a Ray "
        "runs already.",
        envvar="PENSTOCK_RAY",
    ),
]
Replicas: TypeAlias = Annotated[
    int,
    typer.Option(
        help="With --ray: engines at the start, and at least. --memory-limit is each one's.",
        envvar="PENSTOCK_REPLICAS",
        metavar="NUMBER",
        min=1,
    ),
]
MaxReplicas: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="With --ray: engines at most; how many there are goes by requests and ledgers.",
        envvar="PENSTOCK_MAX_REPLICAS",
        metavar="NUMBER",
        show_default="always --replicas",
        min=1,
    ),
]
ReplicaCPUs: TypeAlias = Annotated[
    float,
    typer.Option(
        help="With --ray: processors that Ray sets aside for a replica.",
        envvar="PENSTOCK_REPLICA_CPUS",
        metavar="NUMBER",
        min=0.0,
    ),
]
ReplicaGPUs: TypeAlias = Annotated[
    float,
    typer.Option(
        help="With --ray: GPUs that Ray sets aside for a replica.",
        envvar="PENSTOCK_REPLICA_GPUS",
        metavar="NUMBER",
        min=0.0,
    ),
]
Routing: TypeAlias = Annotated[
    Literal["round-robin", "hash", "prefix", "prefix+load"],
    typer.Option(
        help="With --ray: which replica gets a prompt (docs/scale.md).",
        envvar="PENSTOCK_ROUTING",
    ),
]
