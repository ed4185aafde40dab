"""The only module that imports mlx-lm: loading, chat templates and caches.

`tests/test_contract_mlx_lm.py` tests its assumptions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from math import lcm
from pathlib import Path
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
from penstock.models.adapters import put_adapters
from penstock.models.constants import evaluate
from penstock.models.image_reader import ImageReader
from penstock.models.mtp import with_head
from penstock.models.source import (
    MLX_LM,
    SourceChoice,
    checked_source,
    first_line,
    not_downloaded,
    read_generation_config,
)
from penstock.models.template_renderer import TemplateRefusal, TemplateRenderer
from penstock.models.template_trial import check_template
from penstock.models.unread_weights import UnreadTensor, UnreadWeights
from penstock.models.weight_packer import decision, pack
from penstock.models.widening import Widening, widen
from penstock.open_files import unchanged_limit
from penstock.passing_folders import passing_folder

named.forbid_downloads()
with unchanged_limit():
    import mlx_lm
    import mlx_lm.models.base
    import mlx_lm.models.cache
    import mlx_lm.models.rope_utils
    import mlx_lm.tokenizer_utils
    import mlx_lm.utils
    from huggingface_hub.errors import LocalEntryNotFoundError
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
"""Keys of a message under which clients send its reasoning."""
INDEX = "model.safetensors.index.json"
SAFELY = {"trust_remote_code": False}
"""Settings of tokenizers: never run code in a model's folder, and do not ask whether to."""


@dataclass(frozen=True, slots=True)
class Loaded:
    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    weights_note: str | None = None
    """Note on the conversion of the weights; None if they are native."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling settings in the model's `generation_config.json`."""
    source: SourceChoice = MLX_LM
    """Library of the model's classes."""


class ModelReader(Protocol):
    """Reads model folders with the classes of one library, without evaluating the weights."""

    release: str
    """Name and version of the library."""

    def knows(self, model_type: str) -> bool:
        """Return whether the library supports a model type, without importing its classes."""

    def reads_images(self, config: Mapping[str, Any]) -> bool:
        """Return whether the reader supports image inputs for models with this config."""

    def image_reader(self, source: str) -> ImageReader | None:
        """Return the reader of a model's images without its weights; None for text-only models."""

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        """Return the model, tokenizer and config of a folder or hub name."""

    def read_model(self, folder: Path) -> nn.Module: ...

    def headed(self, head: Path) -> ModelReader:
        """Return a reader of models together with a multi-token head (MTP).

        Args:
            head: folder of the head, which may be the model's.
        """


class MlxLmReader:
    release = f"mlx-lm {version('mlx-lm')}"

    def knows(self, model_type: str) -> bool:
        name = mlx_lm.utils.MODEL_REMAPPING.get(model_type, model_type)
        named = name.replace("-", "_").isidentifier()
        return bool(named and find_spec(f"mlx_lm.models.{name}") is not None)

    def reads_images(self, config: Mapping[str, Any]) -> bool:
        return False

    def image_reader(self, source: str) -> ImageReader | None:
        return None

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        model, tokenizer, config = mlx_lm.load(source, SAFELY, lazy=True, return_config=True)
        return model, tokenizer, config

    def read_model(self, folder: Path) -> nn.Module:
        model: nn.Module = mlx_lm.utils.load_model(folder, lazy=True)[0]
        return model

    def headed(self, head: Path) -> ModelReader:
        return HeadedReader(head)


class HeadedReader(MlxLmReader):
    """Reads a model together with a multi-token head (MTP)."""

    def __init__(self, head: Path) -> None:
        self._head = head

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        folder = Path(source)
        tokenizer, config = read_text_side(folder)
        return self.read_model(folder), tokenizer, config

    def read_model(self, folder: Path) -> nn.Module:
        config, split = mlx_lm.utils.load_config(folder), None
        if not self._head.samefile(folder):
            split = partial(read_weights, self._head)
            coding = mlx_lm.utils.load_config(self._head).get("quantization")
            if coding is not None and "quantization_config" not in config:
                # It is taken for modules alone whose weights have scales.
                config.setdefault("quantization", coding)

        def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
            model_class, arguments = mlx_lm.utils._get_classes(config)
            return with_head(model_class, kv_cache, head_cache, split), arguments

        model: nn.Module
        model, _ = mlx_lm.utils.load_model(
            folder, lazy=True, model_config=config, get_model_classes=classes
        )
        return model


