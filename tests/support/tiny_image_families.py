"""Families of image models, as small as their classes allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]

VOCABULARY = 3_072
PATCH = 14
SIDE = 4 * PATCH
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
}
TOWER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": SIDE,
}
NO_PROCESSOR = {"preprocessor_config.json": {"image_processor_type": "none"}}
"""Files of a family whose processor reads its config."""


@dataclass(frozen=True, slots=True)
class ImageFamily:
    marks: tuple[str, ...]
    """Special tokens that the embedded tokenizer lacks, numbered from its size on."""
    config: Fields
    """Config; a value that is one of `marks` stands for its number."""
    files: Mapping[str, Fields]
    marker: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Names of special tokens in the tokenizer's config."""


# ---- Qwen

QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "none",
        "min_pixels": SIDE**2,
        "max_pixels": (4 * SIDE) ** 2,
        "patch_size": PATCH,
        "merge_size": 2,
    }
}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {
    **TEXT,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
"""Text of Qwen 3.5: every second layer is recurrent."""


def qwen(vision: Fields, text: Fields | None = None) -> ImageFamily:
    """Return a family of Qwen's; its older ones have the text's fields beside the others."""
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    fields = {**TEXT, **MROPE} if text is None else {"text_config": text}
    config = {**QWEN_IDS, **fields, "vision_config": vision}
    return ImageFamily(marks, config, QWEN_FILES, QWEN_MARKER)


QWEN_FAMILIES = {
    "qwen2_vl": qwen({"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": qwen({**QWEN_TOWER, "window_size": SIDE, "fullatt_block_indexes": [1]}),
    "qwen3_vl": qwen(
        {**QWEN_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        {**TEXT, **MROPE, "head_dim": 16, "model_type": "qwen3_vl_text"},
    ),
    "qwen3_vl_moe": qwen(
        {**QWEN_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        {
            **TEXT,
            **MROPE,
            **EXPERTS,
            "head_dim": 16,
            "model_type": "qwen3_vl_moe_text",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "qwen3_5": qwen(QWEN_TOWER, {**MIXED, "model_type": "qwen3_5_text"}),
    "qwen3_5_moe": qwen(
        QWEN_TOWER,
        {
            **MIXED,
            **EXPERTS,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
        },
    ),
}

# ---- Gemma

GEMMA_TEXT = {
    **TEXT,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
}
GEMMA_FAMILIES = {
    "gemma3": ImageFamily(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {
            "image_token_index": "<image_soft_token>",
            "hidden_size": 64,
            "text_config": {
                **GEMMA_TEXT,
                "query_pre_attn_scalar": 16,
                "mm_tokens_per_image": 4,
                "model_type": "gemma3_text",
            },
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": SIDE, "width": SIDE},
                "image_seq_length": 4,
            },
            "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        },
        "<start_of_image>",
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "gemma4": ImageFamily(
        ("<|image>", "<image|>", "<|image|>", "<|audio|>", "<|video|>"),
        {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "hidden_size": 64,
            "text_config": {
                **GEMMA_TEXT,
                "global_head_dim": 16,
                "model_type": "gemma4_text",
                "vocab_size_per_layer_input": VOCABULARY,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **TOWER,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "position_embedding_size": 64,
                "default_output_length": 9,
            },
        },
        {
            "processor_config.json": {
                "image_seq_length": 9,
                "image_processor": {
                    "patch_size": PATCH,
                    "max_soft_tokens": 9,
                    "pooling_kernel_size": 3,
                },
            }
        },
        "<|image|>",
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
        },
    ),
}

# ---- in tiles

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def tiled(name: str) -> ImageFamily:
    """Return Idefics 3 or SmolVLM, whose images are split into tiles and a thumbnail."""
    return ImageFamily(
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *TILES),
        {
            "image_token_id": "<image>",
            "scale_factor": 2,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "idefics3_vision"},
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": f"{name}ImageProcessor",
                "do_image_splitting": True,
                "size": {"longest_edge": 2 * SIDE},
                "max_image_size": {"longest_edge": SIDE},
            },
            "processor_config.json": {"image_seq_len": 4, "processor_class": f"{name}Processor"},
        },
        "<image>",
    )


TILED_FAMILIES = {
    "idefics3": tiled("Idefics3"),
    "smolvlm": tiled("SmolVLM"),
    "internvl_chat": ImageFamily(
        ("<image>", "<img>", "</img>", "<IMG_CONTEXT>"),
        {
            "image_token_index": "<IMG_CONTEXT>",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "model_type": "intern_vit_6b"},
        },
        NO_PROCESSOR,
        "<image>",
    ),
}

# ---- in rows


def rows(merged: Fields) -> ImageFamily:
    """Return Pixtral or Mistral 3, whose images are rows of patches with a separator token."""
    return ImageFamily(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {
            "image_token_index": "[IMG]",
            "text_config": {**TEXT, "head_dim": 16, "model_type": "mistral"},
            "vision_config": {
                **TOWER,
                "model_type": "pixtral",
                "head_dim": 16,
                "image_size": 2 * SIDE,
            },
            **merged,
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "PixtralImageProcessor",
                "size": {"longest_edge": 2 * SIDE},
                "patch_size": {"height": PATCH, "width": PATCH},
            },
            "processor_config.json": {
                "patch_size": PATCH,
                "image_token": "[IMG]",
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
                **merged,
            },
        },
        "[IMG]",
    )


ROW_FAMILIES = {"pixtral": rows({}), "mistral3": rows({"spatial_merge_size": 2})}

KIMI = ImageFamily(
    ("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    {
        "media_placeholder_token_id": "<|media_pad|>",
        "text_config": {
            **TEXT,
            "num_key_value_heads": 4,
            "model_type": "deepseek_v3",
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "topk_method": "noaux_tc",
        },
        "vision_config": {
            "model_type": "moonvit",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": PATCH,
            "intermediate_size": 48,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
    },
    NO_PROCESSOR,
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
)

LLAVA = ImageFamily(
    ("<image>",),
    {
        "image_token_index": "<image>",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {
            **TOWER,
            "num_hidden_layers": 3,
            "model_type": "clip_vision_model",
            "projection_dim": 32,
        },
    },
    {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
    },
    "<image>",
    {"image_token": "<image>"},
)

FAMILIES = {
    **QWEN_FAMILIES,
    **GEMMA_FAMILIES,
    **TILED_FAMILIES,
    **ROW_FAMILIES,
    "kimi_vl": KIMI,
    "llava": LLAVA,
}
