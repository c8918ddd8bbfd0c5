"""The main job on the real model: Gemma 3 270M, three windows into real text."""

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor

import windowkv
import windowkv.demo_model as demo_model
from tiny import cache_argument, generated
from windowkv import DynamicSlidingWindowCache

PROMPT, DECODED = 1500, 40


@pytest.fixture(scope="module")
def model_and_ids() -> tuple[Any, Tensor]:
    model, tokenizer = demo_model.load()
    return model, tokenizer(topics["formatstrings"], return_tensors="pt").input_ids[:, : PROMPT + DECODED]


@pytest.mark.parametrize("chunks", [(PROMPT,), (400, 700, 400)])
@torch.no_grad()
def test_logits_equal_a_forward_without_cache(model_and_ids: tuple[Any, Tensor], chunks: tuple[int, ...]) -> None:
    model, ids = model_and_ids
    expected = model(ids, use_cache=False, logits_to_keep=DECODED).logits[0]
    cache = DynamicSlidingWindowCache(model.config)
    parts = ids.split([*chunks, *[1] * DECODED], dim=1)
    last = [
        model(part, use_cache=True, logits_to_keep=1, **cache_argument(model, cache)).logits[0, -1] for part in parts
    ]
    torch.testing.assert_close(torch.stack(last[-DECODED:]), expected, atol=1e-4, rtol=0)
    assert cache.nbytes == windowkv.plan(model.config, tokens=PROMPT + DECODED, dtype=torch.float32).total_bytes


def test_an_enabled_model_generates_the_same_tokens(model_and_ids: tuple[Any, Tensor]) -> None:
    model, ids = model_and_ids
    expected = generated(model, ids, DECODED)
    try:
        assert torch.equal(generated(windowkv.enable(model), ids, DECODED), expected)
    finally:
        windowkv.disable(model)
