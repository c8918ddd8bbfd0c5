"""Quantised caches in models: any schedule against the definition, `plan`, files, stores, and all of generate."""

import copy
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import CacheLayerMixin

import windowkv
from tiny import MODELS, STATEFUL, build, cache_argument, fed, generated, left_padded, shared_model, tokens
from windowkv import CacheFileError, DynamicSlidingWindowCache, OptionError, RollbackError
from windowkv.codecs import CODECS
from windowkv.quantisation import RESIDUAL, STEP

WIDE = 150  # a window that is worth quantising
KV_DTYPES = ["int8", "int4", "fp8"]
LONGEST = 500


def model_of(name: str) -> Any:
    if name == "wide":
        return build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=WIDE)
    return shared_model(name)


class ByDefinition(CacheLayerMixin):  # type: ignore[misc]
    """A layer that keeps every token as computed, and shows those packed that a quantised one has packed by then."""

    is_compileable, is_croppable = False, True

    def __init__(self, window: int | None, rollback: int, name: str) -> None:
        self.window, self.residual, self.name = window, max(RESIDUAL, rollback), name
        self.keys = self.values = None
        self.until = 0

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        seen, shown = self.get_seq_length(), []
        first = self.get_mask_sizes(0)[1]
        for name, new, codec in zip(("keys", "values"), (key_states, value_states), CODECS[self.name], strict=True):
            setattr(self, name, torch.cat((getattr(self, name), new), dim=2))
            visible = getattr(self, name)[:, :, first:].clone()
            old = visible[:, :, : max(0, self.until - first)]
            codec.unpack(codec.pack(old), old)
            shown.append(visible)
        self.until = max(self.until, (seen + key_states.shape[2] - self.residual) // STEP * STEP)
        return shown[0], shown[1]

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        past = seen if self.window is None else min(seen, self.window - 1)
        return past + query_length, seen - past

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self.keys, self.values = self.keys[:, :, :tokens_to_remove], self.values[:, :, :tokens_to_remove]
        self.until = min(self.until, self.get_seq_length())


def by_definition(cache: DynamicSlidingWindowCache) -> hf.Cache:
    """The reference that shares no storage code, for a cache of which every layer is quantised."""
    name = str(cache.quantisation.kv_dtype)
    return hf.Cache(layers=[ByDefinition(spec.window, cache.rollback, name) for spec in cache.layout.layers])


class Schedules(RuleBasedStateMachine):
    name: str
    which = st.integers(0, 1000)

    @initialize(rollback=st.sampled_from([0, 5, 64, 100]), kv_dtype=st.sampled_from(KV_DTYPES), rows=st.integers(1, 2))
    def start(self, rollback: int, kv_dtype: str, rows: int) -> None:
        self.model = MODEL_OF[self.name]
        cache = DynamicSlidingWindowCache(self.model.config, rollback, kv_dtype=kv_dtype, quantize="all")
        self.branches: list[tuple[Any, Any]] = [(cache, by_definition(cache))]
        self.rows = rows

    @rule(which=which, count=st.integers(1, 150), seed=st.integers(0, 1000), singly=st.booleans())
    def feed(self, which: int, count: int, seed: int, singly: bool) -> None:
        ours, theirs = self.branches[which % len(self.branches)]
        count = min(count, 40) if singly else count
        if ours.get_seq_length() + count > LONGEST:
            return
        chunks = [] if singly else [count]
        more = tokens(ours.rows or self.rows, count, seed=seed)
        torch.testing.assert_close(
            fed(self.model, ours, more, *chunks), fed(self.model, theirs, more, *chunks), atol=1e-4, rtol=0
        )

    @rule(which=which, count=st.integers(0, 200))
    def take_back(self, which: int, count: int) -> None:
        ours, theirs = self.branches[which % len(self.branches)]
        try:
            ours.crop(-count)
        except RollbackError:
            return
        theirs.crop(-count)

    @rule(which=which)
    def fork(self, which: int) -> None:
        ours, theirs = self.branches[which % len(self.branches)]
        if len(self.branches) < 3:
            self.branches.append((ours.fork(), copy.deepcopy(theirs)))

    @rule(which=which, row=st.integers(0, 1), repeats=st.integers(1, 2))
    def select_rows(self, which: int, row: int, repeats: int) -> None:
        ours, theirs = self.branches[which % len(self.branches)]
        if ours.rows:
            rows = torch.tensor([row % ours.rows] * repeats)
            for cache in (ours, theirs):
                cache.reorder_cache(rows)

    @rule(which=which)
    def save_and_load(self, which: int) -> None:
        ours, theirs = self.branches.pop(which % len(self.branches))
        with tempfile.TemporaryDirectory() as folder:
            ours.save(Path(folder) / "cache")
            self.branches.append((windowkv.load(Path(folder) / "cache", self.model.config), theirs))


MODEL_OF = {name: model_of(name) for name in ("mistral-full", "wide")}


@pytest.mark.parametrize("name", MODEL_OF)
def test_any_schedule_agrees_with_tokens_packed_one_by_one(name: str) -> None:
    machine = type("Schedules", (Schedules,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["mistral-full", "wide"])
def test_generate_continues_as_the_definition_does(name: str, kv_dtype: str) -> None:
    model, prompt = MODEL_OF[name], tokens(2, 260)
    ours = DynamicSlidingWindowCache(model.config, kv_dtype=kv_dtype, quantize="all")
    expected = generated(model, prompt, 40, **cache_argument(model, by_definition(ours)))
    assert torch.equal(generated(model, prompt, 40, **cache_argument(model, ours)), expected)


@pytest.mark.parametrize("quantize", ["full", "all"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["wide", *MODELS])
def test_bytes_are_those_of_the_plan(name: str, kv_dtype: str, quantize: str) -> None:
    config = model_of(name).config
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "quantize": quantize}
    for dtype in (torch.float32, torch.bfloat16):
        for chunks in ([700], [300, 400], [650] + [1] * 50):
            cache = DynamicSlidingWindowCache(config, **options)
            for count in chunks:
                for i, spec in enumerate(cache.layout.layers[: len(cache.layers)]):
                    if spec.buffered:
                        shapes = [(2, spec.kv_heads, count, dim) for dim in (spec.head_dim, spec.value_head_dim)]
                        cache.update(*(torch.zeros(shape, dtype=dtype) for shape in shapes), i)
            planned = windowkv.plan(config, tokens=700, batch_size=2, dtype=dtype, **options)
            assert cache.nbytes == planned.total_bytes
            assert windowkv.max_tokens(config, planned.total_bytes, batch_size=2, dtype=dtype, **options) in (
                None,
                *range(700, 1000),
            )


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.56), ("fp8", 0.56), ("int4", 0.32)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_long_text_takes_the_bytes_that_are_promised(kv_dtype: str, most: float, head_dim: int) -> None:
    config = hf.MistralConfig(num_hidden_layers=1, num_key_value_heads=1, head_dim=head_dim, sliding_window=None)
    plans = [windowkv.plan(config, tokens=8192, dtype=torch.bfloat16, kv_dtype=name) for name in (kv_dtype, None)]
    assert plans[0].total_bytes / plans[1].total_bytes <= most
    assert plans[0].total_bytes / (8192 * 2 * 2 * head_dim) <= most


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations returned and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage() if isinstance(out, Tensor) else None
        if storage is not None and storage.data_ptr() not in self.held:
            address = storage.data_ptr()
            self.held[address] = storage.nbytes()
            weakref.finalize(storage, self.held.pop, address, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens_read", [500, 5000])
def test_no_more_is_alive_while_a_prompt_is_packed_than_is_planned(kv_dtype: str, tokens_read: int) -> None:
    config = MODEL_OF["mistral-full"].config
    cache = DynamicSlidingWindowCache(config, kv_dtype=kv_dtype)
    with Alive() as alive, torch.no_grad():
        for i in range(len(cache.layers)):
            cache.update(*(torch.zeros(1, 2, tokens_read, 16) for _ in range(2)), i)
    planned = windowkv.plan(config, tokens=tokens_read, dtype=torch.float32, kv_dtype=kv_dtype)
    assert planned.total_bytes < alive.peak <= planned.peak_prefill_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gemma3", "llama4-chunk8", "gemma3n", "qwen3_next"])
def test_any_kind_of_layer_and_number_works_with_a_quantised_cache(name: str, dtype: torch.dtype) -> None:
    model = (MODELS | STATEFUL)[name]().to(dtype)
    ids, mask = left_padded([tokens(1, 200)[0], tokens(1, 150, seed=1)[0]])
    windowkv.enable(model, kv_dtype="int8", quantize="all")
    out = generated(model, ids, 12, mask)
    windowkv.disable(model)
    if dtype == torch.float32:  # the prompt sees itself as computed
        assert torch.equal(out[:, 0], generated(model, ids, 1, mask)[:, 0])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 20},
        {"prefill_chunk_size": 50},
    ],
)
@pytest.mark.parametrize("name", ["wide", "gemma3"])
def test_all_ways_of_generate_leave_the_bytes_that_are_planned(name: str, options: dict[str, Any]) -> None:
    model, prompt = copy.deepcopy(model_of(name)), tokens(1, 60).repeat(1, 4)
    windowkv.enable(model, kv_dtype="int4", quantize="all")
    torch.manual_seed(0)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=40,
        max_new_tokens=40,
        return_dict_in_generate=True,
        **{"do_sample": False} | options,
    )
    cache = next(value for value in output.values() if isinstance(value, DynamicSlidingWindowCache))
    drafted = options.get("prompt_lookup_num_tokens", 0)
    if drafted:  # what was accepted last may lie beyond the bound until something is taken back, or comes
        cache.crop(-1)
    least, most = (
        windowkv.plan(model.config, tokens=seen, batch_size=cache.rows, kv_dtype="int4", quantize="all").total_bytes
        for seen in (cache.get_seq_length(), cache.get_seq_length() + drafted)
    )
    assert least <= cache.nbytes <= most


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_that_is_held_serves_a_batch(kv_dtype: str) -> None:
    model = MODEL_OF["wide"]
    one, many = (DynamicSlidingWindowCache(model.config, kv_dtype=kv_dtype, quantize="all") for _ in range(2))
    prompt, more = tokens(1, 300), tokens(3, 80, seed=1)
    fed(model, one, prompt, 300)
    fed(model, many, prompt.repeat(3, 1), 300)
    torch.testing.assert_close(fed(model, one, more), fed(model, many, more), atol=1e-4, rtol=0)
    one.reorder_cache(torch.tensor([2, 0, 0]))
    many.reorder_cache(torch.tensor([2, 0, 0]))
    torch.testing.assert_close(fed(model, one, more), fed(model, many, more), atol=1e-4, rtol=0)
    assert one.nbytes == many.nbytes


