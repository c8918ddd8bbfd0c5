"""What a MemoryRecorder notes, against plans and against the storages of the caches themselves."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

import windowkv
from tiny import MODELS, STATEFUL, cache_argument, fed, generated, shared_model, tokens, uncached
from windowkv import MemoryRecorder, OptionError, UnsupportedModelError
from windowkv.cache import layers_nbytes, storage_nbytes
from windowkv.recording import Recording, Sample, read_recording

PROMPT, NEW = 150, 4


def watched(model: Any) -> list[Any]:
    """All that may be put onto a model."""
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    return [*hooks, vars(model).get("generate")]


def whole_forwards(recording: Recording) -> list[Sample]:
    return [sample for sample in recording.samples if sample.layer is None]


# -- values


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "llama4-chunk8"])
def test_an_enabled_model_holds_what_is_planned_kind_by_kind(name: str) -> None:
    model = MODELS[name]()
    windowkv.enable(model, prefill_chunk=None)
    with MemoryRecorder(model) as recorder:
        generated(model, tokens(1, PROMPT), NEW)
    forwards = whole_forwards(recorder)
    assert [sample.tokens for sample in forwards] == [PROMPT + i for i in range(NEW)]
    for sample in forwards:
        planned = windowkv.plan(model.config, tokens=sample.tokens)
        by_kind: dict[str, int] = {}
        for layer in planned.layers:
            by_kind[layer.kind] = by_kind.get(layer.kind, 0) + layer.nbytes
        assert sample.nbytes == {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}
        assert sample.total_bytes == planned.total_bytes
    assert recorder.peak_bytes == planned.total_bytes


def test_a_plain_model_holds_the_whole_prompt_until_the_next_token() -> None:
    model = shared_model("gemma3")
    with MemoryRecorder(model) as recorder:
        generated(model, tokens(2, PROMPT), NEW)
    first, second = whole_forwards(recorder)[:2]
    assert recorder.peak_bytes == first.total_bytes
    counters = 3 * 8  # in which transformers' sliding layers count, if they do
    whole = windowkv.plan(model.config, tokens=PROMPT, batch_size=2).baseline_bytes
    assert whole <= first.total_bytes <= whole + counters
    assert second.nbytes["sliding"] < first.nbytes["sliding"] / 2
    assert second.nbytes["full"] > first.nbytes["full"]


def test_layers_are_seen_one_after_the_other_while_a_prompt_is_read() -> None:
    model = shared_model("gemma3")
    with MemoryRecorder(model) as recorder:
        generated(model, tokens(1, PROMPT), NEW)
    layers = [sample for sample in recorder.samples if sample.layer is not None]
    assert [sample.layer for sample in layers] == [0, 1, 2, 3], "of the prompt alone"
    assert [sorted(sample.nbytes) for sample in layers] == [["sliding"]] * 3 + [["full", "sliding"]]
    each = layers[0].total_bytes
    assert [round(sample.nbytes["sliding"] / each) for sample in layers] == [1, 2, 3, 3]
    seconds = [sample.seconds for sample in recorder.samples]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.parametrize(
    "new_cache",
    [
        lambda config: DynamicCache(config=config),
        lambda config: DynamicCache(),
        lambda config: StaticCache(config, max_cache_len=64),
        lambda config: windowkv.DynamicSlidingWindowCache(config),
        lambda config: windowkv.DynamicSlidingWindowCache(config, kv_dtype="int8", rollback=4),
        lambda config: windowkv.SlidingWindowCache(config, 64),
    ],
)
def test_any_cache_that_is_fed_by_hand_is_counted_by_its_storages(new_cache: Any) -> None:
    model = shared_model("gemma3")
    cache, counted = new_cache(model.config), []
    with MemoryRecorder(model) as recorder:
        for part in tokens(1, 50).split([40, 9, 1], dim=1):
            fed(model, cache, part, part.shape[1])
            counted.append((cache.get_seq_length(), storage_nbytes(cache)))
    assert [(sample.tokens, sample.total_bytes) for sample in whole_forwards(recorder)] == counted
    assert set(recorder.kinds) == {"sliding", "full"}, "by the model's config"
    assert {sample.run for sample in recorder.samples} == {0}


def test_a_cache_that_the_forward_makes_itself_is_seen() -> None:
    model = shared_model("gemma3")
    with MemoryRecorder(model) as recorder, torch.no_grad():
        output = model(tokens(1, 30), use_cache=True)
    made = next(value for value in output.values() if isinstance(value, Cache))
    assert whole_forwards(recorder)[0].total_bytes == storage_nbytes(made)
    assert len(recorder.samples) == 5, "each layer, and the forward"


def test_states_of_recurrent_layers_are_a_kind_of_their_own() -> None:
    model = windowkv.enable(STATEFUL["qwen3_next"]())
    with MemoryRecorder(model) as recorder:
        generated(model, tokens(1, 30), NEW)
    *_, before, after = whole_forwards(recorder)
    assert before.nbytes["linear_attention"] == after.nbytes["linear_attention"] > 0
    assert before.nbytes["full"] == windowkv.plan(model.config, tokens=before.tokens).total_bytes


def test_an_encoder_decoder_has_what_the_encoder_saw_besides() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)).eval()
    with MemoryRecorder(model) as recorder:
        model.generate(tokens(1, 10) % 50, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    last = whole_forwards(recorder)[-1]
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
    assert last.nbytes == {"full": last.tokens * token, "cross_attention": 10 * token}


def test_storages_in_tuples_and_in_parts_of_quantised_tensors_count() -> None:
    class Quantised(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes"], None

    outer = torch.zeros(4).as_subclass(Quantised)
    outer.codes = torch.zeros(100, dtype=torch.int8)  # type: ignore[attr-defined]

    class Layer:
        def __init__(self) -> None:
            self.keys = (torch.zeros(10), {"scale": torch.zeros(3)})
            self.values = [outer, outer]

    assert layers_nbytes([Layer()]) == 40 + 12 + 100


# -- runs


def test_each_generate_is_a_run_also_with_one_cache() -> None:
    model = MODELS["gemma3"]()
    windowkv.enable(model)
    cache = windowkv.DynamicSlidingWindowCache(model.config)
    with MemoryRecorder(model) as recorder:
        text = tokens(1, 20)
        for _ in range(2):
            text = torch.cat((text, generated(model, text, NEW, **cache_argument(model, cache))), dim=1)
        generated(model, text, NEW)
    assert [[run[0].run, run[-1].tokens] for run in recorder.runs] == [[0, 23], [1, 27], [2, 31]]


def test_forwards_by_hand_are_a_run_for_each_cache() -> None:
    model = shared_model("mistral")
    with MemoryRecorder(model) as recorder:
        for length in (5, 9):
            fed(model, DynamicCache(config=model.config), tokens(1, length), 3)
        generated(model, tokens(1, 4), 2)
        fed(model, DynamicCache(config=model.config), tokens(1, 3), 3)
    assert [run[-1].tokens for run in recorder.runs] == [5, 9, 5, 3]


def test_a_recorder_can_go_on_and_is_not_entered_twice_at_once() -> None:
    model = shared_model("mistral")
    recorder = MemoryRecorder(model)
    for _ in range(2):
        with recorder:
            generated(model, tokens(1, 4), 2)
            with pytest.raises(OptionError, match="recording already"):
                recorder.__enter__()
    assert [len(whole_forwards(Recording(run))) for run in recorder.runs] == [2, 2]
    assert recorder.runs[0][-1].seconds < recorder.runs[1][0].seconds


# -- what it leaves, and what it leaves alone


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_nothing_stays_on_the_model_however_the_block_ends(enabled: bool, error: type[BaseException] | None) -> None:
    model = MODELS["gemma3"]()
    store = windowkv.PrefixStore(max_bytes=1 << 24)
    if enabled:
        windowkv.enable(model, prefix_store=store)
    before = watched(model)
    with expected(error), MemoryRecorder(model):
        generated(model, tokens(1, 20), 2)
        assert watched(model) != before
        if error:
            raise error
    assert watched(model) == before
    assert enabled == (store.stats.misses == 1), "the store served it while it was recorded"
    assert torch.equal(generated(model, tokens(1, 20), 8), uncached(model, tokens(1, 20), 8))


@contextmanager
def expected(error: type[BaseException] | None) -> Iterator[None]:
    if error is None:
        yield
        return
    with pytest.raises(error):
        yield


def test_an_error_in_the_middle_of_a_forward_leaves_nothing_and_begins_no_wrong_run() -> None:
    model = MODELS["gemma3"]()
    recorder, before = MemoryRecorder(model), watched(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), recorder:
        generated(model, tokens(1, 20), 2)
    hook.remove()
    assert watched(model) == before
    with recorder:
        generated(model, tokens(1, 20), 2)
    assert [run[-1].layer for run in recorder.runs] == [1, None]


def test_disabling_and_enabling_meanwhile_is_left_as_it_is() -> None:
    model = MODELS["gemma3"]()
    windowkv.enable(model, prefix_store=windowkv.PrefixStore(max_bytes=1 << 20))
    with MemoryRecorder(model):
        windowkv.disable(model)
    assert watched(model) == [None]
    with MemoryRecorder(model):
        windowkv.enable(model, prefix_store=windowkv.PrefixStore(max_bytes=1 << 20))
        ours = vars(model)["generate"]
    assert vars(model)["generate"] is ours


def test_neither_cache_nor_model_is_kept_alive() -> None:
    model = MODELS["mistral"]()
    cache = DynamicCache(config=model.config)
    gone = [weakref.ref(cache), weakref.ref(model)]
    recorder = MemoryRecorder(model)
    with recorder:
        fed(model, cache, tokens(1, 20), 20)
        keys = weakref.ref(cache.layers[0].keys)
        del cache
        gc.collect()
        assert keys() is None, "not even while it is recorded"
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert recorder.peak_bytes > 0
    with pytest.raises(OptionError, match="model is gone"):
        recorder.__enter__()


def test_a_compiled_forward_is_seen_as_a_whole_and_has_no_break() -> None:
    model = MODELS["mistral"]()
    plain = fed(model, DynamicCache(config=model.config), tokens(1, 6), 6)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = windowkv.DynamicSlidingWindowCache(model.config)
    with MemoryRecorder(model) as recorder:
        logits = fed(model, cache, tokens(1, 6), 6)
    torch._dynamo.reset()
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=0)
    (sample,) = recorder.samples
    assert (sample.tokens, sample.total_bytes) == (6, cache.nbytes)


def test_a_model_inside_a_wrapper_is_found() -> None:
    model = shared_model("mistral")
    with MemoryRecorder(torch.compile(model, backend="eager")) as recorder:
        generated(model, tokens(1, 4), 2)
    assert [sample.tokens for sample in whole_forwards(recorder)] == [4, 5]


def test_a_bare_decoder_is_recorded_too() -> None:
    decoder = shared_model("gemma3").model
    with MemoryRecorder(decoder) as recorder, torch.no_grad():
        decoder(tokens(1, 30), use_cache=True)
    assert len(whole_forwards(recorder)) == 1


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), lambda: "gemma", lambda: hf.ViTModel(tiny_vit())])
def test_what_takes_no_cache_is_refused(make: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="takes no cache"):
        MemoryRecorder(make())


def tiny_vit() -> Any:
    return hf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)


def test_a_run_without_a_cache_is_nothing_to_draw() -> None:
    model = shared_model("mistral")
    with MemoryRecorder(model) as recorder:
        uncached(model, tokens(1, 5), 2)
    assert recorder.samples == ()
    assert recorder.peak_bytes == 0
    with pytest.raises(OptionError, match="nothing was recorded"):
        recorder.plot()


# -- pictures and files


def test_it_draws_itself_and_comes_back_from_its_file(tmp_path: Path) -> None:
    model = shared_model("gemma3")
    with MemoryRecorder(model) as recorder:
        generated(model, tokens(1, 20), 2)
    recorder.write(tmp_path / "a.json")
    read = read_recording(tmp_path / "a.json")
    assert read.samples == recorder.samples
    (axes,) = recorder.plot().axes
    drawn = next(line for line in axes.lines if line.get_label() == "all")
    assert [*drawn.get_xdata()] == [sample.seconds for sample in read.samples]
    assert [1024 * kib for kib in drawn.get_ydata()] == [sample.total_bytes for sample in read.samples]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"samples": [{"run": 0}]}', '{"samples": 3}', '{"samples": [1]}'])
def test_another_file_is_no_recording(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(OptionError, match=r"a\.json is no recording"):
        read_recording(tmp_path / "a.json")


@pytest.mark.parametrize("enabled", [False, True])
def test_a_copy_that_is_made_meanwhile_is_a_model_of_its_own(enabled: bool) -> None:
    model, ids = MODELS["gemma3"](), tokens(1, 20)
    if enabled:
        windowkv.enable(model, prefix_store=windowkv.PrefixStore(1 << 20))
    with MemoryRecorder(model) as recorder:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        with torch.no_grad():
            twin.lm_head.weight.mul_(-1)
        plain = MODELS["gemma3"]()
        with torch.no_grad():
            plain.lm_head.weight.mul_(-1)
        assert torch.equal(generated(twin, ids, 5), uncached(plain, ids, 5))
    assert recorder.samples == ()


def test_recorders_of_one_model_may_end_in_any_order() -> None:
    model, ids = MODELS["gemma3"](), tokens(1, 20)
    before = watched(model)
    first, second, third = (MemoryRecorder(model) for _ in range(3))
    for recorder in (first, second, third):
        recorder.__enter__()
    first.__exit__(None, None, None)
    generated(model, ids, 2)
    third.__exit__(None, None, None)
    generated(model, ids, 2)
    second.__exit__(None, None, None)
    assert watched(model) == before
    runs = [{sample.run for sample in recorder.samples} for recorder in (first, second, third)]
    assert runs == [set(), {0, 1}, {0}]
