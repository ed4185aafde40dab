"""The only module that imports mlx-lm: loading, chat templates and caches.

`tests/test_contract_mlx_lm.py` tests its assumptions.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.span_attention import AttentionWindow
from penstock.config import WeightsDtype
from penstock.errors import ModelError, PenstockError
from penstock.heap import without_keeping
from penstock.kv.compressed import POINTS, ROWS, Compressed, CompressedReads, Rows
from penstock.kv.states import NO_STATES, Place, StateForm, States, put_together, taken_apart
from penstock.memory.sizes import format_bytes
from penstock.models import named, template_files
from penstock.models.source import (
    MLX_LM,
    SourceChoice,
    checked_source,
    first_line,
    read_generation_config,
)
from penstock.models.template_renderer import TemplateRefusal, TemplateRenderer
from penstock.models.template_trial import check_template
from penstock.models.weight_packer import decision, pack
from penstock.models.widening import Widening, widen
from penstock.open_files import unchanged_limit

named.forbid_downloads()
with unchanged_limit():
    import mlx_lm
    import mlx_lm.models.base
    import mlx_lm.models.cache
    import mlx_lm.tokenizer_utils
    import mlx_lm.utils
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = [
    "Loaded",
    "ModelLayout",
    "TokenizerWrapper",
    "chat_templates",
    "encode",
    "is_stage",
    "layout",
    "load_folder",
    "load_part",
    "load_tokenizer",
    "load_written",
    "passes_on",
    "render",
    "rendered_text",
    "set_chat_template",
]

logger = logging.getLogger(__name__)

Message = dict[str, str]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; transformers passes the first two to templates."""
NOTE_SECONDS = 2.0
"""Seconds between log messages while weights are read."""
INDEX = "model.safetensors.index.json"
SAFELY = {"trust_remote_code": False}
"""Settings of tokenizers: code in a model's folder is not run, without a prompt for permission."""


@dataclass(frozen=True, slots=True)
class Loaded:
    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    weights_note: str | None = None
    """Note on the dtype of the weights; None if they stay native."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling settings in the model's `generation_config.json`."""
    source: SourceChoice = MLX_LM
    """Library of the model's classes."""


class ModelReader(Protocol):
    """Reads model folders with the classes of a library; weights stay unevaluated."""

    release: str
    """Name and version of the library."""

    def knows(self, model_type: str) -> bool:
        """Return whether the library has the model type; its classes are not imported."""

    def reads_images(self, config: Mapping[str, Any]) -> bool:
        """Return whether images of models with a config are read."""

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        """Return the model, tokenizer and config of a folder or hub name."""

    def read_model(self, folder: Path) -> nn.Module: ...


class MlxLmReader:
    release = f"mlx-lm {version('mlx-lm')}"

    def knows(self, model_type: str) -> bool:
        name = mlx_lm.utils.MODEL_REMAPPING.get(model_type, model_type)
        named = name.replace("-", "_").isidentifier()
        return bool(named and find_spec(f"mlx_lm.models.{name}") is not None)

    def reads_images(self, config: Mapping[str, Any]) -> bool:
        return False

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        model, tokenizer, config = mlx_lm.load(source, SAFELY, lazy=True, return_config=True)
        return model, tokenizer, config

    def read_model(self, folder: Path) -> nn.Module:
        model: nn.Module = mlx_lm.utils.load_model(folder, lazy=True)[0]
        return model


def read_text_side(folder: Path) -> tuple[TokenizerWrapper, dict[str, Any]]:
    """Return the tokenizer and the config of a folder whose model another library loads."""
    config = mlx_lm.utils.load_config(folder)
    end = config.get("eos_token_id")
    return mlx_lm.utils.load_tokenizer(folder, SAFELY, eos_token_ids=end), config


