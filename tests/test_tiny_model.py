"""Tiny twins: the same kinds of layers, the same weights every time, and a named error where there can be none."""

from typing import Any

import pytest
import torch
import transformers as hf

from tiny import logits, tokens
from windowkv import WindowKVError
from windowkv.layout import read_layout
from windowkv.tiny_model import tiny_model, tiny_tokenizer

SLIDING, FULL = "sliding_attention", "full_attention"


def kinds(model: Any) -> list[str]:
    return [layer.kind for layer in read_layout(model.config).layers]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.MistralConfig(), ["sliding"] * 4),
        (hf.MistralConfig(sliding_window=None), ["full"] * 4),
        (hf.Qwen2Config(sliding_window=4096, use_sliding_window=True), ["full", "sliding"] * 2),  # from layer 28 on
        (hf.Gemma3TextConfig(), ["sliding", "full"] * 2),
        (hf.Gemma3nTextConfig(), ["sliding", "full"] * 2 + ["shared"] * 2),
        (hf.Llama4TextConfig(), ["chunked", "full"] * 2),
        (hf.MoshiConfig(), ["full"] * 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_layer_is_kept(config: Any, expected: list[str]) -> None:
    model = tiny_model(config)
    assert kinds(model) == expected
    assert {layer.window for layer in read_layout(model.config).layers} <= {None, 8}
    assert sum(weight.numel() for weight in model.parameters()) < 2_000_000


def test_windows_are_switched_on_when_asked_for() -> None:
    assert kinds(tiny_model(hf.Qwen2Config(), windows=True)) == ["full", "sliding"] * 2
    assert kinds(tiny_model(hf.Phi3Config(), windows=True)) == ["sliding"] * 4


def test_what_is_no_size_stays() -> None:
    config = hf.Gemma2Config(attn_logit_softcapping=7.0, tie_word_embeddings=False)
    twin = tiny_model(config).config
    assert (twin.attn_logit_softcapping, twin.tie_word_embeddings) == (7.0, False)


def test_a_config_from_a_file_gives_the_same_twin(tmp_path: Any) -> None:
    config = hf.MistralConfig(sliding_window=512, architectures=["MistralForCausalLM"], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    ids = tokens(1, 20)
    twin = tiny_model(hf.AutoConfig.from_pretrained(tmp_path))
    assert twin.dtype == torch.float32
    assert torch.equal(logits(twin, ids), logits(tiny_model(hf.MistralConfig()), ids))


def test_attention_matters() -> None:
    model, ids = tiny_model(hf.MistralConfig()), tokens(1, 20)
    other = ids.clone()
    other[0, -4] += 1
    assert (logits(model, ids)[0, -1] - logits(model, other)[0, -1]).abs().max() > 0.1


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny_model(hf.MistralConfig())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.BartConfig(), "BartConfig describes an encoder and a decoder"),
        (hf.ViTConfig(), r"no class of transformers .* generates text for ViTConfig \(model_type='vit'\)"),
        (hf.MistralConfig(hidden_act="unknown"), r"no tiny twin of MistralConfig .*: KeyError: .*unknown"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_there_can_be_no_twin_an_error_says_so(config: Any, message: str) -> None:
    with pytest.raises(WindowKVError, match=message):
        tiny_model(config)


def test_characters_are_the_tokens_of_a_tiny_model_and_what_is_no_ascii_is_unknown() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a ~\n\u00e9").input_ids
    assert ids == [97, 32, 126, 10, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a ~\n"
    assert max(tokenizer.get_vocab().values()) < tiny_model(hf.MistralConfig()).config.vocab_size
