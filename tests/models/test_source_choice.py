"""The choice of a model library if mlx-vlm is not installed."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from penstock.cli import main
from penstock.errors import ModelError
from penstock.models.loading import load
from penstock.models.mlx_lm import MlxLmReader
from penstock.models.source_choice import choose_source
from penstock.recall import MODEL_PATH

without_mlx_vlm = pytest.mark.skipif(find_spec("mlx_vlm") is not None, reason="mlx-vlm is there")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return the embedded model with a model type that mlx-lm lacks."""
    copied = tmp_path / "model"
    shutil.copytree(MODEL_PATH, copied, copy_function=shutil.copyfile)
    file = copied / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "qwen4_exp"}))
    return copied


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "lfm2-vl", "lille-130m", "kimi_k2", "bailing_hybrid"]
)
def test_mlx_lm_model_types_are_recognized(model_type: str) -> None:
    assert MlxLmReader().knows(model_type)


@pytest.mark.parametrize("model_type", ["qwen4_exp", "", "..", "../llama", "a.b", "llama.py", " "])
def test_other_model_types_are_not_recognized(model_type: str) -> None:
    assert not MlxLmReader().knows(model_type)


def test_mlx_lm_is_chosen_for_its_model_types() -> None:
    choice, _ = choose_source(str(MODEL_PATH))
    assert choice.name == "mlx-lm" and "llama" in choice.why


def test_requested_source_is_chosen(foreign: Path) -> None:
    assert choose_source(str(foreign), "mlx-lm")[0].name == "mlx-lm"


@without_mlx_vlm
@pytest.mark.parametrize("flags", [(), ("--model-source", "mlx-vlm")])
def test_missing_mlx_vlm_gives_one_line_install_hint(
    flags: tuple[str, ...], foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", "--model", str(foreign), *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "pip install mlx-vlm" in shown.err


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full", "shared"]},
        {"index_topk_pattern": "FS"},
        {"index_topk_freq": 4, "num_hidden_layers": 4},
    ],
)
@pytest.mark.parametrize("shares", [False, True])
def test_shared_index_needs_mlx_vlm(fields: dict[str, Any], shares: bool, foreign: Path) -> None:
    file = foreign / "config.json"
    whole = {"indexer_types": ["full"] * 2, "index_topk_pattern": "FF", "index_topk_freq": 1}
    added = fields if shares else {**fields, **whole}
    config = {**json.loads(file.read_text()), "model_type": "glm_moe_dsa", **added}
    file.write_text(json.dumps(config))
    if not shares:
        assert choose_source(str(foreign))[0].name == "mlx-lm"
    elif find_spec("mlx_vlm") is None:
        with pytest.raises(
            ModelError, match=r"another layer's sparse-attention index, .* pip install mlx-vlm"
        ):
            choose_source(str(foreign))
    else:
        assert choose_source(str(foreign))[0].name == "mlx-vlm"


@pytest.mark.parametrize("fields", [{}, {"index_topk_freq": 1}, {"index_topk_freq": "x"}])
def test_absurd_number_of_layers_costs_nothing(fields: dict[str, Any], foreign: Path) -> None:
    file = foreign / "config.json"
    absurd = {"model_type": "glm_moe_dsa", "num_hidden_layers": 10**15, **fields}
    file.write_text(json.dumps({**json.loads(file.read_text()), **absurd}))
    assert choose_source(str(foreign))[0].name == "mlx-lm"


@without_mlx_vlm
def test_missing_mlx_vlm_raises_model_error(foreign: Path) -> None:
    with pytest.raises(ModelError, match="has no model type qwen4_exp"):
        choose_source(str(foreign))


@pytest.mark.parametrize(
    ("fields", "as_draft"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 drafters with several layers"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "no valid 'block_size'"),
        ({"model_type": "glm4_moe_lite_mtp"}, "a drafter (glm4_moe_lite_mtp)"),
        ({"model_type": "gemma4_assistant"}, "a drafter (gemma4_assistant)"),
    ],
)
def test_drafters_that_do_not_fit_are_refused_by_name(
    fields: dict[str, Any], as_draft: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = foreign / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "llama", **fields}))
    name = fields.get("architectures", [fields.get("model_type")])[0]
    flags = ["--speculative-tokens", "4", "--draft-model", str(foreign)]
    for command, words in (
        (["--model", str(foreign)], f"a drafter ({name})"),
        (["--model", str(MODEL_PATH), *flags], as_draft),
    ):
        assert main(["generate", "Hello", *command]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert words in shown.err


@pytest.mark.parametrize("function", ["hf_hub_download", "snapshot_download"])
def test_hub_that_cannot_be_reached_is_named_without_classes(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config cannot be fetched, or it was fetched before, and the weights cannot."""

    def unreached(*_: Any, **__: Any) -> None:
        cause = ConnectionError("[Errno -2] Name or service not known")
        raise LocalEntryNotFoundError(f"Got: ConnectError: {cause}") from cause

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: None)
    monkeypatch.setattr("mlx_lm.utils.snapshot_download", unreached)
    monkeypatch.setattr(f"huggingface_hub.{function}", unreached)
    with pytest.raises(ModelError) as refused:
        load("owner/missing")
    reached, _, remedy = str(refused.value).partition("; ")
    assert reached.startswith("there is no folder owner/missing, it is not downloaded, and http")
    assert reached.endswith(" cannot be reached ([Errno -2] Name or service not known)")
    assert remedy == (
        "check the network, or use a model that is on this machine: penstock models lists them"
    )
