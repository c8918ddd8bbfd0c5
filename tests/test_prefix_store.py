"""A beginning is computed once; what is handed out is the caller's own; the bytes hold."""

import copy
import gc
import os
import pickle
import random
import threading
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

import windowkv
from tiny import (
    ARCHITECTURES,
    MODELS,
    STATEFUL,
    WINDOW,
    build,
    cache_argument,
    counted,
    fed,
    generated,
    left_padded,
    logits,
    shared_model,
    tokens,
    uncached,
)
from windowkv import DynamicSlidingWindowCache, InputError, OptionError, PrefixStore
from windowkv.cache import layers_nbytes
from windowkv.prefix.disk import scopes
from windowkv.prefix.fingerprint import fingerprint
from windowkv.prefix.texts import Text, as_ids
from windowkv.quantisation import Quantisation

MIB = 1 << 20
PLAIN = Quantisation().form(0)


def served(name: str, max_bytes: int = 64 * MIB, **options: Any) -> tuple[Any, PrefixStore]:
    store = PrefixStore(max_bytes)
    return windowkv.enable((MODELS | STATEFUL)[name](), prefix_store=store, **options), store


def filled(model: Any, ids: Tensor, **options: Any) -> DynamicSlidingWindowCache:
    cache = DynamicSlidingWindowCache(model.config, **options)
    fed(model, cache, ids, ids.shape[1])
    return cache


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


def held_bytes(store: PrefixStore) -> int:
    """Counted anew from every distinct storage that the store keeps alive."""
    storages: dict[int, int] = {}
    for node in store._nodes():
        for pair in node.block or ():
            storages |= {states.untyped_storage().data_ptr(): states.untyped_storage().nbytes() for states in pair}
    layers = [layer for node in store._nodes() if node.checkpoint for layer in node.checkpoint.layers.values()]
    return sum(storages.values()) + layers_nbytes(layers)


# --- lookup and insert


@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_what_is_handed_out_goes_on_as_the_text_it_has_seen(name: str) -> None:
    model, store = served(name)
    ids, more = tokens(1, 600), tokens(1, 3 * WINDOW, seed=1)
    assert store.lookup(ids[0]) is None
    assert store.insert(ids[0].tolist(), filled(model, ids))
    cache = store.lookup(joined(ids, more))
    assert cache is not None
    assert cache.get_seq_length() == 600
    torch.testing.assert_close(fed(model, cache, more), fed(model, filled(model, ids), more), atol=1e-4, rtol=0)
    assert (store.stats.hits, store.stats.misses, store.stats.entries) == (1, 1, 1)


@pytest.mark.parametrize("back", [1, 5, 64])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8"])
def test_a_point_within_rollback_serves_too(name: str, back: int) -> None:
    model, store = served(name)
    ids = tokens(1, 300)
    store.insert(ids, filled(model, ids))
    text = joined(ids[:, : 300 - back], tokens(1, 20, seed=2))
    text[0, 300 - back] = 3 + (ids[0, 300 - back] - 2) % 100
    cache = store.lookup(text)
    assert cache is not None
    assert cache.get_seq_length() == 300 - back
    rest = text[:, 300 - back :]
    torch.testing.assert_close(fed(model, cache, rest), logits(model, text)[:, 300 - back :], atol=1e-4, rtol=0)


def test_beyond_rollback_nothing_is_found_but_in_full_layers() -> None:
    ids = tokens(1, 300)
    for name, reused in (("mistral", 0), ("mistral-full", 100)):
        model, store = served(name)
        store.insert(ids, filled(model, ids))
        cache = store.lookup(joined(ids[:, :100], tokens(1, 5, seed=7)))
        assert (cache.get_seq_length() if cache else 0) == reused


def test_a_prefix_of_one_token_and_of_the_whole_text() -> None:
    model, store = served("gemma3")
    store.insert([7], filled(model, torch.tensor([[7]])))
    found = store.lookup([7, 8])
    assert found is not None
    assert found.get_seq_length() == 1
    assert store.lookup([7]) is None  # a token is left to run
    assert store.lookup([]) is None


def test_nothing_that_a_caller_does_changes_the_store() -> None:
    model, store = served("gemma3")
    ids = tokens(1, 300)
    store.insert(ids, filled(model, ids))
    before = held_bytes(store)
    for seed in range(3):
        text = joined(ids, tokens(1, 3, seed=seed))
        cache = store.lookup(text)
        assert cache is not None
        assert cache.get_seq_length() == 300
        reply = generated(model, text, 30, **cache_argument(model, cache))
        assert torch.equal(reply, uncached(shared_model("gemma3"), text, 30))
        cache.crop(-20)
        cache.reset()
    assert held_bytes(store) >= before
    found = store.lookup(joined(ids, tokens(1, 9, seed=9)))
    assert found is not None
    assert found.get_seq_length() == 300


def test_a_hit_costs_no_copy_until_it_is_written() -> None:
    model, store = served("gemma3")
    ids = tokens(1, 700)
    store.insert(ids, filled(model, ids))
    hits = [store.lookup(joined(ids, ids)) for _ in range(10)]
    apart = {t.untyped_storage().data_ptr() for c in hits if c for layer in c.layers for t in layer.buffer.held_tensors}
    stored = {s.untyped_storage().data_ptr() for n in store._nodes() for pair in n.block or () for s in pair}
    stored |= {
        t.untyped_storage().data_ptr()
        for n in store._nodes()
        if n.checkpoint
        for layer in n.checkpoint.layers.values()
        for t in layer.buffer.held_tensors
    }
    assert apart == stored