def load_folder(
    source: str,
    weights_dtype: WeightsDtype,
    limit_bytes: int | None,
    reader: ModelReader,
    choice: SourceChoice,
) -> Loaded:
    """Load a model from a checked folder or hub name; see `loading.load_all`."""
    try:
        model, tokenizer, config = reader.read(source)
        _check_first_step(model)
        widening = decision(model, weights_dtype, limit_bytes)
        widening.check_limit(Path(source).name)
        logger.info("loading %s of weights", format_bytes(widening.loaded_bytes))
        with without_keeping():
            if widening.widens:
                widen(model, _dense)
            elif widening.packs:
                pack(model, _dense, exact=widening.exact)
            mx.eval(model.parameters())  # type: ignore[no-untyped-call]
        if widening.widens or widening.packs:
            config["torch_dtype"] = "float32"
    # A boundary: a config says anything, and mlx-lm, mlx-vlm, transformers, the hub client and MLX
    # each compute with it before they check it: no list of their errors is ever complete.
    except BaseException as error:
        raise _unloadable(source, error) from error
    _complete_templates(tokenizer, source)
    _check_tokenizer(tokenizer, source)
    sampling = read_generation_config(source)
    return Loaded(model, tokenizer, config, widening.note, sampling, choice)


def folder_widening(
    source: str, weights_dtype: WeightsDtype, limit_bytes: int | None, reader: ModelReader
) -> Widening:
    """Return the decision about a checked folder's weights without reading them."""
    try:
        return decision(reader.read_model(Path(source)), weights_dtype, limit_bytes)
    except BaseException as error:  # as above
        raise _unloadable(source, error) from error


def _unloadable(source: str, error: BaseException) -> BaseException:
    what = f"cannot load {source}"
    if not Path(source).is_dir():
        what = f"there is no folder {source}, and it cannot be fetched"
    return _refusal(what, error)


SWITCHES: dict[type, Any] = {QuantizedSwitchLinear: SwitchLinear}
"""Class of dense experts by that of quantized ones; plug-ins add theirs."""


def _dense(module: nn.Module) -> nn.Module | None:
    """Return a dense module for a quantized one, with weights to be replaced; else None."""
    rows, columns = module.weight.shape[-2], module.scales.shape[-1] * module.group_size
    if isinstance(module, nn.QuantizedEmbedding):
        return nn.Embedding(rows, columns)
    if isinstance(module, nn.QuantizedLinear):
        return nn.Linear(columns, rows, bias="bias" in module)
    switch = SWITCHES.get(type(module))
    if switch is None:
        return None
    experts: nn.Module = switch(columns, rows, len(module.weight), bias="bias" in module)
    return experts


def load_written(
    write: Callable[[Path], None],
    weights: Iterator[tuple[str, mx.array]],
    widening: Widening,
    *,
    path: Path,
    name: str,
) -> Loaded:
    """Load a model from another format than a folder.

    Args:
        write: writes a folder for mlx-lm's loaders, without weights.
        weights: names and arrays of the weights, evaluated one by one.
        widening: decision about the dtype of the weights.
        path: path of the model, for error messages.
    """
    try:
        with TemporaryDirectory(prefix="penstock-") as written:
            folder = Path(written)
            write(folder)
            model, config = mlx_lm.utils.load_model(folder, lazy=True, strict=False)
            tokenizer = mlx_lm.utils.load_tokenizer(
                folder, SAFELY, eos_token_ids=config["eos_token_id"]
            )
        read_bytes = widening.native_bytes if widening.packs else widening.loaded_bytes
        with without_keeping():
            model.load_weights(list(_noted(weights, read_bytes)))
            _check_first_step(model)
            if widening.packs:
                pack(model, _dense, exact=widening.exact)
    # A boundary, as in `load_folder`.
    except BaseException as error:
        raise _refusal(f"cannot load {path}", error) from error
    _check_tokenizer(tokenizer, name)
    return Loaded(model, tokenizer, config, widening.note)


def _noted(
    weights: Iterator[tuple[str, mx.array]], total_bytes: int
) -> Iterator[tuple[str, mx.array]]:
    """Yield weights as they are read, and log progress periodically."""
    read_bytes, noted = 0, time.monotonic()
    logger.info("loading %s of weights", format_bytes(total_bytes))
    for name, weight in weights:
        yield name, weight
        read_bytes += weight.nbytes
        if time.monotonic() - noted >= NOTE_SECONDS:
            noted = time.monotonic()
            done = f"{format_bytes(read_bytes)} of {format_bytes(total_bytes)}"
            logger.info("loading weights: %s", done)


