"""The one place that knows mlx-lm: loading, chat templates, generation, layers' caches.

The assumptions made here are named in `tests/test_contract_mlx_lm.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import lcm
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from traceback import walk_tb
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.config import SamplingSettings, WeightsDtype
from penstock.config.defaults import DRAFT_TOKENS
from penstock.errors import ModelError
from penstock.kv.attention import AttentionWindow
from penstock.kv.compressed import POINTS, ROWS, Compressed, CompressedReads, Rows
from penstock.kv.states import Place, StateForm, States, put_together, taken_apart
from penstock.models import named
from penstock.models.generation_config import read_generation_config
from penstock.models.gguf import architectures
from penstock.models.gguf import weights as gguf
from penstock.models.gguf.header import is_gguf, read_header
from penstock.models.gguf.loaded_bytes import native_bytes, wide_bytes
from penstock.models.source import checked_source, first_line
from penstock.models.widening import Widening, model_bytes, widen
from penstock.open_files import unchanged_limit

named.forbid_downloads()
with unchanged_limit():
    import mlx_lm
    import mlx_lm.models.base
    import mlx_lm.models.cache
    import mlx_lm.tool_parsers
    import mlx_lm.utils
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = [
    "Loaded",
    "ModelLayout",
    "TextPiece",
    "TokenizerWrapper",
    "encode",
    "is_stage",
    "layout",
    "load",
    "load_all",
    "load_part",
    "load_tokenizer",
    "passes_on",
    "render",
    "stream",
]

Message = dict[str, str]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """One generated token, and the run's figures up to it."""

    token: int
    text: str
    """Text that became readable with this token; empty in the middle of a character."""
    finish_reason: str | None
    """`stop` or `length` with the last piece, None before."""
    prompt_tokens: int
    prompt_tokens_per_second: float
    generated_tokens: int
    generated_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, its tokenizer and its config."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    weights_note: str | None = None
    """Line about the dtype of the weights; None where they stay as they came."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling that the model's `generation_config.json` asks for."""


