"""Full layers in host memory, with an accelerator that is none: its copies are counted, and are tensors of its own."""

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import windowkv
from tiny import MODELS, generated, shared_model, uncached
from windowkv import DynamicSlidingWindowCache, PrefixStore
from windowkv.continuation import cache_name
from windowkv.errors import InputError, OptionError, RollbackError
from windowkv.offload import HostBuffer, Transfers

HYBRID = "gemma2"  # sliding, full, sliding, full
PROMPT = 30


class Accelerator:
    """Takes the place of the copies, and writes down what is copied and what is on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.to_host = 0  # tokens
        self.on_device = self.most = 0  # layers whose past is there, or on its way
        monkeypatch.setattr(Transfers, "available", lambda _: True)
        monkeypatch.setattr(Transfers, "leaves", lambda _, device: device.type == "cpu")
        monkeypatch.setattr(Transfers, "to_host", lambda _, states: self.home(states))
        monkeypatch.setattr(Transfers, "pinned", lambda _, storage: storage)
        monkeypatch.setattr(Transfers, "fetch", lambda _, storages, device: self.fetch(storages))

    def home(self, states: Tensor) -> Tensor:
        self.to_host += states.shape[2]
        return states.clone()

    def fetch(self, storages: tuple[Tensor, ...]) -> Any:
        self.log.append("start")
        self.on_device += 1
        self.most = max(self.most, self.on_device)
        copies = tuple(storage.clone() for storage in storages)

        def arrive() -> tuple[Tensor, ...]:
            self.log.append("arrive")
            self.on_device -= 1
            return copies

        return arrive


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch)


def prompt(rows: int = 1, length: int = PROMPT) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))


def fed(ids: Tensor, model: Any = None) -> DynamicSlidingWindowCache:
    model = model or shared_model(HYBRID)
    cache = DynamicSlidingWindowCache(model.config, offload=True)
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_name(model): cache})
    return cache


def next_logits(cache: DynamicSlidingWindowCache, ids: Tensor) -> Tensor:
    model = shared_model(HYBRID)
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_name(model): cache}).logits


def expected(*ids: Tensor) -> Tensor:
    """The logits of the last ids after all the others, without any cache."""
    with torch.no_grad():
        return shared_model(HYBRID)(torch.cat(ids, dim=1), use_cache=False).logits[:, -ids[-1].shape[1] :]


@pytest.mark.parametrize("name", [HYBRID, "gemma3n", "mistral-full", "mistral", "gpt_oss"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_are_those_without_a_cache(accelerator: Accelerator, name: str, options: dict[str, Any]) -> None:
    model, ids = windowkv.enable(MODELS[name](), offload=True), prompt(2)
    assert torch.equal(
        generated(model, ids, 20, **options), generated(shared_model(name), ids, 20, use_cache=False, **options)
    )
    full = [spec for spec in windowkv.DynamicSlidingWindowCache(model.config).layout.layers if spec.kind == "full"]
    assert bool(accelerator.log) == bool(full)


def test_the_next_layer_is_on_its_way_while_one_is_read_and_never_more_than_two(accelerator: Accelerator) -> None:
    cache = fed(prompt())
    assert [isinstance(layer.buffer, HostBuffer) for layer in cache.layers] == [False, True] * 2
    assert accelerator.log == []  # a prompt finds nothing to read
    next_logits(cache, prompt(1, 1))
    # Both are started before the first layer, which slides, is computed, and none after the last.
    assert accelerator.log == ["start", "start", "arrive", "arrive"]
    assert accelerator.most == 2
    assert accelerator.on_device == 0


def test_of_a_step_only_the_new_tokens_go_to_the_host(accelerator: Accelerator) -> None:
    cache = fed(prompt())
    accelerator.to_host = 0
    next_logits(cache, prompt(1, 1))
    assert accelerator.to_host == 2 * 2  # keys and values of two layers


def test_bytes_are_those_of_the_plan(accelerator: Accelerator) -> None:
    cache = fed(prompt())
    for seen in range(PROMPT + 1, PROMPT + 40):
        next_logits(cache, prompt(1, 1))
        assert cache.nbytes == windowkv.plan(shared_model(HYBRID).config, tokens=seen).total_bytes


def test_all_that_a_cache_is_used_for_works_on_what_lies_in_host_memory(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    ids, more = prompt(2), prompt(2, 5)
    cache = fed(ids)
    next_logits(cache, more)
    cache.crop(-3)
    twin = cache.fork()
    torch.testing.assert_close(next_logits(cache, more), expected(ids, more[:, :2], more), atol=1e-4, rtol=0)
    twin.reorder_cache(torch.tensor([1, 0]))
    swapped = [each.flip(0) for each in (ids, more[:, :2])]
    torch.testing.assert_close(next_logits(twin, more), expected(*swapped, more), atol=1e-4, rtol=0)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        torch.testing.assert_close(next_logits(other, more), expected(*swapped, more, more), atol=1e-4, rtol=0)
    twin.save(tmp_path / "twin")
    loaded = windowkv.load(tmp_path / "twin", shared_model(HYBRID).config)
    torch.testing.assert_close(next_logits(loaded, more), expected(*swapped, more, more), atol=1e-4, rtol=0)
    twin.batch_select_indices(torch.tensor([1]))
    twin.batch_repeat_interleave(2)
    again = [each[1:].repeat(2, 1) for each in (*swapped, more)]
    torch.testing.assert_close(next_logits(twin, more), expected(*again, more), atol=1e-4, rtol=0)
    with pytest.raises(RollbackError):
        twin.crop(-1000)
    twin.reset()
    torch.testing.assert_close(next_logits(twin, ids), expected(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("change", ["reorder", "crop", "reset", "pickle"])
def test_a_copy_that_a_broken_forward_asked_for_is_not_taken_for_what_comes_later(
    accelerator: Accelerator, change: str
) -> None:
    ids, more = prompt(2), prompt(2, 4)
    cache = fed(ids)
    cache.layers[1].buffer.fetch(torch.device("cpu"))
    if change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        before = (ids.flip(0),)
    elif change == "crop":
        cache.crop(-3)
        before = (ids[:, :-3],)
    elif change == "reset":
        cache.reset()
        before = ()
    else:
        cache, before = pickle.loads(pickle.dumps(cache)), (ids,)
    torch.testing.assert_close(next_logits(cache, more), expected(*before, more), atol=1e-4, rtol=0)


def test_states_that_need_a_gradient_are_refused_before_anything_changes(accelerator: Accelerator) -> None:
    ids, model = prompt(), MODELS["mistral-full"]()
    cache = fed(ids, model)
    before = cache.nbytes
    with pytest.raises(InputError, match="no_grad"):
        model(prompt(1, 2), use_cache=True, **{cache_name(model): cache})
    assert (cache.get_seq_length(), cache.nbytes) == (PROMPT, before)


def test_without_an_accelerator_it_changes_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = MODELS[HYBRID](), prompt()
    with caplog.at_level(logging.WARNING, logger="windowkv"):
        windowkv.enable(model, offload=True)
        out = generated(model, ids, 8)
    assert [record.message for record in caplog.records] == [
        "offload=True: this machine has no accelerator, so there is nothing to offload"
    ]
    assert torch.equal(out, uncached(shared_model(HYBRID), ids, 8))
    assert not DynamicSlidingWindowCache(model.config, offload=True).offloaded


def test_what_does_not_go_together_is_refused(accelerator: Accelerator) -> None:
    model = MODELS[HYBRID]()
    for options in ({"cache": "static"}, {"prefix_store": PrefixStore(1 << 20)}, {"kv_dtype": "int8"}, {}):
        with pytest.raises(OptionError, match="offload"):
            windowkv.enable(model, offload=True if options else "yes", **options)
    store = PrefixStore(1 << 20)
    store.bind(model)
    ids = prompt()
    with pytest.raises(InputError, match="offloaded"):
        store.insert(ids, fed(ids, model))