def test_texts_that_begin_alike_share_their_full_layers() -> None:
    model, store = served("mistral-full")
    system = tokens(1, 500)
    first = joined(system, tokens(1, 50, seed=1))
    store.insert(first, filled(model, first))
    alone = store.stats.nbytes
    for seed in range(2, 6):
        text = joined(system, tokens(1, 50, seed=seed))
        store.insert(text, filled(model, text))
    assert store.stats.nbytes == held_bytes(store)
    assert store.stats.nbytes - alone == 4 * alone * 50 // 550


@pytest.mark.parametrize(
    "tokens_",
    [
        None,
        "text",
        [1.5],
        [1j],
        [[1], [2]],
        torch.zeros(2, 3).long(),
        torch.zeros(3),
        torch.zeros(3).long().to("meta"),
        torch.zeros(3).long().to_sparse(),
    ],
)
def test_what_is_no_text_is_refused(tokens_: Any) -> None:
    _, store = served("mistral")
    with pytest.raises(InputError):
        store.lookup(tokens_)


def test_a_cache_of_another_text_is_refused() -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config)
    generated(model, ids, 3, **cache_argument(model, cache))
    with pytest.raises(InputError, match="30 ids for a cache that has seen 32"):
        store.insert(ids, cache)
    with pytest.raises(InputError, match="other tokens"):
        store.insert(tokens(1, 40, seed=3), cache)
    assert store.stats.entries == 2  # the prompt and its continuation, which generate left


def test_caches_that_are_not_what_they_should_be_are_refused() -> None:
    model, store = served("gemma3")
    ids = tokens(2, 30)
    cache, other = filled(model, ids), filled(shared_model("mistral"), ids)
    for row in (-1, 2):
        with pytest.raises(InputError, match=f"row={row}: this cache holds rows 0 to 1"):
            store.insert(ids[0], cache, row=row)
    for nothing in (None, hf.DynamicCache()):
        with pytest.raises(InputError, match="a store keeps what a DynamicSlidingWindowCache holds"):
            store.insert(ids[0], nothing)
    for option in ({"row": "a"}, {"row": 0.5}, {"padding": "x"}):
        with pytest.raises(InputError, match="an integer"):
            store.insert(ids[0], cache, **option)
    with pytest.raises(OptionError, match="rollback=-1"):
        store.lookup(ids[0], rollback=-1)
    for padding in (-1, 31):
        with pytest.raises(InputError, match=f"padding={padding}: this cache has seen 30 tokens"):
            store.insert(ids[0], cache, padding=padding)
    with pytest.raises(InputError, match="for another model: layer 3"):
        store.insert(ids[0], other)
    for wrong in (-3, 1 << 31, 1 << 40):
        with pytest.raises(InputError, match="integers from 0 to 2147483647"):
            store.insert([*ids[0, :-1].tolist(), wrong], cache)
    cache.layers[2].crop(-1)
    with pytest.raises(InputError, match="did not end"):
        store.insert(ids[0], cache)
    padded = DynamicSlidingWindowCache(model.config)
    row, mask = left_padded([tokens(1, 30)[0], tokens(1, 20)[0]])
    generated(model, row, 1, mask, **cache_argument(model, padded))
    with pytest.raises(InputError, match="other tokens"):
        store.insert(row[1], padded, row=1)
    assert store.insert(row[1, 10:], padded, row=1, padding=10)


@pytest.mark.parametrize(("stored", "asked"), [(64, 2), (2, 64), (64, 64), (0, 7)])
def test_a_hit_keeps_what_the_cache_that_takes_it_should(stored: int, asked: int) -> None:
    model, store = served("gemma3", rollback=asked)
    ids = tokens(1, 300)
    store.insert(ids, filled(model, ids, rollback=stored))
    text = joined(ids, tokens(1, 100, seed=1))
    cache = DynamicSlidingWindowCache(model.config, rollback=asked)
    reply = generated(model, text, 6, **cache_argument(model, cache))
    assert torch.equal(reply, uncached(shared_model("gemma3"), text, 6))
    assert store.stats.hits == 1
    planned = windowkv.plan(model.config, tokens=405, rollback=asked, dtype=torch.float32)
    assert cache.nbytes == planned.total_bytes
    cache.crop(-asked)
    assert cache.get_seq_length() == 405 - asked


def test_a_store_serves_one_model() -> None:
    _, store = served("mistral")
    other = MODELS["mistral"]()
    with pytest.raises(OptionError, match="serves another MistralForCausalLM"):
        windowkv.enable(other, prefix_store=store)
    assert "_prefill" not in vars(other)
    with pytest.raises(OptionError, match="serves no model yet"):
        PrefixStore(MIB).lookup([1])
    for no_model in (None, "x", torch.nn.Linear(2, 2)):
        with pytest.raises(OptionError, match="a store serves a model of transformers"):
            PrefixStore(MIB).bind(no_model)
    with pytest.raises(OptionError, match="prefix_store='dir'"):
        windowkv.enable(other, prefix_store="dir")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="directory=5"):
        PrefixStore(MIB, directory=5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="namespace=None"):
        PrefixStore(MIB, namespace=None)  # type: ignore[arg-type]
    for bad in (-1, 1.5, True, None):
        with pytest.raises(OptionError, match="max_bytes"):
            PrefixStore(bad)  # type: ignore[arg-type]


# --- which weights


