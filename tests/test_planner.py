"""Plans against caches: the same bytes, to the last one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

import windowkv
from tiny import MODELS, STATEFUL, cache_argument, fed, generated, shared_model, tokens
from windowkv import ConfigError, DynamicSlidingWindowCache, ModelSourceError, OptionError
from windowkv.cache import storage_nbytes


def filled(model: Any, chunks: list[int], batch: int, rollback: int, dtype: torch.dtype) -> DynamicSlidingWindowCache:
    """A cache fed without a model: states of the layout's shapes in chunks of these sizes."""
    cache = DynamicSlidingWindowCache(model.config, rollback=rollback)
    for chunk in chunks:
        for index, spec in enumerate(cache.layout.layers):
            if spec.buffered:
                shape = (batch, spec.kv_heads, chunk)
                with torch.no_grad():
                    cache.update(
                        torch.zeros(*shape, spec.head_dim, dtype=dtype),
                        torch.zeros(*shape, spec.value_head_dim, dtype=dtype),
                        index,
                    )
    return cache


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    chunks=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), max_size=12),
    batch=st.integers(1, 4),
    rollback=st.sampled_from([0, 1, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_plan_equals_the_cache_to_the_byte(
    name: str, chunks: list[int], batch: int, rollback: int, dtype: torch.dtype
) -> None:
    model = shared_model(name)
    cache = filled(model, chunks, batch, rollback, dtype)
    plan = windowkv.plan(model.config, tokens=sum(chunks), batch_size=batch, dtype=dtype, rollback=rollback)
    assert plan.total_bytes == cache.nbytes == storage_nbytes(cache)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_equals_what_generate_holds(name: str) -> None:
    model = shared_model(name)
    cache = DynamicSlidingWindowCache(model.config)
    generated(model, tokens(3, 150), 20, **cache_argument(model, cache))
    seen = cache.get_seq_length()
    assert seen == 169
    assert windowkv.plan(model.config, tokens=seen, batch_size=3, dtype=torch.float32).total_bytes == cache.nbytes


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@torch.no_grad()
def test_crop_reorder_and_beams_keep_to_the_plan_of_the_furthest_position(kv_dtype: str | None) -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config, kv_dtype=kv_dtype)

    def planned(rows: int) -> int:
        plan = windowkv.plan(model.config, tokens=300, batch_size=rows, dtype=torch.float32, kv_dtype=kv_dtype)
        return plan.total_bytes

    fed(model, cache, tokens(2, 300), 300)
    cache.crop(-50)
    cache.reorder_cache(torch.tensor([1, 1]))
    fed(model, cache, tokens(2, 20))
    assert cache.nbytes == planned(2)
    cache.batch_repeat_interleave(3)
    assert cache.nbytes == planned(6)
    cache.reorder_cache(torch.tensor([0, 0, 2, 5, 4, 4]))
    assert cache.nbytes == planned(6)
    cache.batch_select_indices(torch.tensor([4]))
    assert cache.nbytes == planned(1)


def test_the_numbers_of_a_hybrid_model() -> None:
    # 2 kv heads of 16 numbers, keys and values, fp32: 256 bytes a token and layer; the window is 8
    plan = windowkv.plan(shared_model("gemma3").config, tokens=10_000, dtype=torch.float32)
    bound, full = 8 - 1 + 64 + 32, 10_240  # 10,000 in steps of 1,024
    assert [(layer.kind, layer.window, layer.capacity) for layer in plan.layers] == [("sliding", 8, bound)] * 3 + [
        ("full", None, full)
    ]
    assert plan.bound_bytes == 3 * bound * 256
    assert plan.total_bytes == (3 * bound + full) * 256
    assert plan.baseline_bytes == 4 * 10_000 * 256
    assert plan.peak_prefill_bytes == plan.total_bytes + 10_000 * 256
    assert plan.uncounted == ()


def test_layers_that_share_cost_nothing_and_foreign_ones_are_named() -> None:
    shared = windowkv.plan(shared_model("gemma3n").config, tokens=100, dtype=torch.float32)
    assert [layer.nbytes == 0 for layer in shared.layers] == [False] * 4 + [True] * 2
    foreign = windowkv.plan(STATEFUL["lfm2"]().config, tokens=100, dtype=torch.float32)
    assert foreign.uncounted == (0, 2)
    assert [layer.kind for layer in foreign.layers] == ["conv", "full"] * 2


def test_the_dtype_is_the_configs_unless_another_is_given() -> None:
    config = hf.MistralConfig(sliding_window=8, dtype="bfloat16")
    assert windowkv.plan(config, tokens=5).itemsize == 2
    assert windowkv.plan(config, tokens=5, dtype=torch.float32).itemsize == 4
    assert windowkv.plan(hf.MistralConfig(sliding_window=8), tokens=5).itemsize == 4


@given(budget=st.integers(0, 3_000_000), batch=st.integers(1, 3))
@settings(deadline=None)
def test_max_tokens_is_the_last_that_fits(budget: int, batch: int) -> None:
    config = shared_model("gemma3").config
    most = windowkv.max_tokens(config, budget, batch_size=batch, dtype=torch.float32)
    assert most is not None
    assert windowkv.plan(config, tokens=most, batch_size=batch, dtype=torch.float32).total_bytes <= budget
    assert windowkv.plan(config, tokens=most + 1, batch_size=batch, dtype=torch.float32).total_bytes > budget


def test_max_tokens_has_no_limit_once_every_window_fits() -> None:
    config = shared_model("mistral").config
    everything = windowkv.plan(config, tokens=10_000, dtype=torch.float32).total_bytes
    assert windowkv.max_tokens(config, everything, dtype=torch.float32) is None
    assert windowkv.max_tokens(config, everything - 1, dtype=torch.float32) is not None
    assert windowkv.max_tokens(config, 0, dtype=torch.float32) == 0


def test_a_model_can_be_named_by_its_folder_or_config_file(tmp_path: Path) -> None:
    config = shared_model("gemma3").config
    config.save_pretrained(tmp_path)
    expected = windowkv.plan(config, tokens=500)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert windowkv.plan(source, tokens=500) == expected


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="nowhere"):
        windowkv.plan(tmp_path / "nowhere", tokens=5)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelSourceError, match=str(tmp_path)):
        windowkv.plan(tmp_path, tokens=5)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens": 5, "batch_size": 0},
        {"tokens": 5, "rollback": -1},
        {"tokens": 5, "dtype": "half"},
    ],
)
def test_a_count_that_is_none_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=list(options)[-1]):
        windowkv.plan(shared_model("mistral").config, **options)


