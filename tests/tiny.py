"""Tiny random models of every kind of window, and the reference that needs no cache.

initializer_range is large on purpose: with the usual 0.02 a model hardly notices what attention does, and a test of the
window's edge could not fail.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import transformers as hf
from torch import Tensor

WINDOW = 8
VOCAB = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def build(model_class: Any, config_class: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config_class(**_SIZES | options)).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=WINDOW),
    "mistral-w1": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=1),
    "mistral-w2": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=2),
    "mistral-full": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=None),
    "mistral-wide": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=100_000),
    "qwen2": lambda: build(
        hf.Qwen2ForCausalLM, hf.Qwen2Config, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=2
    ),
    "qwen2-off": lambda: build(hf.Qwen2ForCausalLM, hf.Qwen2Config, sliding_window=WINDOW, use_sliding_window=False),
    "gemma2": lambda: build(
        hf.Gemma2ForCausalLM, hf.Gemma2Config, sliding_window=WINDOW, layer_types=_ALTERNATING, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: build(
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=16,
    ),
    "gemma3n": lambda: build(
        hf.Gemma3nForCausalLM,
        hf.Gemma3nTextConfig,
        sliding_window=WINDOW,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        intermediate_size=[96] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "phi3": lambda: build(hf.Phi3ForCausalLM, hf.Phi3Config, sliding_window=WINDOW),
    "gpt_oss": lambda: build(
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama4-chunk8": lambda: _llama4(WINDOW),
    "llama4-chunk4": lambda: _llama4(4),
    "cohere2": lambda: build(
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
}
# Layers with a state of their own, which windowkv leaves to transformers.
STATEFUL: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: build(hf.Lfm2ForCausalLM, hf.Lfm2Config, layer_types=["conv", "full_attention"] * 2),
    "qwen3_next": lambda: build(
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
# The architectures whose output is proved at every length; the rest differ from one of these in an option only.
ARCHITECTURES = ["mistral", "qwen2", "gemma2", "gemma3", "gemma3n", "phi3", "gpt_oss", "llama4-chunk8", "cohere2"]


def _llama4(chunk: int) -> Any:
    return build(
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        attention_chunk_size=chunk,
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_experts_per_tok=1,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        interleave_moe_layer_step=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


@cache
def shared_model(name: str) -> Any:
    """One model per name for tests that leave it as it was."""
    return MODELS[name]()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random ids `[rows, length]` without special ones."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`(input_ids, attention_mask)` of rows `[length]`, padded on the left to one length."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.cat((torch.zeros(longest - len(row), dtype=torch.long), row)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return ids, mask


def generated(model: Any, ids: Tensor, new: int, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Greedy continuation `[rows, new]`, whatever the cache; all tokens are real unless a mask says otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False} | options
    )
    return out[:, ids.shape[1] :]


def uncached(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> Tensor:
    """The reference: the whole sequence computed anew for every token."""
    return generated(model, ids, new, mask, use_cache=False)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the name that this version of transformers calls it by."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


@torch.no_grad()
def fed(model: Any, cache: Any, ids: Tensor, *chunks: int) -> Tensor:
    """Logits `[rows, length, vocab]` of a loop by hand that feeds ids in chunks of these sizes, the rest one by one."""
    sizes = [*chunks, *[1] * (ids.shape[1] - sum(chunks))]
    return torch.cat(
        [model(part, use_cache=True, **cache_argument(model, cache)).logits for part in ids.split(sizes, dim=1)], dim=1
    )


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits `[rows, length, vocab]` of one forward without a cache."""
    return model(ids, use_cache=False).logits


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens go through the model, forward by forward."""
    widths: list[int] = []
    forward = model.forward

    @wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.forward = counting  # a hook might change what it sees, so that a prefix store steps aside
    try:
        yield widths
    finally:
        del model.forward