def test_other_weights_never_hit() -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)
    generated(model, ids, 3)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    assert store.lookup(joined(ids, ids)) is None
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.div_(1.01)
    reply = generated(model, joined(ids, ids), 5)
    assert torch.equal(reply, uncached(model, joined(ids, ids), 5))


def test_fine_tunes_of_one_config_differ_and_equal_models_do_not() -> None:
    one, same = MODELS["mistral"](), MODELS["mistral"]()
    assert fingerprint(one) == fingerprint(same)
    with torch.no_grad():
        same.lm_head.weight.add_(torch.randn_like(same.lm_head.weight) * 1e-3)
    assert fingerprint(one) != fingerprint(same)
    assert fingerprint(one) != fingerprint(one.to(torch.bfloat16))


def test_adapters_on_and_off_are_two_models() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(MODELS["mistral"](), config).eval()
    store = PrefixStore(64 * MIB)
    windowkv.enable(model, prefix_store=store)
    ids = tokens(1, 30)
    mask = torch.ones_like(ids)

    def reply(**options: Any) -> Tensor:
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)

    tuned = reply(use_cache=False)
    with model.disable_adapter():
        plain = reply(use_cache=False)
    assert not torch.equal(tuned, plain)
    for _ in range(2):
        assert torch.equal(reply(), tuned)
        with model.disable_adapter():
            assert torch.equal(reply(), plain)
    assert (store.stats.hits, store.stats.misses) == (2, 2)


def test_every_write_to_the_weights_is_seen() -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)

    def in_place() -> None:
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[7, 3] += 1

    def past_autograd() -> None:
        model.model.layers[1].self_attn.k_proj.weight.data.mul_(1.01)

    def replaced() -> None:
        model.model.layers[1].self_attn.k_proj.weight.data = model.model.layers[1].self_attn.k_proj.weight.data + 1e-3

    def buffer() -> None:
        model.model.rotary_emb.inv_freq.mul_(1.01)

    def a_value_past_autograd() -> None:
        model.model.embed_tokens.weight.data[ids[0, 3], 5] += 1
        store.bind(model)

    for change in (in_place, past_autograd, replaced, buffer, a_value_past_autograd):
        generated(model, ids, 3)
        assert store.lookup(joined(ids, ids)) is not None
        change()
        assert store.lookup(joined(ids, ids)) is None, change.__name__


def test_one_changed_value_makes_another_model() -> None:
    one, same = MODELS["mistral"](), MODELS["mistral"]()
    with torch.no_grad():
        same.model.embed_tokens.weight[5, 17] += 1e-6
    assert fingerprint(one) != fingerprint(same)