@pytest.mark.parametrize("budget", [-1, 1.5, None])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(OptionError, match="budget_bytes"):
        windowkv.max_tokens(shared_model("mistral").config, budget)


def test_shared_keys_and_values_count_in_the_peak_as_long_as_they_are_shared() -> None:
    layers = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    model = MODELS["gemma3n"]()
    config = hf.Gemma3nTextConfig(**model.config.to_dict() | {"layer_types": layers})
    planned = windowkv.plan(config, tokens=2000, dtype=torch.float32)
    token = 2 * 2 * 16 * 4  # keys and values, heads, head_dim, bytes
    assert planned.peak_prefill_bytes == planned.total_bytes + 2 * 2000 * token


@pytest.mark.parametrize(("encoder", "decoder"), [(6, 2), (3, 3)])
def test_an_encoders_layers_are_not_counted(encoder: int, decoder: int) -> None:
    config = hf.T5Config(
        num_layers=encoder,
        num_decoder_layers=decoder,
        num_heads=4,
        d_kv=16,
        d_model=64,
        d_ff=96,
        vocab_size=128,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = windowkv.enable(hf.T5ForConditionalGeneration(config).eval())
    out = model.generate(tokens(1, 10), max_new_tokens=16, return_dict_in_generate=True)
    cache = getattr(out, "cache", None) or out.past_key_values
    held = windowkv.plan(config, tokens=cache.get_seq_length(), dtype=torch.float32)
    assert len(held.layers) == decoder
    assert cache.self_attention_cache.nbytes == held.total_bytes


class Watched(hf.DynamicCache):
    """transformers' cache, and the most bytes that it and a layer's new keys and values ever took."""

    peak = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        visible = super().update(key_states, value_states, *args, **kwargs)
        self.peak = max(self.peak, storage_nbytes(self) + key_states.nbytes + value_states.nbytes)
        return visible


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8"])
def test_transformers_peak_is_what_its_cache_keeps_alive_during_a_prompt(name: str) -> None:
    model = shared_model(name)
    cache = Watched(config=model.config)
    fed(model, cache, tokens(2, 300), 300)
    planned = windowkv.plan(model.config, tokens=300, batch_size=2, dtype=torch.float32)
    counters = 8 * len(planned.layers)  # a tensor in which each of its sliding layers keeps the window
    assert planned.transformers_peak_bytes <= cache.peak <= planned.transformers_peak_bytes + counters
    assert planned.peak_prefill_bytes < planned.transformers_peak_bytes


def heads(query: int, kv: int) -> Any:
    return hf.MistralConfig(
        num_hidden_layers=2, num_attention_heads=query, num_key_value_heads=kv, head_dim=16, sliding_window=8
    )


@pytest.mark.parametrize(("kv", "ranks", "kept"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 4, 1), (8, 16, 1)])
def test_each_rank_keeps_its_share_of_the_heads_and_one_at_least(kv: int, ranks: int, kept: int) -> None:
    for options in ({}, {"kv_dtype": "int8"}, {"cache": "static"}):
        planned = windowkv.plan(heads(16, kv), tokens=300, ranks=ranks, **options)
        alone = windowkv.plan(heads(16, kept), tokens=300, **options)
        assert (planned.total_bytes, planned.baseline_bytes) == (alone.total_bytes, alone.baseline_bytes)