def load_part(
    path_or_name: str | Path, group: mx.distributed.Group, *, pipeline: bool = False
) -> Loaded:
    """Load this process's part of a model that mlx-lm divides among `group`.

    Without `pipeline`, that is a part of the heads of every layer, and of the matrices between
    them. With it, or if the model's class has nothing else, it is whole layers. All processes of
    the group must load.

    Raises:
        ModelError: see `loading.load`; or mlx-lm cannot divide this model among the group.
    """
    source, ranks = checked_source(path_or_name), group.size()
    if pipeline and Path(source).is_dir() and not (Path(source) / INDEX).is_file():
        raise ModelError(
            f"{source} has no {INDEX}, which says which file has whose layers; mlx_lm.convert "
            f"writes one"
        )
    try:
        model, tokenizer, config = mlx_lm.utils.sharded_load(
            source,
            pipeline_group=group if pipeline else None,
            return_config=True,
            tokenizer_config=SAFELY,
        )
    # A boundary, as in `load_folder`.
    except BaseException as error:
        raise _refusal(f"cannot load {source} in {ranks} parts", error) from error
    _complete_templates(tokenizer, source)
    _check_tokenizer(tokenizer, source)
    if pipeline and not is_stage(model):
        raise ModelError(f"{source} cannot be divided by layers here; leave --pipeline out")
    divided = ("hidden_layers",) if is_stage(model) else ("attention_heads", "key_value_heads")
    _check_divided(config, source, ranks, divided)
    return Loaded(model, tokenizer, config, sampling=read_generation_config(source))


def _check_divided(config: dict[str, Any], name: str, ranks: int, divided: Sequence[str]) -> None:
    """Raise ModelError unless all ranks get equal parts, as mlx-lm rounds heads and layers."""
    for place in (config, config.get("text_config") or {}):
        for what in divided:
            count = place.get(f"num_{what}")
            if isinstance(count, int) and count % ranks:
                raise ModelError(
                    f"{name} cannot be divided among {ranks} ranks: it has {count} "
                    f"{what.replace('_', ' ')}; take a number of ranks that divides them"
                )


def is_stage(model: nn.Module) -> bool:
    """Return whether a model has only some of its layers, with the others in other processes."""
    return getattr(getattr(model, "model", None), "pipeline_size", 1) > 1


def passes_on(model: nn.Module) -> bool:
    """Return whether a model's last layer passes its output to another process."""
    return getattr(getattr(model, "model", None), "pipeline_rank", 0) > 0


def load_tokenizer(path_or_name: str | Path) -> TokenizerWrapper:
    """Load a model's tokenizer without its weights. Raises like `loading.load`."""
    source = checked_source(path_or_name)
    try:
        tokenizer = mlx_lm.utils.load_tokenizer(source, SAFELY)
    # A boundary, as above.
    except BaseException as error:
        raise _refusal(f"cannot load the tokenizer of {source}", error) from error
    _complete_templates(tokenizer, source)
    _check_tokenizer(tokenizer, source)
    return tokenizer


def _refusal(what: str, error: BaseException) -> BaseException:
    # The tokenizers' Rust code panics with an exception that is no `Exception`.
    foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    if isinstance(error, PenstockError) or not foreign:
        return error
    return ModelError(f"{what}: {first_line(error)}")


def _check_first_step(model: nn.Module) -> None:
    model(mx.array([[0]]), cache=mlx_lm.models.cache.make_prompt_cache(model))


def _check_tokenizer(tokenizer: TokenizerWrapper, name: str) -> None:
    for token in tokenizer.eos_token_ids:
        if not isinstance(token, int) or token < 0:
            raise ModelError(f"{name}: the end token {token!r} is not a token's number")
    for text in chat_templates(tokenizer).values():
        check_template(name, text)


def _complete_templates(tokenizer: TokenizerWrapper, source: str) -> None:
    """Add the chat templates of the folder that transformers' tokenizers ignore."""
    templates = getattr(tokenizer, "chat_template", None)
    if tokenizer.has_chat_template and templates is None:
        return  # a program of mlx-lm's
    if (whole := template_files.completed(templates, source)) is not None and whole != templates:
        set_chat_template(tokenizer, whole)


