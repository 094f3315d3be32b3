# SPDX-License-Identifier: Apache-2.0
"""Keys of a published config.json that no reader here uses: which of them have no effect on the computation, and
which change it in some network of transformers.

Source: the configurations of transformers 4.57 and 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IRRELEVANT = """
    model_type architectures auto_map _name_or_path name_or_path transformers_version _commit_hash tokenizer_class
    torch_dtype dtype use_bfloat16 fp32_residual_connection attention_softmax_in_fp32 torchscript tf_legacy_loss
    use_cache use_cache_quantization use_cache_kernel _attn_implementation attn_implementation _flash_attn_2_enabled
    use_flash_attn use_flash_attention bias_dropout_fusion apply_query_key_layer_scaling chunk_size_feed_forward
    pretraining_tp gradient_checkpointing initializer_range initializer_factor embedding_init_std
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id gmask_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id user_token_id assistant_token_id
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef aux_loss_coef z_loss_coef
    return_dict use_return_dict output_scores return_dict_in_generate remove_invalid_values is_decoder tie_encoder_decoder
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix prefix_projection
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups temperature top_k
    top_p typical_p repetition_penalty diversity_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences suppress_tokens begin_suppress_tokens exponential_decay_length_penalty
    attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob classifier_dropout embd_pdrop
    resid_pdrop attn_pdrop embedding_dropout residual_dropout dropout emb_dropout_prob attn_dropout_prob layerdrop
    router_jitter_noise input_jitter_noise
    ep_size bias use_bias qkv_bias vocab_size seq_length max_sequence_length n_positions original_max_position_embeddings
    max_position_embeddings intermediate_size head_dim num_key_value_heads unsloth_version unsloth_fixed
"""
IRRELEVANT = frozenset(_IRRELEVANT.split())
"""Keys of files, types, generation and training; biases and sizes, which the tensors themselves show."""

_NOT_GIVEN = """
    quantization_config compression_config per_layer_config block_configs rope_scaling rope_parameters rope_local_base_freq
    rotary_dim rotary_emb_base mrope_section no_rope_layers no_rope_layer_interval nope_layer_interval
    attn_logit_softcapping attn_logit_softcap final_logit_softcapping final_logit_softcap logits_soft_cap
    attention_logit_cap query_pre_attn_scalar attention_multiplier attention_scale attn_scale softmax_scale clip_qkv
    attention_chunk_size floor_scale scale_depth dim_model_base mup_denominator unpadded_vocab_size pre_seq_len
    cross_attention_layers attention_types attn_type attn_config pruned_heads
    sliding_window_list swa_layers dsa_layers index_topk index_n_heads index_head_dim block_post_layernorm_idx
    router_sliding_window mhc_num_stream mhc_recur_norm mhc_use_gamma
"""
_OFF = """
    quantization_bit sliding_window attention_window_size window_size use_sliding_window use_dynamic_ntk use_logn_attn
    alibi use_alibi use_bidirectional_attention add_cross_attention is_encoder_decoder prefix_lm qk_norm use_qk_norm
    qk_layernorm use_qk_layernorm attn_temperature_tuning attn_output_gate attention_sink param_sink_number
    num_sink_tokens attention_value_scale scale_attn_by_inverse_layer_idx parallel_attn use_parallel_residual
    new_decoder_architecture rope_interleave rope_interleaved rotary_interleaved interleaved_qkv use_mrope
    use_mome use_mhc param_sink_with_value
    position_encoding_2d scale_embedding embedding_layernorm layernorm_embedding normalize_embedding
    norm_after_embedding sandwich_norm use_post_norm post_norm norm_topk_prob mlp_bias first_k_dense_replace
    n_shared_experts use_mup num_kv_shared_layers use_double_wide_mlp apply_layernorm_1p rms_norm_add_unit_offset
"""
_ONE = """
    partial_rotary_factor rotary_pct rope_percent rope_ratio embedding_multiplier embedding_multiplier_scale scale_emb
    embedding_scale embed_scale residual_multiplier residual_scale logits_scaling logit_scale logits_scale
    lm_head_multiplier output_multiplier_scale attn_output_multiplier attention_in_multiplier attention_out_multiplier
    key_multiplier logits_mup_width_multiplier width_multiplier routed_scaling_factor router_scaling_factor
    decoder_sparse_step moe_layer_freq moe_layer_interval n_group topk_group
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NOT_GIVEN.split(), ([], {}, None)),
    **dict.fromkeys(_OFF.split(), (None, 0, False)),
    **dict.fromkeys(_ONE.split(), (None, False, 1)),
    **dict.fromkeys(("is_causal", "causal", "scale_attn_weights", "rmsnorm"), (None, True)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), (None, "swish", "silu")),
    "rope_theta": (None, 10000),
    "position_embedding_type": (None, "rotary", "rope"),
    "scoring_func": (None, "softmax"),
    "mlp_only_layers": (None, []),
}
"""Key -> the values that leave a network as it is without the key. Any other one is an error, which names the
last."""
TRUTH_VALUES = ("tie_word_embeddings", "attention_bias", "qkv_bias", "add_qkv_bias")
"""Boolean keys; a text would count as true, whatever it is."""
FULL_ATTENTION = ("full_attention", "attention")
"""Supported values in `layer_types`."""


class TrackedKeys(dict[str, Any]):
    """A config.json that records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def key_problems(values: TrackedKeys) -> Iterator[str]:
    """List keys that nobody read and that change the computation."""
    without_window = values.get("use_sliding_window") is False
    for key, value in values.items():
        if key in TRUTH_VALUES and value not in (None, True, False):
            yield f"{key} must be true or false, got {value!r}"
        if key in values.asked and key != "use_sliding_window":
            continue
        if key == "layer_types":
            kinds = value if isinstance(value, list) else [value]
            if value is not None and any(kind not in FULL_ATTENTION for kind in kinds):
                yield f"layer_types is {value!r}; only {FULL_ATTENTION[0]!r} is supported"
        elif key in NEUTRAL and value not in NEUTRAL[key] and not (key == "sliding_window" and without_window):
            yield f"{key} is {value!r}; only {NEUTRAL[key][-1]!r} is supported"


def unknown_keys(values: TrackedKeys) -> list[str]:
    """Keys that nobody read and that are unknown here, without those that have no effect."""
    known = values.asked | IRRELEVANT | NEUTRAL.keys() | {"layer_types", "max_window_layers"}
    return [key for key, value in values.items() if key not in known and value not in (None, False, "", [], {})]