@pytest.mark.parametrize("kv_dtype", [*KV_DTYPES, None])
def test_a_file_is_loaded_as_what_it_is(kv_dtype: str | None, tmp_path: Path) -> None:
    model, ids = MODEL_OF["wide"], tokens(2, 330)
    cache = DynamicSlidingWindowCache(model.config, kv_dtype=kv_dtype, quantize="all")
    fed(model, cache, ids[:, :300], 300)
    cache.save(tmp_path / "cache")
    for loaded in (
        windowkv.load(tmp_path / "cache", model.config),
        windowkv.load(tmp_path / "cache", model.config, kv_dtype=kv_dtype),
    ):
        assert loaded.quantisation == cache.quantisation
        assert torch.equal(fed(model, loaded, ids[:, 300:]), fed(model, cache.fork(), ids[:, 300:]))
    half = windowkv.load(tmp_path / "cache", model.config, dtype=torch.bfloat16, rollback=3)
    fed(copy.deepcopy(model).bfloat16(), half, ids[:, 300:])
    other = "fp8" if kv_dtype == "int8" else "int8"
    with pytest.raises(CacheFileError, match=f"kv_dtype={kv_dtype!r}.*{other!r}"):
        windowkv.load(tmp_path / "cache", model.config, kv_dtype=other)


