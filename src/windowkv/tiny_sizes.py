"""What the sizes in model configs are called, and how small each may be.

Knows names and numbers, collected from the configs of transformers. Knows nothing of how a model is built.
"""

import re
from collections.abc import Mapping
from typing import Any

WINDOW, VOCAB = 8, 128
LAYERS = 4  # two of each kind, and more where there are more kinds
INITIALIZER = 0.15  # with the usual 0.02 a model hardly notices what attention does
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, ROTATED = 64, 96, 4, 2, 16, 8
OUT_OF_REACH = 100_000  # an id that no text has


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_BY_SIZE: tuple[tuple[str, Any], ...] = (
    ("vocab_size decoder_vocab_size vocab_size_per_layer_input text_vocab_size padded_vocab_size", VOCAB),
    ("unpadded_vocab_size output_vocab_size", VOCAB),
    (
        "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size",
        HIDDEN,
    ),
    ("word_embed_proj_dim attention_hidden_size cross_attention_hidden_size lru_width backbone_hidden_size", HIDDEN),
    ("dim_model_base project_dim projection_dim", HIDDEN),
    ("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff d_ff n_inner", INTERMEDIATE),
    ("ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size", INTERMEDIATE),
    ("shared_intermediate_size prefix_dense_intermediate_size", INTERMEDIATE),
    ("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", HEADS),
    ("attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads", HEADS),
    ("num_sliding_attention_heads linear_num_value_heads linear_num_heads", HEADS),
    ("num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups", KV_HEADS),
    ("num_global_key_value_heads linear_num_key_heads", KV_HEADS),
    ("head_dim kv_channels d_head dim_head swa_head_dim attention_head_size d_kv global_head_dim", HEAD_DIM),
    ("linear_head_dim query_pre_attn_scalar index_head_dim hidden_size_per_layer_input ple_embed_dim", HEAD_DIM),
    ("kv_lora_rank mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size", 16),
    ("mamba_chunk_size chunk_size router_hidden_size", 16),
    ("max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions", 1024),
    ("model_max_length max_sequence_length", 1024),
    ("sliding_window sliding_window_size attention_chunk_size local_attention attention_window_size", WINDOW),
    ("window_size keep_window_size local_attention_window_len", WINDOW),
    ("initializer_range init_std embed_init_std embedding_initializer_range", INITIALIZER),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    ("num_experts_per_tok num_experts_per_token top_k_experts moe_top_k moe_topk moe_k", 2),
    ("n_group num_expert_group topk_group num_shared_experts n_shared_experts moe_num_shared_experts", 1),
    ("moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size", 32),
    ("expert_ffn_hidden_size moe_shared_expert_intermediate_size share_expert_dim moe_hidden_size", 32),
    ("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
    ("moe_layer_end_index", 3),
    ("q_lora_rank o_lora_rank", 24),
    ("qk_rope_head_dim qk_nope_head_dim rotary_dim", ROTATED),
    ("linear_key_head_dim linear_value_head_dim mamba_dt_rank time_step_rank mamba_n_heads mamba_num_heads", 8),
    ("laurel_rank loop_gate_rank hc_lowrank gated_norm_rank adapter_rank block_multiple_of", 8),
    ("v_head_dim index_topk", 12),
    ("mamba_d_ssm", 128),
    ("mamba_n_groups mamba_ngroups n_groups", 1),
    ("altup_num_inputs hc_mult hc_count split_ngram_parts type_vocab_size max_window_layers", 2),
    ("index_n_heads", 16),  # with few, scores are zero so often that which keys are picked is a matter of ties
    ("index_block_size d_rel number_of_conv_states", 4),
    ("index_topk_blocks", 3),
    ("num_filters", 2),
    ("ngram_vocab_size_base mem_len pronunciation_vocab_size shape_vocab_size", 64),
    ("pronunciation_embed_dim shape_embed_dim", 64),
    ("num_mtp_layers num_nextn_predict_layers", 0),
)
SIZES: Mapping[str, Any] = {name: size for names, size in _BY_SIZE for name in names.split()}
DEPTHS = _names(
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers layers"
)
TOWER_DEPTHS = _names(  # of a vision or audio part, which a text never reaches
    "num_hidden_layers depth num_layers encoder_layers decoder_layers n_layers num_blocks layers num_global_layers "
    "conf_num_hidden_layers n_layer decoder_num_layers"
)
TEXT_WIDTHS = frozenset({"text_hidden_size", "out_hidden_size"})  # of what such a part hands to the text
WINDOWS = frozenset({"sliding_window", "attention_chunk_size"})
DROPOUT = re.compile(r"(drop(out)?(_rate|_prob|_p)?|_pdrop|layerdrop|jitter_noise|jitter_eps|drop_path_rate)$")
TEXT_PARTS = _names(
    "text_config decoder decoder_config llm_config language_config global_config encoder_config patcher_config "
    "thinker_config attn_config ffn_config backbone_config text_model_config"
)
MEDIA_TOKENS = frozenset({"image_token_id", "image_token_index", "video_token_id", "audio_token_id"})


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)} | more


_MIXED = ["sliding_attention", "full_attention"] * 2
# What fits small sizes in one family only, by model_type.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": _sections(4, 2, 2), "full_attention": _sections(4, 2, 2)},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "dots3_note_text": {  # of its sliding layers
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": OUT_OF_REACH},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": OUT_OF_REACH},
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_5_vl_text": {"rope_parameters": _sections(4, 2, 2)},
    "qwen2_vl_text": {"rope_parameters": _sections(4, 2, 2)},
    "qwen2_5_omni_text": {"rope_parameters": _sections(4, 2, 2)},
}
