"""The static cache gives what a forward without any cache gives, at addresses that never change."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import StaticCache

import windowkv
from tiny import (
    ARCHITECTURES,
    MODELS,
    STATEFUL,
    WINDOW,
    cache_argument,
    fed,
    generated,
    left_padded,
    logits,
    shared_model,
    tokens,
    uncached,
)
from windowkv import ConfigError, InputError, OptionError, RollbackError, SlidingWindowCache, UnsupportedOperationError
from windowkv.fixed_buffers import FixedBuffer
from windowkv.rows import RowSelection
from windowkv.window import Retention, Ring, sees

LONG = 300  # many times around every ring
NAMES = ["mistral", "gemma3", "llama4-chunk8", "gpt_oss", "gemma3n"]
# In these releases transformers makes no mask for generate with Llama 4, whatever static cache it is handed.
GENERATED = [
    name
    for name in ARCHITECTURES
    if "llama4" not in name
    or "block_sequence_ids" in inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
]


def static(model: Any, length: int = LONG, **options: Any) -> SlidingWindowCache:
    return SlidingWindowCache(model.config, max_cache_len=length, **options)


def given(model: Any, length: int = LONG, **options: Any) -> dict[str, Any]:
    return cache_argument(model, static(model, length, **options))


def addresses(cache: SlidingWindowCache) -> list[int]:
    buffers = [layer.buffer for layer in cache.layers if hasattr(layer, "buffer")]
    return [tensor.data_ptr() for buffer in buffers for tensor in (buffer.keys, buffer.values, buffer.seen)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


# Rings


@pytest.mark.parametrize("window", [1, 2, 8, 100])
@pytest.mark.parametrize("rollback", [0, 1, 64])
def test_a_ring_is_within_the_bound_of_a_layer(window: int, rollback: int) -> None:
    retention = Retention(window, rollback)
    ring = retention.ring(10_000)
    assert window - 1 + rollback < ring.capacity <= retention.bound
    assert ring.wraps
    assert ring.room >= max(1, rollback)
    assert retention.ring(5) == Ring(window, 5, 5)
    assert not retention.ring(5).wraps


@pytest.mark.parametrize("steps", [(1,) * 40, (3, 20, 1, 1, 7), (13,) * 5, (40, 1, 29, 2)])
@pytest.mark.parametrize("window", [1, 4, 8])
def test_every_key_that_a_query_sees_lies_where_it_is_said_to_lie(window: int, steps: tuple[int, ...]) -> None:
    buffer, seen = FixedBuffer(Retention(window, rollback=3).ring(1000)), 0
    for step in steps:
        positions = buffer.visible_positions(step)
        told = torch.arange(seen, seen + step, dtype=torch.float32).reshape(1, 1, step, 1)
        keys, values = buffer.append(told, -told)
        seen += step
        assert keys.shape[2] == len(positions) == buffer.visible_length(step)
        for query in range(seen - step, seen):
            visible = [i for i, position in enumerate(positions.tolist()) if sees(query, position, window)]
            expected = [key for key in range(seen) if sees(query, key, window)]
            assert sorted(keys[0, 0, visible, 0].tolist()) == expected
            assert sorted(values[0, 0, visible, 0].neg().tolist()) == expected
        assert int(positions.min()) >= 0


# Feeding by hand


@pytest.mark.parametrize("chunks", [(20,), (6, *[1] * 6), (8, 5, 7, 8, 9, 20), (40, 16, 40), (100, 3), (110,), ()])
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_position_of_a_loop_by_hand(name: str, chunks: tuple[int, ...]) -> None:
    model, ids = shared_model(name), tokens(2, 110)
    cache = static(model, rollback=8)
    assert_close(fed(model, cache, ids, *chunks), logits(model, ids))
    assert cache.get_seq_length() == 110


@pytest.mark.parametrize("rollback", [0, 64])
@pytest.mark.parametrize("length", [62, 63, 4 * WINDOW + 62])
@pytest.mark.parametrize("name", NAMES)
def test_caches_that_are_just_long_enough(name: str, length: int, rollback: int) -> None:
    model, ids = shared_model(name), tokens(2, 62)
    cache = static(model, length, rollback=rollback)
    assert_close(fed(model, cache, ids, 20, 1, 3, 9), logits(model, ids))


@pytest.mark.parametrize("name", NAMES)
def test_addresses_and_bytes_never_change(name: str) -> None:
    model, ids = shared_model(name), tokens(2, 150)
    cache = static(model, rollback=8)
    fed(model, cache, ids[:, :5], 5)
    before, held = addresses(cache), cache.nbytes
    fed(model, cache, ids[:, 5:], 3, 50, 1, 20)
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    fed(model, cache, ids, 100)
    assert (addresses(cache), cache.nbytes) == (before, held)


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_a_window_do_not_grow_with_the_length(name: str) -> None:
    model = shared_model(name)
    cache = static(model, 100_000, rollback=8)
    for layer, spec in zip(cache.layers, cache.layout.layers, strict=False):
        if spec.bounded:
            assert layer.buffer.ring.capacity <= Retention(spec.window, 8).bound
    assert cache.nbytes == 8 * sum(spec.buffered for spec in cache.layout.layers), "nothing but counters so far"


@pytest.mark.parametrize("name", [*NAMES, "qwen2", "mistral-full"])
@pytest.mark.parametrize("length", [20, 33, LONG])
def test_a_plan_equals_the_bytes(name: str, length: int) -> None:
    model = shared_model(name)
    cache = static(model, length, rollback=8)
    fed(model, cache, tokens(3, 20), 7)
    plan = windowkv.plan(
        model.config, tokens=20, batch_size=3, rollback=8, dtype=torch.float32, cache="static", max_cache_len=length
    )
    assert plan.total_bytes == cache.nbytes
    assert plan.peak_prefill_bytes > plan.total_bytes


def test_plans_of_static_caches_that_cannot_be() -> None:
    config = shared_model("mistral").config
    with pytest.raises(OptionError, match="tokens=21"):
        windowkv.plan(config, tokens=21, cache="static", max_cache_len=20)
    with pytest.raises(OptionError, match="max_cache_len=20"):
        windowkv.plan(config, tokens=20, max_cache_len=20)
    with pytest.raises(OptionError, match="max_cache_len=0"):
        windowkv.plan(config, tokens=0, cache="static", max_cache_len=0)


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_of_other_kinds_are_those_of_transformers(name: str) -> None:
    model, ids = STATEFUL[name](), tokens(2, 40)
    cache = static(model)
    theirs = StaticCache(config=model.config, max_cache_len=LONG)
    kinds = {type(layer) for i, layer in enumerate(cache.layers) if i in cache.layout.foreign}
    assert kinds <= {type(layer) for layer in theirs.layers}
    assert_close(fed(model, cache, ids, 20), logits(model, ids))


# Generating


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", GENERATED)
def test_tokens_equal_a_forward_without_cache(name: str, enabled: bool) -> None:
    model = windowkv.enable(MODELS[name]()) if enabled else shared_model(name)
    for prompt in (1, WINDOW, WINDOW + 1, 40, 100):
        ids = tokens(1, prompt)
        expected = uncached(shared_model(name), ids, 3 * WINDOW)
        assert torch.equal(generated(model, ids, 3 * WINDOW, **given(model, rollback=8)), expected)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", GENERATED)
def test_ragged_rows_equal_each_row_alone(name: str, enabled: bool) -> None:
    model = windowkv.enable(MODELS[name]()) if enabled else shared_model(name)
    rows = [tokens(1, length, seed=length)[0] for length in (60, 5, 17, 8, 20)]
    ids, mask = left_padded(rows)
    alone = torch.cat([uncached(shared_model(name), row[None], 20) for row in rows])
    assert torch.equal(generated(model, ids, 20, mask, **given(model, rollback=8)), alone)
    # Just enough room: the padding mask ends where the slots do.
    assert torch.equal(generated(model, ids, 20, mask, **given(model, 79, rollback=8)), alone)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_several_turns_on_one_cache(name: str) -> None:
    model = shared_model(name)
    cache, history = static(model, rollback=8), tokens(1, 11)
    for turn in range(4):
        reply = generated(model, history, 7, **cache_argument(model, cache))
        assert torch.equal(reply, uncached(model, history, 7))
        history = torch.cat((history, reply, tokens(1, 3 + 15 * turn, seed=turn)), dim=1)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_chunked_prefill(name: str) -> None:
    model, ids = shared_model(name), tokens(1, 63)
    out = generated(model, ids, 12, prefill_chunk_size=9, **given(model, rollback=8))
    assert torch.equal(out, uncached(model, ids, 12))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n"])
def test_beam_search(name: str) -> None:
    model, ids = shared_model(name), tokens(2, 40)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    expected = generated(model, ids, 12, **beams, use_cache=False)
    assert torch.equal(generated(model, ids, 12, **beams, **given(model, rollback=8)), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_assisted_decoding_within_the_rollback(name: str) -> None:
    model, ids = shared_model(name), tokens(1, 40)
    out = generated(model, ids, 30, prompt_lookup_num_tokens=4, **given(model, rollback=8))
    assert torch.equal(out, uncached(model, ids, 30))


def test_the_cache_is_understood_under_its_old_name() -> None:
    model, ids = shared_model("mistral"), tokens(1, 30)
    assert torch.equal(generated(model, ids, 12, past_key_values=static(model)), uncached(model, ids, 12))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad])
def test_a_cache_goes_from_one_inference_mode_to_another(first: Any, then: Any) -> None:
    model, ids = shared_model("mistral"), tokens(1, 40)
    cache = cache_argument(model, static(model, rollback=8))
    with first():
        model(ids[:, :20], use_cache=True, **cache)
    with then():
        rest = model(ids[:, 20:], use_cache=True, **cache).logits
    assert_close(rest, logits(model, ids)[:, 20:])


def test_gradients_are_refused_before_anything_changes() -> None:
    model, cache = MODELS["mistral"](), static(shared_model("mistral"))
    with pytest.raises(InputError, match="no_grad"):
        model(tokens(1, 5), use_cache=True, **cache_argument(model, cache))
    assert cache.get_seq_length() == 0


def test_a_step_of_an_enabled_model_repeats_no_key() -> None:
    attended: list[tuple[int, ...]] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                attended.append(tuple(args[0].shape) + tuple(args[1].shape[1:3]))
            return func(*args, **(kwargs or {}))

    model, ids = windowkv.enable(MODELS["mistral"]()), tokens(2, 40)
    cache = static(model, rollback=8)
    fed(model, cache, ids[:, :39], 39)
    with Watched():
        last = fed(model, cache, ids[:, 39:])
    assert attended == [(2, 2, 2, 16, 2, 16)] * 4, "[batch, groups, heads of a group, head_dim] against [groups, slots]"
    assert_close(last, logits(shared_model("mistral"), ids)[:, 39:])


# Taking back and moving rows


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
@pytest.mark.parametrize("length", [0, 1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 100])
def test_a_crop_is_exact_or_refused(name: str, length: int) -> None:
    model, ids = shared_model(name), tokens(1, 140)
    for count in range(length + 3):
        if 20 < count < length - 2:
            continue
        cache = static(model, rollback=6)
        if length:
            fed(model, cache, ids[:, :length], length)
        try:
            cache.crop(-count)
        except RollbackError:
            assert count > min(6, length)
            count = 0
        assert {layer.get_seq_length() for layer in cache.layers} == {length - count}
        rest = ids[:, length - count : length - count + 30]
        expected = logits(model, ids)[:, length - count : length - count + 30]
        assert_close(fed(model, cache, rest, 2, 7), expected)


@pytest.mark.parametrize("crops", [(5,), (2, 3), (5, 5), (0, 5)])
@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_a_crop_reaches_as_far_back_as_from_the_furthest_position(crops: tuple[int, ...], chunk: int) -> None:
    model, ids = shared_model("gemma3"), tokens(1, 100)
    cache = static(model, 120, rollback=5)
    fed(model, cache, ids, *[chunk] * (100 // chunk))
    for count in crops[:-1]:
        cache.crop(-count)
    room = min(layer.buffer.ring.rollback_room(100, 100) for layer in cache.layers) - sum(crops[:-1])
    if crops[-1] <= room:
        cache.crop(-crops[-1])
        assert cache.get_seq_length() == 100 - sum(crops)
    with pytest.raises(RollbackError):
        cache.crop(-(room + 1))
    at = cache.get_seq_length()
    assert_close(fed(model, cache, ids[:, at:]), logits(model, ids)[:, at:])


def test_a_static_crop_that_others_get_wrong() -> None:
    model, ids = shared_model("mistral"), tokens(1, 60)
    cache = static(model, rollback=6)
    fed(model, cache, ids[:, :12], 12)
    cache.crop(-6)
    assert_close(fed(model, cache, ids[:, 6:], 6), logits(model, ids)[:, 6:])


def test_a_refused_crop_leaves_every_layer_as_it_was() -> None:
    model, ids = shared_model("gemma3"), tokens(1, 120)
    cache = static(model, rollback=4)
    fed(model, cache, ids[:, :100], 100)
    with pytest.raises(RollbackError, match="cannot take back 50"):
        cache.crop(-50)
    assert {layer.get_seq_length() for layer in cache.layers} == {100}
    assert_close(fed(model, cache, ids[:, 100:]), logits(model, ids)[:, 100:])
    with pytest.raises(RollbackError):
        cache.crop(5)


@pytest.mark.parametrize("enabled", [False, True])
def test_what_broke_off_in_a_layer_is_noticed(enabled: bool) -> None:
    model, ids = MODELS["qwen2"](), tokens(1, 20)
    if enabled:
        windowkv.enable(model, cache="static")
    cache = static(model)
    fed(model, cache, ids[:, :7])

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        fed(model, cache, ids[:, 7:9])
    hook.remove()
    with pytest.raises(InputError, match="reset"):
        fed(model, cache, ids[:, 7:9])
    with pytest.raises(RollbackError, match="reset"):
        cache.crop(-1)
    with pytest.raises(InputError, match="reset"):
        generated(model, ids, 3, **cache_argument(model, cache))
    cache.reset()
    assert torch.equal(generated(model, ids, 3, **cache_argument(model, cache)), uncached(model, ids, 3))


def test_a_state_without_a_way_back_refuses_drafts_instead_of_going_on_wrongly() -> None:
    model = STATEFUL["lfm2"]()
    ids = torch.cat((tokens(1, 10),) * 4, dim=1)
    with pytest.raises(RollbackError, match="no way back"):
        generated(model, ids, 20, prompt_lookup_num_tokens=5, **given(model))


def test_another_dtype_is_refused_before_anything_is_written() -> None:
    model = MODELS["qwen2"]()
    cache = static(model)
    fed(model, cache, tokens(1, 5))
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(InputError, match="bfloat16"), torch.autocast("cpu", torch.bfloat16):
        fed(model, cache, tokens(1, 1))
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before, strict=True))
    assert cache.get_seq_length() == 5


def test_drafts_again_and_again() -> None:
    model, ids = shared_model("mistral"), tokens(1, 80)
    cache = static(model, rollback=4)
    fed(model, cache, ids[:, :20], 20)
    for at in range(20, 60):
        fed(model, cache, torch.cat((ids[:, at : at + 1], tokens(1, 4, seed=at)), dim=1), 5)
        cache.crop(-4)
    assert_close(fed(model, cache, ids[:, 60:]), logits(model, ids)[:, 60:])


def test_a_reset_cache_is_as_new() -> None:
    model = shared_model("gemma3")
    cache = static(model, rollback=8)
    cache.reset()
    for seed, length in enumerate((100, 3, 40)):
        ids = tokens(2, length, seed=seed)
        assert_close(fed(model, cache, ids, length - 2), logits(model, ids))
        cache.layers[0].buffer.keys.fill_(float("nan"))
        cache.reset()
        assert cache.get_seq_length() == 0
        cache.crop(0)
        with pytest.raises(RollbackError):
            cache.crop(-1)


def test_rows_move_in_place() -> None:
    model, ids = shared_model("gemma3"), tokens(3, 60)
    cache = static(model, rollback=8)
    fed(model, cache, ids[:, :40], 40)
    for order in ([0, 1, 2], [0, 2, 1], [2, 2, 0]):
        cache.reorder_cache(torch.tensor(order))
        ids = ids[order]
    assert_close(fed(model, cache, ids[:, 40:], 3), logits(model, ids)[:, 40:])


def test_only_rows_that_change_are_copied() -> None:
    buffer = FixedBuffer(Ring(4, 8, 100))
    buffer.append(torch.arange(32.0).reshape(4, 1, 8, 1), torch.arange(32.0).reshape(4, 1, 8, 1))
    written: list[list[int]] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.index_copy_:
                written.append(args[2].tolist())
            return func(*args, **(kwargs or {}))

    with Watched():
        buffer.take_rows(RowSelection(torch.tensor([0, 1, 2, 3])))
        assert written == []
        buffer.take_rows(RowSelection(torch.tensor([0, 3, 2, 1])))
    assert written == [[1, 3], [1, 3]]
    assert buffer.keys is not None
    assert buffer.keys[:, 0, 0, 0].tolist() == [0, 24, 16, 8]


def test_selections_that_a_static_cache_refuses() -> None:
    model = shared_model("mistral")
    cache = static(model)
    fed(model, cache, tokens(3, 10), 10)
    before = [layer.keys.clone() for layer in cache.layers]
    for selection in ([0, 1], [0, 1, 3], [0, 1, 2, 2]):
        with pytest.raises(InputError):
            cache.batch_select_indices(torch.tensor(selection))
    with pytest.raises(InputError, match="repeats=2"):
        cache.batch_repeat_interleave(2)
    cache.batch_repeat_interleave(1)
    with pytest.raises(InputError, match="batch 3"):
        fed(model, cache, tokens(2, 1))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    for refused in (cache.fork, lambda: cache.save("x")):
        with pytest.raises(UnsupportedOperationError):
            refused()


# Too small, and other mistakes


@pytest.mark.parametrize("name", ["mistral", "gemma3", "mistral-full"])
def test_a_cache_that_is_too_small_says_how_long_it_must_be(name: str) -> None:
    model, ids = shared_model(name), tokens(1, 40)
    cache = static(model, 30)
    with pytest.raises(InputError, match=r"max_cache_len=30 .* 40 are needed"):
        fed(model, cache, ids, 40)
    assert cache.get_seq_length() == 0
    fed(model, cache, ids[:, :30], 30)
    with pytest.raises(InputError, match="31 are needed"):
        fed(model, cache, ids[:, 30:31], 1)
    assert cache.get_seq_length() == 30


def test_an_enabled_model_refuses_before_it_computes() -> None:
    model, ids = windowkv.enable(MODELS["gemma3"]()), tokens(1, 40)
    cache = static(model, 50)
    with pytest.raises(InputError, match="max_cache_len=51"):
        generated(model, ids, 12, **cache_argument(model, cache))
    assert (cache.get_seq_length(), cache.rows) == (0, None)
    assert torch.equal(generated(model, ids, 11, **cache_argument(model, cache)), uncached(model, ids, 11))


def test_an_enabled_model_refuses_new_tokens_that_do_not_fit() -> None:
    model, ids = windowkv.enable(MODELS["mistral"]()), tokens(1, 40)
    cache = static(model, 50)
    fed(model, cache, ids[:, :39], 39)
    mask = torch.ones(1, 40, dtype=torch.long)
    with pytest.raises(InputError, match="max_cache_len=51"):
        generated(model, ids[:, 39:], 12, mask, **cache_argument(model, cache))
    assert cache.get_seq_length() == 39


@pytest.mark.parametrize("length", [0, -1, True, 2.5, None])
def test_lengths_that_are_none(length: Any) -> None:
    with pytest.raises(OptionError, match="max_cache_len"):
        static(shared_model("mistral"), length)


def test_attention_that_takes_the_order_of_keys_for_positions_is_refused() -> None:
    model = MODELS["mistral"]()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match="flash_attention_2"):
        static(model)


def test_a_cache_for_another_model_is_refused() -> None:
    model = windowkv.enable(MODELS["mistral"]())
    with pytest.raises(InputError, match="another model"):
        generated(model, tokens(1, 5), 3, **given(shared_model("gemma3")))


# enable(cache="static")


def made_cache(model: Any, ids: torch.Tensor, new: int, **options: Any) -> Any:
    out = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True, **options
    )
    return getattr(out, "cache", None) or out.past_key_values


@pytest.mark.parametrize("name", GENERATED)
def test_an_enabled_model_makes_static_caches(name: str) -> None:
    model, ids = windowkv.enable(MODELS[name](), cache="static"), tokens(1, 40)
    expected = uncached(shared_model(name), ids, 20)
    assert torch.equal(generated(model, ids, 20), expected)
    assert torch.equal(generated(model, ids, 20, num_beams=2), uncached_beams(name, ids))
    cache = made_cache(model, ids, 20)
    assert type(cache) is SlidingWindowCache
    assert (cache.max_cache_len, cache.get_seq_length()) == (256, 59)
    assert made_cache(model, tokens(1, 250), 20).max_cache_len == 512
    assert made_cache(model, ids, 20).max_cache_len == 512, "another length would be another graph"
    windowkv.disable(model)
    assert type(made_cache(model, ids, 2)) is not SlidingWindowCache


def uncached_beams(name: str, ids: torch.Tensor) -> torch.Tensor:
    return generated(shared_model(name), ids, 20, num_beams=2, use_cache=False)


def test_caches_of_a_length_that_was_asked_for() -> None:
    model, ids = windowkv.enable(MODELS["mistral"](), cache="static", max_cache_len=50), tokens(1, 40)
    assert made_cache(model, ids, 11).max_cache_len == 50
    with pytest.raises(InputError, match="max_cache_len=51"):
        generated(model, ids, 12)


def test_drafts_of_any_length_go_to_dynamic_caches() -> None:
    model = windowkv.enable(MODELS["mistral"](), cache="static", rollback=1)
    assistant = windowkv.enable(MODELS["mistral-w2"](), cache="static", rollback=1)
    ids = tokens(1, 40)
    expected = uncached(shared_model("mistral"), ids, 30)
    assert torch.equal(generated(model, ids, 30, assistant_model=assistant), expected)
    assert torch.equal(
        generated(model, ids.repeat(1, 2), 30, prompt_lookup_num_tokens=30),
        uncached(shared_model("mistral"), ids.repeat(1, 2), 30),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "fixed"},
        {"max_cache_len": 50},
        {"cache": "static", "max_cache_len": 0},
        {"cache": "static", "prefix_store": windowkv.PrefixStore(max_bytes=1 << 20)},
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    model = MODELS["mistral"]()
    with pytest.raises(OptionError):
        windowkv.enable(model, **options)
    assert "_prefill" not in vars(model)


def test_this_file_skips_llama_4_in_old_releases_only() -> None:
    assert len(GENERATED) == len(ARCHITECTURES) or Version(transformers.__version__) < Version("5.24")