class ChangedReader(MlxLmReader):
    """Reads a model whose class and modules the caller's functions change."""

    def __init__(
        self,
        change_class: Callable[[type[nn.Module]], type[nn.Module]],
        change: Callable[[nn.Module], None],
    ) -> None:
        self._change_class = change_class
        self._change = change

    def read(self, source: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
        folder = Path(source)
        tokenizer, config = read_text_side(folder)
        return self.read_model(folder), tokenizer, config

    def read_model(self, folder: Path) -> nn.Module:
        def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
            model_class, arguments = mlx_lm.utils._get_classes(config)
            return self._change_class(model_class), arguments

        model: nn.Module
        model, _ = mlx_lm.utils.load_model(folder, lazy=True, get_model_classes=classes)
        self._change(model)
        return model


def head_cache(kv: Any) -> Any:
    """Return mlx-lm's cache of a multi-token head: `kv`, and a cache of its hidden state.

    Args:
        kv: cache of the head's keys and values; with an index, a list of this and the index keys'.
    """
    caches = mlx_lm.models.cache
    return caches.CacheList(kv, caches.ArraysCache(1))


def rope_of(
    dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> nn.Module:
    """Return mlx-lm's rotary position embedding of heads with `dim` values."""
    form = None if scaling is None else dict(scaling)
    rope: nn.Module = mlx_lm.models.rope_utils.initialize_rope(
        dim, theta, False, form, max_positions
    )
    return rope


def kv_cache() -> Any:
    """Return mlx-lm's cache of a layer that reads all tokens."""
    return mlx_lm.models.cache.KVCache()


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Read the safetensors files of a folder, without evaluating them."""
    files: list[Any] = [mx.load(str(file)) for file in sorted(folder.glob("model*.safetensors"))]
    return {name: weight for file in files for name, weight in file.items()}


def read_text_side(folder: Path) -> tuple[TokenizerWrapper, dict[str, Any]]:
    """Return the tokenizer and config of a folder whose model is loaded by another library."""
    config = mlx_lm.utils.load_config(folder)
    end = config.get("eos_token_id")
    return mlx_lm.utils.load_tokenizer(folder, SAFELY, eos_token_ids=end), config


def load_folder(
    source: str,
    weights_dtype: WeightsDtype,
    limit_bytes: int | None,
    reader: ModelReader,
    choice: SourceChoice,
    adapters: Mapping[str, Path],
) -> Loaded:
    """Load a model from a checked folder or hub name; see `loading.load_all`."""
    try:
        model, tokenizer, config = reader.read(source)
        _check_first_step(model)
        put_adapters(model, adapters)
        widening = decision(model, weights_dtype, limit_bytes)
        widening.check_limit(Path(source).name)
        logger.info("loading %s of weights", format_bytes(widening.loaded_bytes))
        with without_keeping():
            if widening.widens:
                widen(model, _dense)
            elif widening.packs:
                pack(model, _dense, exact=widening.exact)
            evaluate(model)
        if widening.widens or widening.packs:
            config["torch_dtype"] = "float32"
    # A boundary: mlx-lm, mlx-vlm, transformers, the hub client and MLX compute with values of a
    # config before they validate them, so they may raise any error.
    except BaseException as error:
        raise _unloadable(source, error) from error
    _complete_templates(tokenizer, source)
    _check_tokenizer(tokenizer, source)
    sampling = read_generation_config(source)
    return Loaded(model, tokenizer, config, widening.note, sampling, choice)


def folder_widening(
    source: str, weights_dtype: WeightsDtype, limit_bytes: int | None, reader: ModelReader
) -> Widening:
    """Return how the weights of a checked folder would be converted, without reading them."""
    try:
        return decision(reader.read_model(Path(source)), weights_dtype, limit_bytes)
    except BaseException as error:  # as above
        raise _unloadable(source, error) from error


FLOAT8_SCALES = "weight_scale_inv"
"""Name of the scales of FP8 weights, which mlx-lm's loader calls unknown where it ignores them."""


def _unloadable(source: str, error: BaseException) -> BaseException:
    if FLOAT8_SCALES in str(error):
        return ModelError(
            f"cannot load {source}: its FP8 weights have a scale a block, which mlx-lm does not "
            f"read for this model type, and mlx-vlm does: pip install mlx-vlm, without "
            f"--model-source mlx-lm"
        )
    if Path(source).is_dir():
        return _refusal(f"cannot load {source}", error)
    if isinstance(error, LocalEntryNotFoundError):
        return not_downloaded(source, error)
    return _refusal(f"there is no folder {source}, and it cannot be fetched", error)


SWITCHES: dict[type, Any] = {QuantizedSwitchLinear: SwitchLinear}
"""Dense class of each class of quantized experts; plug-ins add entries."""


def _dense(module: nn.Module) -> nn.Module | None:
    """Return a dense module of the same shape, with placeholder weights; None if unknown."""
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
    write_config: Callable[[Path], None],
    write_tokenizer: Callable[[Path], Callable[[Any], None]],
    tensors: Iterable[UnreadTensor],
    widening: Widening,
    *,
    path: Path,
    name: str,
) -> Loaded:
    """Load a model from another format than a model folder.

    Args:
        write_config: function that writes the config of a folder for mlx-lm's loaders.
        write_tokenizer: function that writes the tokenizer's files, on another thread. It returns
            one that completes the `tokenizers.Tokenizer` read from them.
        tensors: the weights; codes that are to be packed are read module by module.
        widening: how to convert the weights.
        path: path of the model, for error messages.
        name: name of the model, for error messages.
    """

    def read_tokenizer(folder: Path, ends: Any) -> TokenizerWrapper:
        return completed_tokenizer(folder, write_tokenizer(folder), ends)

    try:
        with passing_folder() as folder, ThreadPoolExecutor(1, "penstock-tokenizer") as beside:
            write_config(folder)
            model, config = mlx_lm.utils.load_model(folder, lazy=True, strict=False)
            # A tokenizer of 49,000 tokens takes as long as 135 million weights.
            reading = beside.submit(read_tokenizer, folder, config["eos_token_id"])
            nbytes = widening.native_bytes if widening.packs else widening.loaded_bytes
            with without_keeping():
                weights = UnreadWeights(model, tensors, nbytes)
                _check_first_step(model)
                if widening.packs:
                    weights.read_all(codes=False)
                    pack(model, _dense, exact=widening.exact, read=weights.read)
                weights.read_all()
                evaluate(model)
            tokenizer = reading.result()
    # A boundary, as in `load_folder`.
    except BaseException as error:
        raise _refusal(f"cannot load {path}", error) from error
    _check_tokenizer(tokenizer, name)
    return Loaded(model, tokenizer, config, widening.note)


def completed_tokenizer(
    folder: Path, complete: Callable[[Any], None], end_tokens: Any
) -> TokenizerWrapper:
    """Load a tokenizer from a folder whose files lack a part, such as the merges, and complete it.

    Args:
        complete: function that adds the part to a `tokenizers.Tokenizer`.
        end_tokens: ids of the tokens that end an answer.
    """
    tokenizer = mlx_lm.utils.load_tokenizer(folder, SAFELY, eos_token_ids=end_tokens)
    complete(tokenizer._tokenizer.backend_tokenizer)
    # Thinking and tool-call markers are tokenized by the wrapper, which needs the whole tokenizer.
    return TokenizerWrapper(
        tokenizer._tokenizer,
        lambda _: tokenizer._detokenizer,
        eos_token_ids=tokenizer._eos_token_ids,
        chat_template=tokenizer._chat_template,
        tool_call_start=tokenizer._tool_call_start,
        tool_call_end=tokenizer._tool_call_end,
        tool_parser=tokenizer._tool_parser,
        response_format=tokenizer._response_format,
    )


def load_part(
    path_or_name: str | Path, group: mx.distributed.Group, *, pipeline: bool = False
) -> Loaded:
    """Load this process's part of a model that mlx-lm divides among the processes of `group`.

    Without `pipeline`, each process gets a part of every layer (tensor parallelism). With it, or if
    the model's class supports nothing else, it gets whole layers. All processes of the group must
    call this function.

    Raises:
        ModelError: see `loading.load`; or mlx-lm cannot divide this model among the processes.
    """
    source, ranks = checked_source(path_or_name), group.size()
    if pipeline and Path(source).is_dir() and not (Path(source) / INDEX).is_file():
        raise ModelError(
            f"{source} has no {INDEX}, which lists the file of each layer; mlx_lm.convert "
            f"writes one"
        )
    try:
        model, tokenizer, config = mlx_lm.utils.sharded_load(
            source,
            pipeline_group=group if pipeline else None,
            return_config=True,
            tokenizer_config=SAFELY,
        )
        evaluate(model)
    # A boundary, as in `load_folder`.
    except BaseException as error:
        raise _refusal(f"cannot load {source} in {ranks} parts", error) from error
    _complete_templates(tokenizer, source)
    _check_tokenizer(tokenizer, source)
    if pipeline and not is_stage(model):
        raise ModelError(f"{source} cannot be divided by layers; remove --pipeline")
    divided = ("hidden_layers",) if is_stage(model) else ("attention_heads", "key_value_heads")
    _check_divided(config, source, ranks, divided)
    return Loaded(model, tokenizer, config, sampling=read_generation_config(source))


def _check_divided(config: dict[str, Any], name: str, ranks: int, divided: Sequence[str]) -> None:
    """Raise ModelError unless all ranks get equal parts; mlx-lm would round the counts."""
    for place in (config, config.get("text_config") or {}):
        for what in divided:
            count = place.get(f"num_{what}")
            if isinstance(count, int) and count % ranks:
                raise ModelError(
                    f"{name} cannot be divided among {ranks} ranks: it has {count} "
                    f"{what.replace('_', ' ')}; use a number of ranks that divides it"
                )


def is_stage(model: nn.Module) -> bool:
    """Return whether a model is a pipeline stage: only some of its layers are in this process."""
    return getattr(getattr(model, "model", None), "pipeline_size", 1) > 1


def passes_on(model: nn.Module) -> bool:
    """Return whether a pipeline stage sends its output to another process."""
    return getattr(getattr(model, "model", None), "pipeline_rank", 0) > 0


def load_tokenizer(path_or_name: str | Path) -> TokenizerWrapper:
    """Load a model's tokenizer without its weights; raises errors like `loading.load`."""
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
    # Panics of tokenizers' Rust code are not subclasses of `Exception`.
    foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    if isinstance(error, PenstockError) or not foreign:
        return error
    return ModelError(f"{what}: {first_line(error)}")


def _check_first_step(model: nn.Module) -> None:
    model(mx.array([[0]]), cache=mlx_lm.models.cache.make_prompt_cache(model))


def _check_tokenizer(tokenizer: TokenizerWrapper, name: str) -> None:
    for token in tokenizer.eos_token_ids:
        if not isinstance(token, int) or token < 0:
            raise ModelError(f"{name}: the end token {token!r} is not a token id")
    for text in chat_templates(tokenizer).values():
        check_template(name, text)


def _complete_templates(tokenizer: TokenizerWrapper, source: str) -> None:
    """Add chat templates of the model's folder that transformers' tokenizers ignore."""
    templates = getattr(tokenizer, "chat_template", None)
    if tokenizer.has_chat_template and templates is None:
        return  # mlx-lm renders with Python code
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

    The text equals that of mlx-lm's `apply_chat_template`. A tokenizer class that overrides it is
    trusted, and runs in this process.

    Args:
        messages: Messages in OpenAI's format, oldest first.
        tools: Tools in OpenAI's format.
        answer: Whether to add the generation prompt.
        gone: Function that returns whether the text is no longer needed.
        template_args: Arguments of the template; `chat_template` replaces the template.

    Raises:
        TemplateRefusal: The template raises an error, or there is none.
        TemplateOverrun: The template exceeds its time or memory limit.
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
    # A boundary: a tokenizer's own code, and arguments that cannot be converted to JSON.
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
    """Tokenize text; `special` is whether the tokenizer adds special tokens such as BOS."""
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
        answer: Whether to add the generation prompt.
        renderer: Renderer to reuse; None starts a process for this call.
        template_args: Arguments of the template; `chat_template` replaces the template.

    Raises:
        ModelError: The model has no chat template, or the template refuses the messages or exceeds
            its time or memory limit.
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
        raise ModelError("the chat template renders the messages to an empty text")
    return tokens


@dataclass(frozen=True, slots=True)
class Compression:
    rows: tuple[Rows, ...]
    """Row arrays of all layers, in the model's order."""
    every: int
    state_form: StateForm
    """Form of a sequence's states at a position with full windows, and no open group or loose row.
    """
    state_bytes: int
    """Upper bound of a sequence's states in bytes, excluding loose rows."""


NO_COMPRESSION = Compression((), 1, NO_STATES, 0)
"""Compression of a model without compressed layers."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Layers of a model by kind of state, and construction of the caches that the model expects.

    A cache of mlx-lm is a layer with keys and values, the states of a recurrent layer, or a list of
    these.
    """

    attention_windows: tuple[AttentionWindow, ...]
    state_sizes: tuple[int, ...]
    places: tuple[Place, ...]
    state_caches: tuple[type, ...] = ()
    """Classes of the model's caches with states, constructed with the number of arrays."""
    compression: Compression = NO_COMPRESSION
    drops: bool = True
    """Whether sliding-window layers may drop tokens outside their window."""

    @property
    def compresses(self) -> bool:
        return bool(self.compression.rows)

    @property
    def rows(self) -> dict[int, Rows]:
        return dict(enumerate(self.compression.rows))

    def start_of(self, name: str) -> int:
        """Return the value of a state's array before the first token, by its name in `StateForm`.

        It is 0 unless the class of the cache has another in `starts`, by place.
        """
        number, place = map(int, name.split("."))
        starts: dict[int, int] = getattr(self.state_caches[number], "starts", {})
        return starts.get(place, 0)

    def caches(
        self, reads: Sequence[Any], states: States | None, position: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """Return the caches for a forward pass, and those among them that hold states."""
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
    """Return the layout of a model, derived from its mlx-lm caches; ModelError if unsupported."""
    # A plug-in's model describes its caches itself.
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
    """Return whether a cache has the interface of DeepSeek 4.1's cache."""
    return all(hasattr(cache, name) for name in (*POINTS, *ROWS, "update_window"))


def _opened(model: nn.Module, caches: list[Any]) -> tuple[list[Any], Compression]:
    """Split the caches of a model with compressed layers into row arrays and states."""
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
            if gathered is not None:  # at most one token less than a group
                most_bytes += (ratio - 1) * gathered.shape[-1] * gathered.dtype.size
    form = StateForm.of(tuple(states))
    return opened, Compression(tuple(rows), every, form, form.nbytes + most_bytes)


def _window_of(cache: Any, number: int) -> AttentionWindow:
    if isinstance(cache, Rows):
        return AttentionWindow()
    if type(cache) is mlx_lm.models.cache.RotatingKVCache:
        return AttentionWindow(cache.max_size - cache.keep, cache.keep)
    if type(cache) is mlx_lm.models.cache.ChunkedKVCache:
        return AttentionWindow(cache.chunk_size)  # the model's masks hide tokens of other chunks
    if type(cache) is mlx_lm.models.cache.KVCache:
        return AttentionWindow()
    raise ModelError(
        f"what layer {number} keeps ({type(cache).__name__}) the engine can neither share "
        f"nor bound yet; use mlx-lm for this model, with penstock.make_kv_cache"
    )


def plain_caches(model: nn.Module) -> list[Any]:
    """Return mlx-lm's default caches for a model: unbounded, for one sequence."""
    return list(mlx_lm.models.cache.make_prompt_cache(model))


def plain_cache() -> Any:
    """Return mlx-lm's `KVCache`, for one layer."""
    return mlx_lm.models.cache.KVCache()


def rotating_cache(max_size: int, keep: int) -> Any:
    return mlx_lm.models.cache.RotatingKVCache(max_size, keep)


def chunked_cache(chunk_size: int) -> Any:
    return mlx_lm.models.cache.ChunkedKVCache(chunk_size)