@pytest.mark.parametrize(("query", "kv", "ranks"), [(16, 8, 3), (16, 8, 32), (24, 8, 16), (12, 6, 4), (12, 3, 2)])
def test_heads_that_ranks_cannot_share_are_refused(query: int, kv: int, ranks: int) -> None:
    with pytest.raises(OptionError, match=f"ranks={ranks}: {query} heads, and {kv} of keys") as refused:
        windowkv.plan(heads(query, kv), tokens=5, ranks=ranks)
    for working in map(int, str(refused.value).split("; ")[1].removesuffix(" would work").split(",")):
        windowkv.plan(heads(query, kv), tokens=5, ranks=working)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, None])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: Any) -> None:
    with pytest.raises(OptionError, match="ranks"):
        windowkv.plan(heads(16, 8), tokens=5, ranks=ranks)


@pytest.mark.parametrize(
    "options", [{}, {"cache": "static"}, {"cache": "static", "max_cache_len": 500}, {"kv_dtype": "int8", "ranks": 2}]
)
def test_max_batch_size_is_the_last_that_fits(options: dict[str, Any]) -> None:
    config = shared_model("gemma3").config
    for budget in (100_000, 1_000_000, 5_000_001):
        most = windowkv.max_batch_size(config, budget, tokens=400, **options)
        assert most is not None
        assert most == 0 or windowkv.plan(config, tokens=400, batch_size=most, **options).total_bytes <= budget
        assert windowkv.plan(config, tokens=400, batch_size=most + 1, **options).total_bytes > budget


def test_nothing_at_all_fits_any_number_of_times() -> None:
    assert windowkv.max_batch_size(shared_model("gemma3").config, 0, tokens=0) is None
    assert windowkv.max_batch_size(shared_model("gemma3").config, 0, tokens=1) == 0


def test_max_tokens_of_a_static_cache_is_the_longest_that_can_be_made() -> None:
    config = shared_model("gemma3").config
    most = windowkv.max_tokens(config, 1_000_000, cache="static")
    assert most is not None
    assert windowkv.plan(config, tokens=most, cache="static").total_bytes <= 1_000_000
    assert windowkv.plan(config, tokens=most + 1, cache="static").total_bytes > 1_000_000
    assert windowkv.max_tokens(config, 10, cache="static") == 0
    assert windowkv.max_tokens(shared_model("mistral").config, 1_000_000, cache="static") is None


@pytest.mark.parametrize("option", [{"tokens": -1}, {"tokens": "5"}, {"rollback": -1}, {"kv_dtype": "int2"}])
def test_what_max_batch_size_cannot_use_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(option))):
        windowkv.max_batch_size(shared_model("gemma3").config, 1000, **{"tokens": 5} | option)


def test_static_caches_are_not_quantised() -> None:
    with pytest.raises(OptionError, match="kv_dtype='int8'"):
        windowkv.plan(shared_model("gemma3").config, tokens=5, cache="static", kv_dtype="int8")


def test_what_is_no_config_is_named_by_its_type() -> None:
    model = shared_model("mistral")
    with pytest.raises(ConfigError, match=r"^a MistralForCausalLM is no transformers config"):
        windowkv.plan(model, tokens=1)
    with pytest.raises(OptionError, match="cache='quantized': \"dynamic\" or"):
        windowkv.plan(model.config, tokens=1, cache="quantized")  # type: ignore[arg-type]