def test_what_changes_the_computation_is_never_mixed() -> None:
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(MODELS["mistral"](), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **options))
    store = PrefixStore(64 * MIB)
    windowkv.enable(model, prefix_store=store)
    ids = tokens(2, 30)

    def reply(**options: Any) -> Tensor:
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options
        )

    for _ in range(2):
        assert torch.equal(reply(), reply(use_cache=False))
        names = ["other", "__base__"]
        assert torch.equal(reply(adapter_names=names), reply(adapter_names=names, use_cache=False))
    hits = store.stats.hits
    with peft.helpers.rescale_adapter_scale(model, 0.5):
        assert torch.equal(reply(), reply(use_cache=False))
    assert store.stats.hits == hits == 1

    def steer(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5

    hook = model.base_model.model.model.layers[0].mlp.register_forward_hook(steer)
    assert torch.equal(reply(), reply(use_cache=False))
    hook.remove()
    assert torch.equal(reply(), reply(use_cache=False))
    assert (store.stats.hits, store.stats.entries) == (2, 4)


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_keys_that_follow_the_length_of_a_text_pass_the_store_by(rope: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8} if rope == "longrope" else {"factor": 4.0}
    settings = {"rope_type": rope, "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    model = build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=None, rope_parameters=settings)
    alone, store = copy.deepcopy(model), PrefixStore(64 * MIB)
    windowkv.enable(model, prefix_store=store)
    assert vars(model)["_prefill"].options.prefill_chunk is None
    short, long = tokens(1, 20), joined(tokens(1, 20), tokens(1, 50, seed=1))
    for text in (short, long, short):
        assert torch.equal(generated(model, text, 5), generated(alone, text, 5))
    assert store.stats.entries == 0
    with pytest.raises(InputError, match="follow the length"):
        store.insert(short, filled(model, short))


def test_hooks_on_the_model_itself_pass_the_store_by() -> None:
    model, store = served("mistral")
    ids, other = tokens(1, 30), tokens(1, 30, seed=5)
    generated(model, joined(ids, ids), 3)
    hits, expected = store.stats.hits, uncached(shared_model("mistral"), other, 1)

    def swap(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | ({"input_ids": other} if kwargs["input_ids"].shape[1] == 30 else {})

    hook = model.register_forward_pre_hook(swap, with_kwargs=True, prepend=True)
    assert torch.equal(generated(model, ids, 1), expected)
    hook.remove()
    assert store.stats.hits == hits


def test_a_forked_process_goes_on_whatever_other_threads_did() -> None:
    model, store = served("mistral")
    ids, busy, done = tokens(1, 30), threading.Event(), threading.Event()
    store.insert(ids, filled(model, ids))

    def hold() -> None:
        with store._lock:
            busy.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    busy.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if store.stats.entries == 0 else 1)  # what was in the middle of something is dropped
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert store.stats.entries == 1


def test_autocast_and_training_are_kept_apart() -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)
    generated(model, ids, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert store.lookup(joined(ids, ids)) is None
        for _ in range(2):
            generated(model, joined(ids, ids), 3)
    assert torch.equal(generated(model, joined(ids, ids), 3), uncached(shared_model("mistral"), joined(ids, ids), 3))
    assert store.stats.hits == 2
    model.train()
    generated(model, joined(ids, ids), 3)
    assert store.stats.hits == 2


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_copy_of_a_model_has_a_store_of_its_own(twin: Any) -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)
    generated(model, ids, 3)
    other = twin(model)
    assert torch.equal(generated(other, joined(ids, ids), 5), uncached(model, joined(ids, ids), 5))
    assert (store.stats.hits, store.stats.entries) == (0, 2)


# --- generate


@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_a_system_prompt_is_reused_whole_from_the_third_request_on(name: str) -> None:
    model, store = served(name, rollback=2)
    system = tokens(1, 100)
    for request in range(4):
        text = joined(system, tokens(1, 20, seed=10 + request))
        with counted(model) as widths:
            reply = generated(model, text, 6)
        assert torch.equal(reply, generated(shared_or(name), text, 6, **fresh(name)))
        assert sum(widths) == (120 if request < 2 else 20) + 5
    assert store.stats.tokens_reused == 2 * 100


def shared_or(name: str) -> Any:
    return STATEFUL[name]() if name in STATEFUL else shared_model(name)


def fresh(name: str) -> dict[str, Any]:
    """The reference: without a cache, but for models whose own code differs token by token."""
    return {} if name in STATEFUL else {"use_cache": False}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8", "mistral-full"])
def test_a_growing_chat(name: str) -> None:
    model, store = served(name)
    history = tokens(1, 40)
    for turn in range(30):
        with counted(model) as widths:
            reply = generated(model, history, 6)
        assert torch.equal(reply, uncached(shared_model(name), history, 6))
        assert sum(widths) == (40 if not turn else 1 + 5) + 5
        history = joined(history, reply, tokens(1, 5, seed=turn))
    assert store.stats.hits == 29


def test_the_last_turn_of_a_long_chat_hits_with_room_for_a_few() -> None:
    model, store = served("mistral")
    generated(model, tokens(1, 300, seed=99), 2)
    store.clear()
    history = tokens(1, 40)
    for turn in range(30):
        generated(model, history, 2)
        if turn == 3:
            store.max_bytes = store.stats.nbytes
        history = joined(history, tokens(1, 10, seed=turn))
    assert store.stats.nbytes <= store.max_bytes
    assert store.lookup(history).get_seq_length() == history.shape[1] - 10  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8", *STATEFUL])
def test_the_same_prompt_again(name: str) -> None:
    model, _ = served(name)
    ids = tokens(1, 60)
    expected = generated(shared_or(name), ids, 6, **fresh(name))
    for request in range(3):
        with counted(model) as widths:
            assert torch.equal(generated(model, ids, 6), expected)
        # A state cannot go back by one token: the point before the last is learned at the second time.
        assert sum(widths[:-5]) == (60 if not request or (name in STATEFUL and request == 1) else 1)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {"prefill_chunk_size": 16}]
)
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_beams_samples_and_chunks(name: str, options: dict[str, Any]) -> None:
    model, store = served(name)
    reference = shared_or(name)
    system = tokens(1, 50)
    for seed in range(3):
        text = joined(system, tokens(1, 10, seed=seed))
        torch.manual_seed(3)
        alone = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
        expected = generated(reference, text, 6, **alone, **fresh(name))
        torch.manual_seed(3)
        assert torch.equal(generated(model, text, 6, **options), expected)
    assert store.stats.hits >= 1


@pytest.mark.parametrize("lengths", [(20, 7), (20, 20), (5, 90), (3, 3, 150)])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "qwen2", "gpt_oss", "mistral-full"])
def test_padded_rows_reuse_what_they_have_in_common(name: str, lengths: tuple[int, ...]) -> None:
    model, store = served(name)
    system, spread = tokens(1, 100)[0], max(lengths) - min(lengths)
    for request in range(4):
        rows = [torch.cat((system, tokens(1, n, seed=9 * request + i)[0])) for i, n in enumerate(lengths)]
        ids, mask = left_padded(rows)
        with counted(model) as widths:
            reply = generated(model, ids, 6, mask)
        assert torch.equal(reply, uncached(shared_model(name), ids, 6, mask))
        # Rows are resumed together, so that shorter ones go back, as far as a window allows it.
        if request > 1 and (spread <= 64 or name == "mistral-full"):
            assert sum(widths) == max(lengths) + 5
    alone = torch.cat((system, tokens(1, 9, seed=77)[0]))[None]
    with counted(model) as widths:
        reply = generated(model, alone, 6)
    assert torch.equal(reply, uncached(shared_model(name), alone, 6))
    assert widths[0] <= 9
    assert store.stats.nbytes == held_bytes(store)


def test_a_row_of_padding_alone_holds_up_no_other() -> None:
    model, _ = served("gemma3")
    long, short = tokens(1, 200)[0], tokens(1, 4, seed=1)[0]
    ids, mask = left_padded([long, short])
    for expected in (200, 4):
        with counted(model) as widths:
            reply = generated(model, ids, 6, mask)
        assert torch.equal(reply, uncached(shared_model("gemma3"), ids, 6, mask))
        assert widths[0] <= expected


