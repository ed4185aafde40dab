"""`Encoder`: an encoder's weights and tokenizer, loaded from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from penstock.encoders.bert import Bert
from penstock.encoders.encoder_spec import MODERN_BERT, EncoderSpec, read_encoder_spec
from penstock.encoders.encoder_tokens import EncoderTokenizer
from penstock.encoders.modern_bert import ModernBert
from penstock.errors import ModelError, NeverFits, PenstockError
from penstock.heap import without_keeping
from penstock.memory.sizes import format_bytes
from penstock.models import named, recommended
from penstock.models.source import checked_source, first_line
from penstock.models.widening import slow_half

_CLASSES: Mapping[str, type[Bert] | type[ModernBert]] = {MODERN_BERT: ModernBert}
"""Classes of models that are not BERT's."""
HALF = (mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Encoder:
    model: Bert | ModernBert
    tokenizer: EncoderTokenizer

    @property
    def spec(self) -> EncoderSpec:
        return self.model.spec

    @property
    def nbytes(self) -> int:
        return self.model.nbytes


def load_encoder(path_or_name: str | Path) -> Encoder:
    """Load an encoder from a folder, a short name or a name on the Hugging Face hub.

    Raises:
        ModelError: the folder is incomplete or damaged, or its architecture is not supported.
    """
    spec = read_encoder_spec(encoder_folder(path_or_name))
    tokenizer = EncoderTokenizer(spec.folder, spec.most_tokens)
    try:
        with without_keeping():
            weights = {name: _wide(array) for name, array in _weights(spec.folder).items()}
            model = _CLASSES.get(spec.model_type, Bert)(spec, weights)
            mx.eval(model.arrays)  # in this thread: another could not evaluate them
            return Encoder(model, tokenizer)
    except PenstockError:
        raise
    # A boundary: MLX reads files of any origin.
    except Exception as error:
        raise ModelError(f"cannot load {spec.folder}: {first_line(error)}") from error


def expected_bytes(path_or_name: str | Path, limit_bytes: int) -> int:
    """Return the bytes that an encoder's weights will take, without reading them.

    Raises:
        ModelError: as `load_encoder`, where the config and the files' headers show it.
        NeverFits: the weights alone exceed the limit.
    """
    folder = encoder_folder(path_or_name)
    read_encoder_spec(folder)
    try:
        arrays = _weights(folder).values()
    except Exception as error:  # as above
        raise ModelError(f"cannot load {folder}: {first_line(error)}") from error
    nbytes = sum(array.size * (4 if _widens(array) else array.dtype.size) for array in arrays)
    if nbytes > limit_bytes:
        raise NeverFits(
            f"{folder.name}: the weights of {format_bytes(nbytes)} exceed the memory limit of "
            f"{format_bytes(limit_bytes)}; raise --memory-limit",
            nbytes,
            limit_bytes,
            limit_bytes,
        )
    return nbytes


def encoder_folder(path_or_name: str | Path) -> Path:
    """Return the folder of an encoder, downloading it first if it is given by name."""
    name = str(path_or_name)
    if name in named.MODELS and not Path(name).exists():
        return named.fetch(name)
    path = Path(name).expanduser()
    return Path(checked_source(path)) if path.exists() else recommended.pull(name)


def _weights(folder: Path) -> Mapping[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))  # type: ignore[arg-type]
    return {name: array for name, array in weights.items() if not name.endswith("position_ids")}


def _widens(array: mx.array) -> bool:
    """Return whether an array is converted to float32: MLX is slow with 16-bit floats on a CPU."""
    return array.dtype in HALF and slow_half()


def _wide(array: mx.array) -> mx.array:
    wide = array.astype(mx.float32) if _widens(array) else array
    mx.eval(wide)
    return wide