def load(
    path_or_name: str | Path, *, weights_dtype: WeightsDtype = "auto"
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer from a folder, a GGUF file or by its Hugging Face name.

    Args:
        path_or_name: a folder, a file, `owner/model`, or a short name of `penstock.models.named`.
        weights_dtype: `auto` turns weights into float32 on a CPU, where MLX multiplies anything
            else on one core; `native` leaves them; `float32` widens them anywhere.

    Raises:
        ModelError: The model is unknown, or its folder is incomplete, damaged or of a kind
            that mlx-lm does not have.
    """
    loaded = load_all(path_or_name, weights_dtype=weights_dtype)
    return loaded.model, loaded.tokenizer


def load_all(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    limit_bytes: int | None = None,
) -> Loaded:
    """Load as `load` does, and return the config beside model and tokenizer.

    Args:
        path_or_name: as `load`.
        weights_dtype: as `load`.
        limit_bytes: memory limit; `auto` widens nothing that would leave too little of it.
    """
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        path_or_name = named.fetch(str(path_or_name))
    if is_gguf(path_or_name):
        return _load_gguf(Path(path_or_name).expanduser(), weights_dtype, limit_bytes)
    source = checked_source(path_or_name)
    try:
        model, tokenizer, config = mlx_lm.load(source, lazy=True, return_config=True)
        widening = Widening(weights_dtype, *model_bytes(model), limit_bytes)
        if widening.widens:
            widen(model, _dense)
            config["torch_dtype"] = "float32"
        mx.eval(model.parameters())
    # A boundary: a config says anything, and mlx-lm, transformers, the hub client and MLX each
    # compute with it before they check it: no list of their errors is ever complete.
    except Exception as error:
        what = f"cannot load {source}"
        if not Path(source).is_dir():
            what = f"there is no folder {source}, and it cannot be fetched"
        raise ModelError(f"{what}: {first_line(error)}") from error
    return Loaded(model, tokenizer, config, widening.note, read_generation_config(source))


def _dense(module: nn.Module) -> nn.Module | None:
    """Return a module for full numbers in the place of one with codes; its weights are no one's."""
    rows, columns = module.weight.shape[-2], module.scales.shape[-1] * module.group_size
    if isinstance(module, nn.QuantizedEmbedding):
        return nn.Embedding(rows, columns)
    if isinstance(module, nn.QuantizedLinear):
        return nn.Linear(columns, rows, bias="bias" in module)
    if isinstance(module, QuantizedSwitchLinear):
        experts: nn.Module = SwitchLinear(columns, rows, len(module.weight), bias="bias" in module)
        return experts
    return None


def _load_gguf(path: Path, weights_dtype: WeightsDtype, limit_bytes: int | None) -> Loaded:
    """Load a model from a GGUF file.

    mlx-lm's own loaders make the model and the tokenizer, of a folder that has everything but the
    weights; these are read from the file, one tensor after the other.
    """
    header = read_header(path)
    architectures.config(header)  # refuses what is no model before anything is counted
    widening = Widening(weights_dtype, native_bytes(header), wide_bytes(header), limit_bytes)
    try:
        with TemporaryDirectory(prefix="penstock-") as name:
            folder = Path(name)
            gguf.write_folder(header, folder, wide=widening.widens)
            model, config = mlx_lm.utils.load_model(folder, lazy=True, strict=False)
            tokenizer = mlx_lm.utils.load_tokenizer(folder, eos_token_ids=config["eos_token_id"])
        model.load_weights(list(gguf.weights(header, wide=widening.widens)))
    except ModelError:
        raise
    # A boundary, as in `load_all`.
    except Exception as error:
        raise ModelError(f"cannot load {path}: {first_line(error)}") from error
    return Loaded(model, tokenizer, config, widening.note)


def load_part(
    path_or_name: str | Path, group: mx.distributed.Group, *, pipeline: bool = False
) -> Loaded:
    """Load this process's part of a model that mlx-lm divides among the `group`.

    With `shard` that is a part of the heads of every layer, and of the matrices between them. With
    `pipeline`, or if the model's class has nothing else, it is whole layers. All processes of the
    group must load.

    Raises:
        ModelError: as `load`; or mlx-lm cannot divide this model among so many.
    """
    source, ranks = checked_source(path_or_name), group.size()
    if pipeline and Path(source).is_dir() and not (Path(source) / INDEX).is_file():
        raise ModelError(
            f"{source} has no {INDEX}, which says which file has whose layers; mlx_lm.convert "
            f"writes one"
        )
    try:
        model, tokenizer, config = mlx_lm.utils.sharded_load(
            source, pipeline_group=group if pipeline else None, return_config=True
        )
    # A boundary, as in `load_all`.
    except Exception as error:
        raise ModelError(f"cannot load {source} in {ranks} parts: {first_line(error)}") from error
    if pipeline and not is_stage(model):
        raise ModelError(f"{source} cannot be divided by layers here; leave --pipeline out")
    divided = ("hidden_layers",) if is_stage(model) else ("attention_heads", "key_value_heads")
    _check_divided(config, source, ranks, divided)
    return Loaded(model, tokenizer, config, sampling=read_generation_config(source))


def _check_divided(config: dict[str, Any], name: str, ranks: int, divided: Sequence[str]) -> None:
    """Raise ModelError unless so many ranks got equal parts.

    mlx-lm rounds heads down, and gives the first ranks a layer more.
    """
    for place in (config, config.get("text_config") or {}):
        for what in divided:
            count = place.get(f"num_{what}")
            if isinstance(count, int) and count % ranks:
                raise ModelError(
                    f"{name} cannot be divided among {ranks} ranks: it has {count} "
                    f"{what.replace('_', ' ')}; take a number of ranks that divides them"
                )


def is_stage(model: nn.Module) -> bool:
    """Tell whether a model has some of its layers only, the others being other processes'."""
    return getattr(getattr(model, "model", None), "pipeline_size", 1) > 1


def passes_on(model: nn.Module) -> bool:
    """Tell whether a model's last layer hands its output to another process."""
    return getattr(getattr(model, "model", None), "pipeline_rank", 0) > 0


def load_tokenizer(path_or_name: str | Path) -> TokenizerWrapper:
    """Load a model's tokenizer alone: nothing of its weights is read.

    Raises:
        ModelError: as `load`.
    """
    source = checked_source(path_or_name)
    try:
        return mlx_lm.utils.load_tokenizer(source)
    # A boundary, as above.
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {source}: {first_line(error)}") from error


def tool_parsers() -> list[str]:
    """Return the names of mlx-lm's parsers of calls."""
    return [module.name for module in iter_modules(mlx_lm.tool_parsers.__path__)]


def tool_parser(name: str) -> tuple[Callable[..., Any], str, str]:
    """Return a parser of mlx-lm's, and the marks in front of a call and behind it."""
    module = import_module(f"mlx_lm.tool_parsers.{name}")
    return module.parse_tool_call, module.tool_call_start, module.tool_call_end or ""


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Turn raw text into tokens, with the special tokens the tokenizer adds by itself."""
    return list(tokenizer.encode(text))


def render(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], *, answer: bool = True
) -> list[int]:
    """Turn a conversation into tokens by the model's chat template.

    Args:
        tokenizer: The model's tokenizer.
        messages: `role` and `content` of each message, oldest first.
        answer: End where the model's answer begins.

    Raises:
        ModelError: The model has no chat template, or its template refuses the messages.
    """
    if not tokenizer.has_chat_template:
        raise ModelError("this model has no chat template; use penstock generate --raw")
    try:
        tokens = tokenizer.apply_chat_template(list(messages), add_generation_prompt=answer)
    # A boundary, as in `load_all`: a template is a program of the model's makers.
    except Exception as error:
        raise ModelError(f"the chat template refuses the messages: {first_line(error)}") from error
    if not tokens:
        raise ModelError("the chat template leaves nothing of the messages")
    return list(tokens)


def stream(
    loaded: Loaded,
    prompt: Sequence[int],
    *,
    caches: list[Any],
    sampling: SamplingSettings,
    draft: nn.Module | None = None,
) -> Iterator[TextPiece]:
    """Generate from `prompt`, the tokens that follow the ones in `caches`.

    After the last piece the caches hold the prompt and every token that was yielded, the
    end-of-sequence token included. `sampling.seed` seeds MLX's global generator.

    With a `draft` model its caches stand behind the others; they may hold less than was yielded.

    Raises:
        ModelError: The model's code in mlx-lm fails on the quantized `caches`.
    """
    seed = time.time_ns() if sampling.seed is None else sampling.seed
    mx.random.seed(seed)
    responses = mlx_lm.stream_generate(
        loaded.model,
        loaded.tokenizer,
        list(prompt),
        max_tokens=sampling.max_tokens,
        sampler=make_sampler(temp=sampling.temperature, top_p=sampling.top_p),
        prompt_cache=caches,
        **({} if draft is None else {"draft_model": draft, "num_draft_tokens": DRAFT_TOKENS}),
    )
    for response in _checked_start(responses, any(hasattr(cache, "bits") for cache in caches)):
        yield TextPiece(
            token=response.token,
            text=response.text,
            finish_reason=response.finish_reason,
            prompt_tokens=response.prompt_tokens,
            prompt_tokens_per_second=response.prompt_tps,
            generated_tokens=response.generation_tokens,
            generated_tokens_per_second=response.generation_tps,
        )


def _checked_start(responses: Iterator[Any], quantized: bool) -> Iterator[Any]:
    """Yield `responses`; say so if mlx-lm's own code fails on quantized caches in the first step.

    The model types known for it are refused before they run (`penstock.memory`); this is for
    those that mlx-lm adds. An error from anywhere but mlx-lm's code keeps its traceback.
    """
    try:
        first = next(responses)
    except (ValueError, TypeError, AttributeError) as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if not quantized or not str(frame.f_globals.get("__name__")).startswith("mlx_lm."):
            raise
        raise ModelError(
            "mlx-lm's code for this model fails on quantized caches "
            f"({first_line(error)}); leave out --kv-bits"
        ) from error
    yield first
    yield from responses


@dataclass(frozen=True, slots=True)
class Compression:
    """KV of a model whose layers compress: see `kv.compressed`."""

    rows: tuple[Rows, ...]
    """Rows of all layers, in the model's order."""
    every: int
    """Tokens after which all groups are full: a block is a multiple of it."""
    state_form: StateForm
    """Form of a sequence's states at a boundary where all groups are full and no row is loose, with
    enough tokens in front to fill the windows."""
    state_bytes: int
    """The most that a sequence's states take, but for loose rows."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """KV and states that a model keeps of a sequence, and its own caches made of them.

    A cache of mlx-lm is one layer with keys and values, the states of one recurrent layer, or a
    list of these.
    """

    attention_windows: tuple[AttentionWindow, ...]
    """Attention windows of the layers with keys and values, in the model's order."""
    state_sizes: tuple[int, ...]
    """Number of arrays that each recurrent layer keeps."""
    places: tuple[Place, ...]
    """Kinds of the model's caches, in order."""
    compression: Compression | None = None
    """Compression of the model's layers; None if no layer compresses."""

    @property
    def rows(self) -> dict[int, Rows]:
        """Rows of the layers with keys and values that keep rows, by the layer's number."""
        return {} if self.compression is None else dict(enumerate(self.compression.rows))

    def caches(
        self, reads: Sequence[Any], states: States | None, position: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """Return the caches for the model, and those of them that recurrent layers write to.

        Args:
            reads: one for each layer with keys and values.
            states: of the recurrent layers; None at the beginning of a sequence.
            position: of the step's first token, for layers that compress.
        """
        kept = []
        for number, size in enumerate(self.state_sizes):
            cache = mlx_lm.models.cache.ArraysCache(size)
            if states is not None:
                cache.cache = list(states[number])
            kept.append(cache)
        caches = put_together(self.places, reads, kept)
        if self.compression is None:
            return caches, kept
        for cache in caches:
            cache.offset = position
        return caches, caches


def states_of(kept: Sequence[Any]) -> States:
    """Return the states that recurrent layers have written to `ModelLayout.caches`."""
    return tuple(
        cache.leave() if isinstance(cache, CompressedReads) else tuple(cache.cache)
        for cache in kept
    )


def layout(model: nn.Module) -> ModelLayout:
    """Return the layout of a model, from the caches mlx-lm would give it.

    Raises:
        ModelError: a layer keeps something that is neither one key and value a token nor a state.
    """
    caches, compression = plain_caches(model), None
    if all(map(_compresses, caches)):
        caches, compression = _opened(model, caches)
    kept, states, places = taken_apart(caches)
    attention_windows = tuple(_window_of(cache, number) for number, cache in enumerate(kept))
    return ModelLayout(
        attention_windows, tuple(len(cache.cache) for cache in states), places, compression
    )


def _compresses(cache: Any) -> bool:
    """Tell whether a cache is of the kind of DeepSeek 4.1's own."""
    return all(hasattr(cache, name) for name in (*POINTS, *ROWS, "update_window"))


def _opened(model: nn.Module, caches: list[Any]) -> tuple[list[Any], Compression]:
    """Return the caches of a model that compresses, opened into their parts.

    A trial with as many tokens as fill every window and every group shows the states of a layer.
    They are never read: MLX knows the shapes.
    """
    ratios = [int(layer.self_attn.ratio) for layer in model.layers]
    every = lcm(*(ratio for ratio in ratios if ratio))
    tokens = -(-max(cache.window_size for cache in caches) // every) * every
    model(mx.zeros((1, tokens), mx.int32), cache=caches)
    opened: list[Any] = []
    rows: list[Rows] = []
    states: list[tuple[mx.array | None, ...]] = []
    most_bytes = 0
    for number, (cache, ratio) in enumerate(zip(caches, ratios, strict=True)):
        names = [name for name in ROWS if getattr(cache, name) is not None]
        own = [
            Rows(name, ratio, value.shape[-1], value.dtype, number, len(POINTS) + place)
            for place, name in enumerate(names)
            for value in [getattr(cache, name)]
        ]
        rows += own
        kept = mlx_lm.models.cache.ArraysCache(len(POINTS) + len(own))
        opened.append(Compressed(cache.window_size, (*own, kept)))
        states.append((cache.window, *[None] * (len(kept.cache) - 1)))
        for gathered in (cache.pending_kv, cache.pending_gate):
            if gathered is not None:  # up to one token less than a group
                most_bytes += (ratio - 1) * gathered.shape[-1] * gathered.dtype.size
    form = StateForm.of(tuple(states))
    return opened, Compression(tuple(rows), every, form, form.nbytes + most_bytes)


def _window_of(cache: Any, number: int) -> AttentionWindow:
    if isinstance(cache, Rows):
        return AttentionWindow()
    if type(cache) is mlx_lm.models.cache.RotatingKVCache:
        return AttentionWindow(cache.max_size - cache.keep, cache.keep)
    if type(cache) is mlx_lm.models.cache.ChunkedKVCache:
        return AttentionWindow(cache.chunk_size)  # and its masks hide what is in another chunk
    if type(cache) is mlx_lm.models.cache.KVCache:
        return AttentionWindow()
    raise ModelError(
        f"what layer {number} keeps ({type(cache).__name__}) the engine can neither share "
        f"nor bound yet; use penstock generate or penstock chat for this model"
    )


def plain_caches(model: nn.Module) -> list[Any]:
    """Return mlx-lm's own caches for a model: one sequence, unbounded."""
    return list(mlx_lm.models.cache.make_prompt_cache(model))