@pytest.mark.parametrize("name", ["llama4-chunk8", "lfm2"])
def test_padding_passes_the_store_by_where_it_changes_what_is_kept(name: str) -> None:
    model, store = served(name)
    ids, mask = left_padded([tokens(1, 20)[0], tokens(1, 15, seed=1)[0]])
    assert torch.equal(generated(model, ids, 5, mask), generated(shared_or(name), ids, 5, mask, **fresh(name)))
    assert (store.stats.entries, store.stats.hits) == (0, 0)


def test_positions_of_a_callers_own_pass_the_store_by() -> None:
    model, store = served("mistral")
    ids = tokens(1, 30)
    for positions in (torch.arange(30)[None] * 2, torch.arange(5, 35)[None]):
        expected = uncached(shared_model("mistral"), ids, 5)
        generated(model, ids, 5, position_ids=positions)
        assert store.stats.entries == 0
    generated(model, ids, 5, position_ids=torch.arange(30)[None])
    assert store.stats.entries == 2
    assert torch.equal(generated(model, ids, 5), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8", *STATEFUL])
def test_rows_of_a_batch_reuse_what_they_have_in_common(name: str) -> None:
    model, _ = served(name, rollback=2)
    system = tokens(1, 100)
    for request in range(4):
        text = joined(system.expand(3, -1), tokens(3, 20, seed=10 + request))
        with counted(model) as widths:
            reply = generated(model, text, 6)
        assert torch.equal(reply, generated(shared_or(name), text, 6, **fresh(name)))
        assert sum(widths) == (120 if request < 2 else 20) + 5
    again = joined(text, tokens(3, 4, seed=8))
    with counted(model) as widths:
        reply = generated(model, again, 6)
    assert torch.equal(reply, generated(shared_or(name), again, 6, **fresh(name)))
    assert widths[0] == 4


def test_rows_that_share_less_are_resumed_where_all_can_be() -> None:
    model, store = served("mistral", rollback=40)
    one, other = tokens(1, 100), tokens(1, 100, seed=1)
    for text in (one, other[:, :70]):
        store.insert(text, filled(model, text, rollback=40))
    text = joined(torch.cat((one, other)), tokens(2, 10, seed=2))
    cache = store.lookup_rows([Text(as_ids(row)) for row in text], PLAIN)
    assert cache is not None
    assert (cache.get_seq_length(), cache.rows) == (70, 2)
    torch.testing.assert_close(fed(model, cache, text[:, 70:]), logits(model, text)[:, 70:], atol=1e-4, rtol=0)
    assert store.lookup_rows([Text(as_ids(one)), Text(as_ids(tokens(1, 50, seed=9)))], PLAIN) is None


def test_what_was_fed_unseen_is_never_stored() -> None:
    model, store = served("mistral")
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(1, 30), 30)
    placeholders = joined(torch.full((1, 30), 5), tokens(1, 4, seed=2))
    generated(model, placeholders, 5, **cache_argument(model, cache))
    assert store.stats.entries == 0


def test_a_generation_that_breaks_off_leaves_the_store_whole() -> None:
    model, store = served("gemma3")
    ids = tokens(1, 60)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        generated(model, ids, 5)
    hook.remove()
    assert (store.stats.entries, store.stats.nbytes) == (0, 0)
    assert torch.equal(generated(model, ids, 5), uncached(shared_model("gemma3"), ids, 5))


# --- bytes


def test_bytes_never_exceed_the_budget_and_no_token_is_wrong_in_a_thousand_requests() -> None:
    model, store = served("gemma3", max_bytes=400_000, rollback=2)
    reference, randomly = shared_model("gemma3"), random.Random(0)
    systems = [tokens(1, 40 + 30 * i, seed=i) for i in range(6)]
    for request in range(1000):
        text = joined(randomly.choice(systems), tokens(1, randomly.randint(1, 30), seed=randomly.randint(0, 40)))
        text = text[:, : randomly.randint(2, text.shape[1])]
        with torch.no_grad():
            cache = store.lookup(text) or DynamicSlidingWindowCache(model.config, rollback=2)
            out = model(text[:, cache.get_seq_length() :], use_cache=True, **cache_argument(model, cache)).logits
        if request % 10 == 0:
            torch.testing.assert_close(out[:, -1], logits(reference, text)[:, -1], atol=1e-4, rtol=0)
            assert store.stats.nbytes == held_bytes(store)
        store.insert(text, cache)
        assert store.stats.nbytes <= 400_000
    assert store.stats.evictions > 100
    assert store.stats.hits > 100
    store.clear()
    assert (store.stats.nbytes, store.stats.entries) == (0, 0)


def test_views_of_large_storages_are_not_kept() -> None:
    model, store = served("mistral", max_bytes=1_000_000)
    for seed in range(10):
        ids = tokens(1, 200, seed=seed)
        cache = filled(model, tokens(4, 200, seed=seed), rollback=1000)
        cache.batch_select_indices(torch.tensor([0]))
        store.insert(tokens(4, 200, seed=seed)[0], cache)
        del ids, cache
        gc.collect()
        assert held_bytes(store) == store.stats.nbytes <= 1_000_000


def test_an_entry_over_the_budget_harms_no_other() -> None:
    model, store = served("mistral-full", max_bytes=250_000)
    small, large = tokens(1, 100), tokens(1, 400, seed=1)
    assert store.insert(small, filled(model, small))
    before = store.stats.nbytes
    assert not store.insert(large, filled(model, large))
    assert (store.stats.refused, store.stats.evictions, store.stats.nbytes) == (1, 0, before)
    assert store.lookup(joined(small, small)) is not None