def chat_templates(tokenizer: TokenizerWrapper) -> dict[str, str]:
    templates = getattr(tokenizer, "chat_template", None) or {}
    named = templates if isinstance(templates, dict) else {template_files.DEFAULT: templates}
    return {str(name): str(text) for name, text in named.items()}


def set_chat_template(tokenizer: TokenizerWrapper, templates: str | dict[str, str]) -> None:
    tokenizer._tokenizer.chat_template = templates
    tokenizer._chat_template = None
    tokenizer.has_chat_template = True


def rendered_text(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    renderer: TemplateRenderer,
    *,
    tools: Sequence[Any] | None = None,
    answer: bool = True,
    gone: Callable[[], bool] = lambda: False,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the model's chat template, and return the text.

    The text is that of mlx-lm's `apply_chat_template`. A transformers tokenizer class that renders
    by itself is trusted, and runs in this process.

    Args:
        messages: Messages in OpenAI's format, oldest first.
        tools: Tools in OpenAI's format.
        answer: Whether to end with the opening of the model's answer.
        gone: Returns whether the text is no longer needed.
        template_args: Arguments of the template; `chat_template` replaces it.

    Raises:
        TemplateRefusal: The template raises, or there is none.
        TemplateOverrun: The template does not end in time, or uses too much memory.
    """
    tokenizer_class, base = (
        type(tokenizer._tokenizer),
        mlx_lm.tokenizer_utils.PreTrainedTokenizerBase,
    )
    arguments = {"tools": tools, "add_generation_prompt": answer, **(template_args or {})}
    program = getattr(tokenizer, "_chat_template", None)
    try:
        if program is None and tokenizer_class.apply_chat_template is not base.apply_chat_template:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
        switch = tokenizer._thinking_kwarg
        if "enable_thinking" in arguments:
            arguments[switch] = arguments.pop("enable_thinking")
        arguments.setdefault(switch, tokenizer.has_thinking)
        if program is not None:
            place = inspect.getfile(program), program.__name__
            arguments["messages"] = list(messages)
            return renderer.render("", arguments, gone, program=place)
        source = str(
            tokenizer._tokenizer.get_chat_template(arguments.pop("chat_template", None), tools)
        )
        arguments = {"documents": None, **tokenizer.special_tokens_map, **arguments}
        arguments["messages"] = [_template_message(message) for message in messages]
        return renderer.render(source, arguments, gone)
    except ModelError:
        raise
    # A boundary: a tokenizer's own code, and arguments that no JSON can have.
    except Exception as error:
        raise TemplateRefusal(first_line(error)) from error


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers passes it to a template."""
    plain = {key: value for key, value in message.items() if value is not None}
    names = [name for name in REASONING_FIELDS if name in plain]
    if not names:
        return plain
    reasoning = plain[names[0]]
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def encode(tokenizer: TokenizerWrapper, text: str, *, special: bool = True) -> list[int]:
    """Tokenize raw text, with or without the special tokens that the tokenizer adds."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=special))
    # A boundary, as in `load_folder`.
    except BaseException as error:
        raise _refusal("the tokenizer fails on the text", error) from error


def render(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool = True,
    renderer: TemplateRenderer | None = None,
    **template_args: Any,
) -> list[int]:
    """Render a conversation with the model's chat template, and tokenize it.

    Args:
        messages: `role` and `content` of each message, oldest first.
        answer: Whether to end with the opening of the model's answer.
        renderer: Renderer to reuse; None starts a process for this conversation.
        template_args: Arguments of the template; `chat_template` replaces it.

    Raises:
        ModelError: The model has no chat template, or its template refuses the messages, does not
            end, or takes too much memory.
    """
    if not (tokenizer.has_chat_template or "chat_template" in template_args):
        raise ModelError(
            "this model has no chat template; use penstock generate --raw, or Engine.generate"
        )
    if renderer is None:
        with TemplateRenderer() as renderer:
            return render(tokenizer, messages, answer=answer, renderer=renderer, **template_args)
    try:
        text = rendered_text(
            tokenizer, messages, renderer, answer=answer, template_args=template_args
        )
    except TemplateRefusal as error:
        raise ModelError(f"the chat template refuses the messages: {error}") from error
    tokens = encode(tokenizer, text, special=False)
    if not tokens:
        raise ModelError("the chat template leaves nothing of the messages")
    return tokens


@dataclass(frozen=True, slots=True)
class Compression:
    rows: tuple[Rows, ...]
    """Rows of all layers, in the model's order."""
    every: int
    state_form: StateForm
    """Form of a sequence's states where groups and windows are full, and no row is loose."""
    state_bytes: int
    """Upper bound for a sequence's states in bytes, except loose rows."""


NO_COMPRESSION = Compression((), 1, NO_STATES, 0)
"""Compression of a model whose layers keep what they compute."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """KV and states that a model keeps for a sequence, and mlx-lm's caches made from them.

    A cache of mlx-lm is one layer with keys and values, the states of one recurrent layer, or a
    list of these.
    """

    attention_windows: tuple[AttentionWindow, ...]
    state_sizes: tuple[int, ...]
    places: tuple[Place, ...]
    state_caches: tuple[type, ...] = ()
    """Classes of the model's own caches with states; each is made from its size."""
    compression: Compression = NO_COMPRESSION
    drops: bool = True
    """Whether layers may lose tokens that are behind a window."""

    @property
    def compresses(self) -> bool:
        return bool(self.compression.rows)

    @property
    def rows(self) -> dict[int, Rows]:
        return dict(enumerate(self.compression.rows))

    def caches(
        self, reads: Sequence[Any], states: States | None, position: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """Return the caches for the model, and those among them that recurrent layers write to."""
        kept = []
        for number, size in enumerate(self.state_sizes):
            cache = self.state_caches[number](size)
            if states is not None:
                cache.cache = list(states[number])
            kept.append(cache)
        caches = put_together(self.places, reads, kept)
        if not self.compresses:
            return caches, kept
        for cache in caches:
            cache.offset = position
        return caches, caches


def states_of(kept: Sequence[Any]) -> States:
    return tuple(
        cache.leave() if isinstance(cache, CompressedReads) else tuple(cache.cache)
        for cache in kept
    )


def layout(model: nn.Module) -> ModelLayout:
    """Return the layout of a model from mlx-lm's caches for it; ModelError if unsupported."""
    # A plug-in's model says in which parts the engine keeps its caches.
    parts, compression = getattr(model, "cache_parts", None), NO_COMPRESSION
    caches = plain_caches(model) if parts is None else parts()
    if all(map(_compresses, caches)):
        caches, compression = _opened(model, caches)
    kept, states, places = taken_apart(caches)
    attention_windows = tuple(_window_of(cache, number) for number, cache in enumerate(kept))
    return ModelLayout(
        attention_windows,
        tuple(len(cache.cache) for cache in states),
        places,
        tuple(map(type, states)),
        compression,
        all(getattr(cache, "drops", True) for cache in caches),
    )


def _compresses(cache: Any) -> bool:
    """Return whether a cache is of the kind that DeepSeek 4.1 defines."""
    return all(hasattr(cache, name) for name in (*POINTS, *ROWS, "update_window"))


def _opened(model: nn.Module, caches: list[Any]) -> tuple[list[Any], Compression]:
    """Return the caches of a model with compressing layers, split into their parts."""
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
        layer_rows = [
            Rows(name, ratio, value.shape[-1], value.dtype, number, len(POINTS) + place)
            for place, name in enumerate(names)
            for value in [getattr(cache, name)]
        ]
        rows += layer_rows
        kept = mlx_lm.models.cache.ArraysCache(len(POINTS) + len(layer_rows))
        opened.append(Compressed(cache.window_size, (*layer_rows, kept)))
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
        f"nor bound yet; use mlx-lm for this model, with penstock.make_kv_cache"
    )


def plain_caches(model: nn.Module) -> list[Any]:
    """Return mlx-lm's own caches for a model: one sequence, unbounded."""
    return list(mlx_lm.models.cache.make_prompt_cache(model))


def plain_cache() -> Any:
    """Return mlx-lm's cache of one layer with keys and values."""
    return mlx_lm.models.cache.KVCache()


def rotating_cache(max_size: int, keep: int) -> Any:
    return mlx_lm.models.cache.RotatingKVCache(max_size, keep)


def chunked_cache(chunk_size: int) -> Any:
    return mlx_lm.models.cache.ChunkedKVCache(chunk_size)
