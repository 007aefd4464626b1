"""Which fields of a Hugging Face config are used, which are harmless, and which sound dangerous."""

from __future__ import annotations

import re
from typing import Final

CONSUMED: Final = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "sliding_window_pattern",
        "layer_types",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "no_rope_layers",
        "no_rope_layer_interval",
    }
)
NEUTRAL: Final = frozenset(
    {
        "model_type",
        "text_config",
        "vision_config",
        "initializer_range",
        "use_cache",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "pretraining_tp",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "cache_implementation",
        "attn_implementation",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "id2label",
        "label2id",
        "problem_type",
        "num_labels",
        "task_specific_params",
        "tokenizer_class",
        "name_or_path",
    }
)
"""Fields that say nothing about the mathematics of inference."""

SOUNDS_MATHEMATICAL: Final = re.compile(
    "norm|rope|rotary|attn|attention|scal|multipl|bias|cap|window|expert|moe|act|alibi|residual"
    "|clip|logit|layer|quant|sparse|bidirectional|ssm|conv|mtp|predict"
)
"""What a field that Transformers does not know may not be called, if it is set."""
