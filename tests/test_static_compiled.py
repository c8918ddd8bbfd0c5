"""Compiled decoding into a static cache: the same output, one graph for every step, position and prompt."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import CompileConfig

import windowkv
from tiny import MODELS, WINDOW, cache_argument, generated, logits, tokens, uncached
from windowkv import SlidingWindowCache

LONG = 400


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiling(backend: str = "eager") -> CompileConfig:
    """Makes generate compile, which on a CPU it does for its own tests only."""
    config = CompileConfig(backend=Backend() if backend == "eager" else backend)
    config._compile_all_devices = True
    return config


class Backend:
    """Runs a graph as it is, whatever the options."""

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        return graph.forward


def static(model: Any) -> SlidingWindowCache:
    return SlidingWindowCache(model.config, max_cache_len=LONG, rollback=8)


def test_generate_compiles_once_across_the_window_and_for_longer_prompts() -> None:
    small = MODELS["mistral"]().config
    small.num_hidden_layers = 2  # inductor takes its time
    model, config = transformers.MistralForCausalLM(small).eval(), compiling("inductor")
    for prompt in (3, 60, 100):  # below the window, around the ring, beyond what it holds
        ids = tokens(1, prompt, seed=prompt)
        out = generated(model, ids, 5 * WINDOW, compile_config=config, **cache_argument(model, static(model)))
        assert torch.equal(out, uncached(model, ids, 5 * WINDOW))
        assert (graphs(), dict(counters["graph_break"])) == (1, {})


@pytest.mark.parametrize(
    ("name", "enabled"), [("mistral", True), ("qwen2", False), ("gemma3", True), ("gpt_oss", False), ("gemma3n", False)]
)
def test_one_graph_serves_every_prompt(name: str, enabled: bool) -> None:
    model, config = MODELS[name](), compiling()
    if enabled:
        windowkv.enable(model, cache="static", rollback=8)
    cache = {} if enabled else cache_argument(model, static(model))
    for prompt in (3, 90):
        ids = tokens(2, prompt, seed=prompt)
        out = generated(model, ids, 4 * WINDOW, compile_config=config, **cache)
        assert torch.equal(out, uncached(model, ids, 4 * WINDOW))
        assert (graphs(), dict(counters["graph_break"])) == (1, {})
        for held in cache.values():
            held.reset()


@pytest.mark.parametrize(("name", "padded"), [("gemma3", False), ("gemma3", True), ("llama4-chunk8", True)])
def test_a_step_compiled_by_hand(name: str, padded: bool) -> None:
    # With a padding mask, the mask of an enabled model knows what to do inside of a graph.
    model = windowkv.enable(MODELS[name]()) if padded else MODELS[name]()
    ids, mask = tokens(2, 130), torch.ones(2, LONG, dtype=torch.long)
    mask[1, :15] = 0
    masked = {"attention_mask": mask} if padded else {}
    cache = cache_argument(model, static(model))
    step = torch.compile(model.forward, backend=Backend(), fullgraph=True)
    with torch.no_grad():
        parts = [
            model(ids[:, :20], use_cache=True, **cache, **({"attention_mask": mask[:, :20]} if padded else {})).logits
        ]
        parts += [step(part, use_cache=True, **cache, **masked).logits for part in ids[:, 20:].split(1, dim=1)]
        whole = {"attention_mask": mask[:, :130]} if padded else {}
        expected = model(ids, use_cache=False, **whole).logits
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, 20:], expected[:, 20:], atol=1e-4, rtol=0)
    assert graphs() == 1


def test_compiled_steps_and_others_take_turns() -> None:
    model, ids = MODELS["gemma3"](), tokens(1, 120)
    cache = static(model)
    step = torch.compile(model.forward, backend=Backend(), fullgraph=True)
    handed = cache_argument(model, cache)
    with torch.no_grad():
        model(ids[:, :40], use_cache=True, **handed)
        for part in ids[:, 40:60].split(1, dim=1):
            step(part, use_cache=True, **handed)
        cache.crop(-6)
        model(ids[:, 54:90], use_cache=True, **handed)
        out = torch.cat([step(part, use_cache=True, **handed).logits for part in ids[:, 90:].split(1, dim=1)], dim=1)
    torch.testing.assert_close(out, logits(model, ids)[:, 90:], atol=1e-4, rtol=0)
    assert (graphs(), cache.get_seq_length()) == (1, 120)


def test_rings_of_one_size_share_a_graph_whatever_their_length() -> None:
    model, ids = MODELS["mistral"](), tokens(1, 60)
    step = torch.compile(model.forward, backend=Backend(), fullgraph=True)
    for length in (100, 5000):
        handed = cache_argument(model, SlidingWindowCache(model.config, max_cache_len=length, rollback=8))
        with torch.no_grad():
            model(ids[:, :20], use_cache=True, **handed)
            parts = [step(part, use_cache=True, **handed).logits for part in ids[:, 20:].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids)[:, 20:], atol=1e-4, rtol=0)
    assert graphs() == 1


def test_a_full_cache_fails_in_a_graph_too() -> None:
    model = MODELS["gemma3"]()
    cache = cache_argument(model, SlidingWindowCache(model.config, max_cache_len=20))
    step = torch.compile(model.forward, backend=Backend(), fullgraph=True)
    with torch.no_grad():
        model(tokens(1, 19), use_cache=True, **cache)
        step(tokens(1, 1), use_cache=True, **cache)
        with pytest.raises((IndexError, RuntimeError)):
            step(tokens(1, 1), use_cache=True, **cache)


def test_a_step_can_be_exported_and_goes_on_past_the_window() -> None:
    model, ids = MODELS["gemma3"](), tokens(1, 90)
    cache = SlidingWindowCache(model.config, max_cache_len=100, rollback=8)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))

    class Step(torch.nn.Module):
        """As transformers' recipe: the cache is no input, and its tensors are buffers."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            for i, layer in enumerate(cache.layers):
                self.register_buffer(f"keys_{i}", layer.buffer.keys, persistent=False)
                self.register_buffer(f"values_{i}", layer.buffer.values, persistent=False)
                self.register_buffer(f"seen_{i}", layer.buffer.seen, persistent=False)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            inputs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": None}
            return self.model(**inputs, use_cache=True, **cache_argument(model, cache)).logits

    with torch.no_grad():
        program = torch.export.export(Step(), (ids[:, :1], torch.zeros(1, 1, dtype=torch.long)), strict=True)
        step = program.module()
        out = torch.cat([step(ids[:, i : i + 1], torch.tensor([[i]])) for i in range(90)], dim=1)
    torch.testing.assert_close(out, logits(model, ids), atol=1e-4, rtol=0)