@pytest.mark.parametrize(
    ("lie", "value"),
    [("kv_dtype", "int2"), ("kv_dtype", "int4"), ("kv_dtype", None), ("quantize", "full"), ("quantize", 3)],
)
def test_a_file_that_lies_about_its_codec_is_refused(lie: str, value: Any, tmp_path: Path) -> None:
    from windowkv import cache_file

    model = MODEL_OF["wide"]
    cache = DynamicSlidingWindowCache(model.config, kv_dtype="int8", quantize="all")
    fed(model, cache, tokens(1, 300), 300)
    cache.save(tmp_path / "cache")
    manifest, tensors = cache_file.read(tmp_path / "cache")
    cache_file.write(tmp_path / "lie", tensors, {**manifest, lie: value})
    with pytest.raises(CacheFileError, match="lie"):
        windowkv.load(tmp_path / "lie", model.config)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_dtype": "int2"}, "int2"),
        ({"kv_dtype": torch.int8}, "torch.int8"),
        ({"kv_dtype": ["int8"]}, "int8"),
        ({"kv_dtype": "int8", "quantize": "none"}, "none"),
        ({"kv_dtype": "int4"}, "head_dim=15"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    config = replace_head_dim(15)
    with pytest.raises(OptionError, match=named):
        DynamicSlidingWindowCache(config, **options)
    with pytest.raises(OptionError, match=named):
        windowkv.plan(config, tokens=10, **options)


def replace_head_dim(head_dim: int) -> Any:
    config = copy.deepcopy(shared_model("mistral-full").config)
    config.head_dim = head_dim
    return config


def test_a_narrow_window_stays_as_computed() -> None:
    cache = DynamicSlidingWindowCache(shared_model("gemma3").config, kv_dtype="int8", quantize="all")
    assert [type(layer.buffer).__name__ for layer in cache.layers] == ["Buffer"] * 3 + ["PackedBuffer"]
    assert replace(cache.quantisation, kv_dtype=None).packs(cache.layout.layers[3]) is False