def test_the_least_recently_used_goes_first() -> None:
    model, store = served("mistral")
    a, b, c = (tokens(1, 50, seed=seed) for seed in range(3))
    for text in (a, b):
        store.insert(text, filled(model, text))
    store.max_bytes = store.stats.nbytes
    assert store.lookup(joined(a, a)) is not None
    store.insert(c, filled(model, c))
    assert [store.lookup(joined(text, text)) is not None for text in (a, b, c)] == [True, False, True]


def test_many_threads_share_a_store() -> None:
    model, store = served("gemma3", max_bytes=500_000)
    system, wrong = tokens(1, 60), []

    def work(seed: int) -> None:
        for i in range(15):
            text = joined(system, tokens(1, 5 + i, seed=seed))
            with torch.no_grad():
                cache = store.lookup(text) or DynamicSlidingWindowCache(model.config)
                out = model(text[:, cache.get_seq_length() :], use_cache=True, **cache_argument(model, cache)).logits
            if not torch.allclose(out[:, -1], logits(shared_model("gemma3"), text)[:, -1], atol=1e-4):
                wrong.append((seed, i))
            store.insert(text, cache)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.stats.nbytes == held_bytes(store) <= 500_000


# --- quantised caches

FORMS = [Quantisation(kv_dtype, quantize) for kv_dtype in ("int8", "int4", "fp8") for quantize in ("full", "all")]


def wide() -> Any:
    """A model whose windows are worth quantising, beside a full layer."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return build(hf.Gemma2ForCausalLM, hf.Gemma2Config, sliding_window=150, layer_types=kinds, query_pre_attn_scalar=16)


@cache
def reference(name: str) -> Any:
    """The same model without a store."""
    return windowkv.enable(wide() if name == "wide" else (MODELS | STATEFUL)[name]())


def packing(
    name: str,
    form: Quantisation,
    max_bytes: int = 64 * MIB,
    directory: Any = None,
    max_disk_bytes: Any = None,
    **options: Any,
) -> tuple[Any, PrefixStore]:
    store, model = (
        PrefixStore(max_bytes, directory, max_disk_bytes=max_disk_bytes),
        wide() if name == "wide" else (MODELS | STATEFUL)[name](),
    )
    return windowkv.enable(model, prefix_store=store, **asdict(form), **options), store


def cold(model: Any, form: Quantisation, ids: Tensor, *pieces: int, **options: Any) -> DynamicSlidingWindowCache:
    """A cache that was fed the beginning of a text in these pieces."""
    cache = DynamicSlidingWindowCache(model.config, **asdict(form), **options)
    if pieces:
        fed(model, cache, ids[:, : sum(pieces)], *pieces)
    return cache


def in_pieces(name: str, form: Quantisation, ids: Tensor, new: int, *pieces: int, **options: Any) -> Tensor:
    """What follows when a text is fed in these pieces, and then what is left of it, without a store."""
    alone, rows = reference(name), options.get("num_beams", options.get("num_return_sequences", 1))
    past = cold(alone, form, ids, *pieces)
    if pieces and alone.config.layer_types[0] == "conv":  # whose states do not repeat a row by themselves
        past.batch_repeat_interleave(rows)
    return generated(alone, ids, new, **cache_argument(alone, past), **options)


def same_bits(one: DynamicSlidingWindowCache, other: DynamicSlidingWindowCache) -> bool:
    """Whether the next query is shown the same of every layer that windowkv stores."""
    pairs = [
        (a.buffer.tail, b.buffer.tail) for a, b in zip(one.layers, other.layers, strict=True) if hasattr(a, "buffer")
    ]
    return all(torch.equal(x, y) for pair in pairs for x, y in zip(*pair, strict=True))


@pytest.mark.parametrize(
    ("name", "form"),
    [*product(["wide"], FORMS), *zip(["gemma3", "gemma3n", "llama4-chunk8", "lfm2"], FORMS[:4], strict=True)],
    ids=str,
)
def test_a_quantised_hit_goes_on_as_the_cache_that_was_stored_bit_for_bit(name: str, form: Quantisation) -> None:
    model, store = packing(name, form)
    more = tokens(1, 70, seed=1)
    for length in (50, 192, 400):
        ids = tokens(1, length)
        cache = cold(model, form, ids, length - 30, 29, 1)
        assert store.insert(ids, cache)
        found = store.lookup(joined(ids, more))
        assert found is not None
        assert (found.get_seq_length(), found.quantisation) == (length, form)
        assert same_bits(found, cache)
        assert torch.equal(fed(model, found, more, 30), fed(model, cache, more, 30))
        assert found.nbytes == cache.nbytes
        before = store.lookup(ids)
        assert (before is None) == (name == "lfm2" and length == 50)
        if name != "lfm2":
            assert before is not None
            assert before.get_seq_length() == length - 1
            assert same_bits(before, cold(model, form, ids, length - 30, 29))
    assert store.stats.nbytes == held_bytes(store)


def test_forms_never_serve_each_other(tmp_path: Path) -> None:
    model, ids = wide(), tokens(1, 300)
    text = joined(ids, tokens(1, 9, seed=1))
    asked = [(form, rollback) for form in (Quantisation(), *FORMS) for rollback in (64, 100)]
    for directory in (None, tmp_path):
        store = PrefixStore(64 * MIB, directory)
        store.bind(model)
        for i, (form, rollback) in enumerate(asked):
            options = asdict(form) | {"rollback": rollback}
            assert (store.lookup(text, **options) is None) == (i != 1), "what is not quantised serves any rollback"
            store.insert(ids, cold(model, form, ids, 300, rollback=rollback))
        store.flush()
        if directory:
            store = PrefixStore(64 * MIB, directory)
            store.bind(model)
        for form, rollback in asked:
            found = store.lookup(text, **asdict(form), rollback=rollback)
            assert found is not None
            assert (found.quantisation, found.rollback) == (form, rollback)
            assert same_bits(found, cold(model, form, ids, 300, rollback=rollback))
        assert store.stats.nbytes == held_bytes(store)
    assert len(scopes(tmp_path)) == 1


def test_a_lookup_by_hand_is_for_the_caches_that_the_model_makes() -> None:
    model, store = packing("wide", FORMS[0], rollback=100)
    ids = tokens(1, 150)
    generated(model, ids, 3)
    text = joined(ids, tokens(1, 5, seed=1))
    found = store.lookup(text)
    assert found is not None
    assert (found.quantisation, found.rollback) == (FORMS[0], 100)
    assert store.lookup(text, kv_dtype="int8") is not None  # with the rollback that the model's caches have
    assert store.lookup(text, kv_dtype=None) is None
    store.bind(model)  # all weights are read again, and that is all
    assert store.lookup(text) is not None
    windowkv.enable(model, prefix_store=store, kv_dtype=None)
    assert store.lookup(text) is None
    for bad in ({"kv_dtype": "int2"}, {"kv_dtype": "int8", "quantize": "some"}, {"quantize": "all"}):
        with pytest.raises(OptionError):
            store.lookup(text, **bad)
        with pytest.raises(OptionError):
            store.bind(model, **bad)
    assert store.lookup(text, kv_dtype="int8", rollback=100) is not None


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_was_fed_in_other_pieces_is_never_mixed(form: Quantisation) -> None:
    model, store = packing("wide", form)
    system, recipes = tokens(1, 280), {}
    for seed, pieces in enumerate([(300,), (100, 200), (1,) * 30 + (170, 100), (300,), (100, 180, 20)]):
        text = joined(system, tokens(1, 20, seed=seed + 1))
        store.insert(text, cold(model, form, text, *pieces))
        recipes[pieces] = text
    for pieces, text in recipes.items():
        found = store.lookup(joined(text, text))
        assert found is not None
        assert found.get_seq_length() == 300
        assert same_bits(found, cold(model, form, text, *pieces))
    assert store.stats.nbytes == held_bytes(store)


def test_packed_texts_that_begin_alike_share_what_is_packed() -> None:
    model, store = packing("mistral-full", FORMS[0])
    system = tokens(1, 500)
    for seed in range(4):
        text = joined(system, tokens(1, 12, seed=seed))
        store.insert(text, cold(model, FORMS[0], text, 512))
    blocks = sum(part.untyped_storage().nbytes() for node in store._nodes() for layer in node.block for part in layer)
    per_token = 4 * 2 * 2 * (16 + 2)  # layers, heads, keys and values: a byte each and a scale
    assert blocks == (500 + 4 * 12) * per_token
    assert store.stats.nbytes == held_bytes(store) == blocks + 4 * 96 * 4 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
@pytest.mark.parametrize("name", ["wide", "gemma3", "gemma3n", "llama4-chunk8", "lfm2"])
def test_a_quantised_system_prompt_is_reused(name: str, form: Quantisation) -> None:
    model, store = packing(name, form, rollback=2)
    system = tokens(1, 150)
    for request in range(4):
        text = joined(system, tokens(1, 40, seed=10 + request))
        with counted(model) as widths:
            reply = generated(model, text, 6)
        expected = in_pieces(name, form, text, 6, *([150] if request else []))
        assert torch.equal(reply, expected)
        assert sum(widths) == (190 if request < 2 else 40) + 5
    assert store.stats.tokens_reused == 2 * 150
    assert store.stats.nbytes == held_bytes(store)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_growing_chat_of_a_quantised_cache(form: Quantisation) -> None:
    model, store = packing("wide", form)
    alone, kept = reference("wide"), DynamicSlidingWindowCache(model.config, **asdict(form))
    history = tokens(1, 120)
    for turn in range(8):
        with counted(model) as widths:
            reply = generated(model, history, 10)
        assert torch.equal(reply, generated(alone, history, 10, **cache_argument(alone, kept)))
        assert widths[0] == (120 if not turn else 1 + 15)
        history = joined(history, reply, tokens(1, 15, seed=turn))
    assert store.stats.hits == 7


@pytest.mark.parametrize("length", [60, 127, 128, 129, 200])
def test_the_same_prompt_again_and_one_edited_in_the_middle(length: int) -> None:
    form = FORMS[3]
    model, store = packing("wide", form)
    ids = tokens(1, length)
    for pieces in ([], [length - 1], [length - 1]):
        with counted(model) as widths:
            assert torch.equal(generated(model, ids, 6), in_pieces("wide", form, ids, 6, *pieces))
        assert widths[0] == (1 if pieces else length)
    for request in range(3):
        edited = joined(ids[:, :45], tokens(1, length - 45, seed=5 + request))
        with counted(model) as widths:
            assert torch.equal(generated(model, edited, 6), in_pieces("wide", form, edited, 6, 45))
        assert widths[0] == (length - 45 if request or length == 60 else 45)
    assert store.stats.nbytes == held_bytes(store)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {"prefill_chunk_size": 16}, {"streamer": 1}],
)
@pytest.mark.parametrize("name", ["wide", "lfm2"])
def test_beams_samples_chunks_and_streams_of_quantised_caches(name: str, options: dict[str, Any]) -> None:
    form = FORMS[1]
    reference(name)  # built before anything is drawn: that seeds
    model, store = packing(name, form)
    system = tokens(1, 150)
    store.insert(system, cold(model, form, system, 150))
    heard: list[int] = []
    streamer = SimpleNamespace(put=lambda new: heard.extend(new.flatten().tolist()), end=lambda: None)
    options = options | ({"streamer": streamer} if "streamer" in options else {})
    for seed in range(2):
        text = joined(system, tokens(1, 10, seed=seed))
        heard.clear()
        torch.manual_seed(3)
        reply = generated(model, text, 6, **options)
        assert heard in ([], [*text[0].tolist(), *reply[0].tolist()])
        torch.manual_seed(3)
        assert torch.equal(reply, in_pieces(name, form, text, 6, 150, **options))
    assert store.stats.hits == 2


@pytest.mark.parametrize("form", [FORMS[1], FORMS[2]], ids=str)
def test_rows_of_a_batch_are_packed_as_one(form: Quantisation) -> None:
    model, store = packing("wide", form)
    system = tokens(1, 150)
    for request in range(3):
        text = joined(system.expand(3, -1), tokens(3, 50, seed=10 + request))
        with counted(model) as widths:
            reply = generated(model, text, 6)
        assert torch.equal(reply, in_pieces("wide", form, text, 6, *([150] if request else [])))
        assert widths[0] == (200, 150, 50)[request]
    assert store.stats.nbytes == held_bytes(store)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padded_rows_are_packed_where_a_padded_batch_is(form: Quantisation) -> None:
    model, store = packing("wide", form)
    texts = [Text(as_ids(tokens(1, 260 - gap, seed=gap)), gap) for gap in (0, 17, 230)]
    for text in texts:
        ids = torch.from_numpy(text.ids[: 240 - text.padding]).long()[None]
        store.insert(ids, cold(model, form, ids, ids.shape[1]))
    found = store.lookup_rows(texts, form.form(64))
    ids, mask = left_padded([torch.from_numpy(text.ids).long() for text in texts])
    batch, positions = DynamicSlidingWindowCache(model.config, **asdict(form)), (mask.cumsum(1) - 1).clamp(min=0)

    def logits_of(cache: Any, start: int, end: int) -> Tensor:
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        with torch.no_grad():
            return model(ids[:, start:end], use_cache=True, **options, **cache_argument(model, cache)).logits

    logits_of(batch, 0, 240)
    assert found is not None
    assert (found.rows, found.get_seq_length()) == (3, 240)
    for ours, theirs in zip(found.layers, batch.layers, strict=True):
        assert ours.buffer.span.seen == theirs.buffer.span.seen
        if hasattr(theirs.buffer, "packed"):
            assert ours.buffer.packed.span.end == theirs.buffer.packed.span.end
    # Rows are multiplied together in the one and alone in the other: the last digits decide some codes.
    torch.testing.assert_close(logits_of(found, 240, 260), logits_of(batch, 240, 260), atol=0.05, rtol=0)
    for row, text in enumerate(texts):
        store.insert(text.ids, found, row=row, padding=text.padding)
        again = store.lookup([*text.ids.tolist(), 5])
        assert again is not None
        assert again.get_seq_length() == len(text.ids)
    assert store.stats.nbytes == held_bytes(store)


def test_packed_bytes_never_exceed_the_budget() -> None:
    form, budget = FORMS[2], 500_000
    model, store = packing("mistral-full", form, max_bytes=budget)
    randomly, plain = random.Random(0), tokens(1, 500)
    assert not store.insert(plain, filled(model, plain))
    assert store.insert(plain, cold(model, form, plain, 500))
    systems = [tokens(1, 100 + 60 * i, seed=i) for i in range(4)]
    for _ in range(150):
        text = joined(randomly.choice(systems), tokens(1, randomly.randint(1, 30), seed=randomly.randint(0, 9)))
        cache = store.lookup(text) or DynamicSlidingWindowCache(model.config, **asdict(form))
        rest = text[:, cache.get_seq_length() :]
        fed(model, cache, rest, rest.shape[1])
        store.insert(text, cache)
        assert store.stats.nbytes == held_bytes(store) <= budget
    assert store.stats.evictions > 20
    assert store.stats.hits > 5


@pytest.mark.parametrize(("pieces", "back", "packed"), [((299, 1), 1, 224), ((270, 30), 30, 192), ((300,), 30, 204)])
def test_a_cache_that_went_back_is_packed_as_little_as_it_can_be(
    pieces: tuple[int, ...], back: int, packed: int
) -> None:
    form = FORMS[1]
    model, store = packing("wide", form)
    ids = tokens(1, 300)
    cache, text = cold(model, form, ids, *pieces), ids[:, : 300 - back]
    cache.crop(-back)
    store.insert(text, cache)
    found = store.lookup(joined(text, ids))
    assert found is not None
    assert found.get_seq_length() == 300 - back
    assert [layer.buffer.packed.span.end for layer in found.layers] == [packed] * 4
    # It holds as computed what came after position 204 at least, where a cold run holds what came after 192.
    assert same_bits(found, cold(model, form, ids, 300 - back)) == (packed != 204)
