"""enable and disable: one object changes, nothing else, and it goes on being the model that it was."""

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from transformers import DynamicCache, StaticCache

import windowkv
from tiny import MODELS, WINDOW, cache_argument, generated, tokens, uncached
from windowkv import DynamicSlidingWindowCache, OptionError, UnsupportedModelError, chunks


def cache_of(model: Any, ids: Any = None, **options: Any) -> Any:
    """The cache that generate ends with, under either name."""
    ids = tokens(1, 3 * WINDOW) if ids is None else ids
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, return_dict_in_generate=True, **options
    )
    return getattr(out, "cache", None) or getattr(out, "past_key_values", None)


@pytest.fixture
def model() -> Any:
    return MODELS["gemma3"]()


def test_generate_makes_our_cache_by_default(model: Any) -> None:
    ids = tokens(2, 30)
    assert windowkv.enable(model, rollback=5) is model
    assert torch.equal(generated(model, ids, 20), uncached(model, ids, 20))
    cache = cache_of(model)
    assert type(cache) is DynamicSlidingWindowCache
    assert cache.layers[0].buffer.retention.rollback == 5


def test_disable_leaves_no_trace(model: Any) -> None:
    before = dict(vars(model))
    windowkv.enable(model)
    assert windowkv.disable(model) is model
    with pytest.raises(OptionError, match="quantize='all' without kv_dtype"):
        windowkv.enable(model, quantize="all")
    assert vars(model) == before
    assert type(cache_of(model)) is DynamicCache


def test_both_are_idempotent_and_the_last_options_count(model: Any) -> None:
    before = dict(vars(model))
    windowkv.disable(windowkv.disable(model))
    windowkv.enable(windowkv.enable(model, rollback=3), rollback=7)
    assert cache_of(model).layers[0].buffer.retention.rollback == 7
    windowkv.disable(model)
    assert vars(model) == before


def test_one_object_is_enabled_and_no_other(model: Any) -> None:
    other, seam = MODELS["gemma3"](), hf.GenerationMixin._prepare_cache_for_generation
    windowkv.enable(model)
    assert hf.GenerationMixin._prepare_cache_for_generation is seam
    assert type(cache_of(other)) is DynamicCache


def test_a_cache_that_is_handed_over_is_used(model: Any) -> None:
    windowkv.enable(model)
    theirs = DynamicCache(config=model.config)
    assert cache_of(model, **cache_argument(model, theirs)) is theirs
    assert type(cache_of(model, cache_implementation="static")) is StaticCache
    assert type(cache_of(model, cache_implementation="dynamic")) is DynamicCache
    assert cache_of(model, use_cache=False) is None


def test_a_forward_without_a_cache_is_as_before(model: Any) -> None:
    windowkv.enable(model)
    ids = tokens(1, 20)
    out = model(ids, use_cache=True)
    assert type(getattr(out, "cache", None) or out.past_key_values) is DynamicCache


def test_the_implementation_in_a_checkpoints_generation_config_gives_way(model: Any) -> None:
    model.generation_config.cache_implementation = "static"
    windowkv.enable(model)
    assert type(cache_of(model)) is DynamicSlidingWindowCache
    assert model.generation_config.cache_implementation == "static"
    assert type(cache_of(windowkv.disable(model))) is StaticCache


@pytest.mark.parametrize("rollback", [-1, "many"])
def test_a_bad_option_leaves_the_model_as_it_was(model: Any, rollback: Any) -> None:
    before = dict(vars(model))
    with pytest.raises(OptionError, match="rollback"):
        windowkv.enable(model, rollback=rollback)
    assert vars(model) == before


@pytest.mark.parametrize(
    "thing", [None, "mistral", torch.nn.Linear(2, 2), hf.BertModel(hf.BertConfig(num_hidden_layers=1, hidden_size=24))]
)
def test_what_cannot_generate_is_refused_by_name(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=type(thing).__name__):
        windowkv.enable(thing)
    with pytest.raises(UnsupportedModelError, match=type(thing).__name__):
        windowkv.disable(thing)


def test_the_part_without_generate_names_the_whole() -> None:
    whole = MODELS["gemma3"]()
    with pytest.raises(UnsupportedModelError, match="the model that generates text"):
        windowkv.enable(whole.model)


def openai_gpt() -> Any:
    torch.manual_seed(0)
    config = hf.OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3)
    return hf.OpenAIGPTLMHeadModel(config).eval()


def paligemma() -> Any:
    torch.manual_seed(0)
    text = {
        "model_type": "gemma",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=127, projection_dim=32)
    return hf.PaliGemmaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("build", [openai_gpt, paligemma])
def test_prompts_that_cannot_be_read_in_chunks_are_not(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SMALL", 8)
    ids = tokens(2, 30) % 100 + 3
    expected = generated(build(), ids, 8)
    assert torch.equal(generated(windowkv.enable(build()), ids, 8), expected)


def through_deepcopy(model: Any) -> Any:
    return copy.deepcopy(model)


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [through_deepcopy, through_pickle, through_torch_save])
def test_a_copy_is_enabled_on_its_own(model: Any, through: Any) -> None:
    windowkv.enable(model, rollback=9)
    twin = through(model)
    windowkv.disable(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # whatever of the copy still points at the original gives itself away
    ids = tokens(1, 30)
    assert torch.equal(generated(twin, ids, 20), uncached(twin, ids, 20))
    assert cache_of(twin).layers[0].buffer.retention.rollback == 9
    assert type(cache_of(windowkv.disable(twin))) is DynamicCache


def test_save_pretrained_writes_what_it_wrote_before(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "before")
    windowkv.enable(model).save_pretrained(tmp_path / "after")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert {file.name for file in (tmp_path / "before").iterdir()} == {
        file.name for file in (tmp_path / "after").iterdir()
    }


def test_an_enabled_model_can_be_wrapped_by_peft(model: Any) -> None:
    windowkv.enable(model)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    ids = tokens(1, 30)
    assert torch.equal(generated(wrapped, ids, 20), uncached(wrapped, ids, 20))
    assert type(cache_of(wrapped)) is DynamicSlidingWindowCache


def test_a_peft_model_can_be_enabled(model: Any) -> None:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()
    assert windowkv.enable(wrapped) is wrapped
    assert type(cache_of(wrapped)) is DynamicSlidingWindowCache
    assert type(cache_of(windowkv.disable(wrapped))) is DynamicCache


def test_an_enabled_model_can_have_its_forward_compiled(model: Any) -> None:
    ids = tokens(1, 30)
    expected = uncached(model, ids, 20)
    windowkv.enable(model)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(generated(model, ids, 20), expected)


def test_a_compiled_model_can_be_enabled(model: Any) -> None:
    ids = tokens(1, 30)
    expected = uncached(model, ids, 20)
    compiled = torch.compile(model, backend="eager")
    assert windowkv.enable(compiled) is compiled
    assert torch.equal(generated(compiled, ids, 20), expected)
    assert type(cache_of(compiled)) is DynamicSlidingWindowCache


def test_an_enabled_model_moves_and_changes_dtype(model: Any) -> None:
    windowkv.enable(model).to(torch.bfloat16)
    assert cache_of(model).layers[0].keys.dtype == torch.bfloat16
    assert cache_of(model.to(torch.float32)).layers[0].keys.dtype == torch.float32


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def test_a_model_inside_a_pipeline(model: Any) -> None:
    pipe = hf.pipeline("text-generation", model=model, tokenizer=word_tokenizer(), device="cpu")
    prompt = " ".join(f"w{i}" for i in range(3, 33))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = pipe(prompt, use_cache=False, **options)
    made = []
    windowkv.enable(pipe.model)
    forward = pipe.model.forward

    def watching(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs.get("cache", kwargs.get("past_key_values")))
        return forward(*args, **kwargs)

    pipe.model.forward = watching
    assert pipe(prompt, **options) == expected
    assert type(made[0]) is DynamicSlidingWindowCache


def multimodal() -> Any:
    torch.manual_seed(0)
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {
        "head_dim": 16,
        "vocab_size": 128,
        "sliding_window": WINDOW,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    text |= {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    )
    config.eos_token_id = None
    return hf.Gemma3ForConditionalGeneration(config).eval()


def test_the_text_part_of_a_multimodal_model() -> None:
    model, ids = multimodal(), tokens(2, 30).clamp(max=119)
    expected = uncached(model, ids, 12)
    windowkv.enable(model)
    assert torch.equal(generated(model, ids, 12), expected)
    cache = cache_of(model, ids)
    assert [spec.window for spec in cache.layout.layers] == [WINDOW] * 3 + [None]


def test_images_whose_tokens_see_each_other_across_the_window() -> None:
    model = multimodal()
    text = tokens(1, 30).clamp(max=119)
    image = torch.tensor([[121, *[120] * 4, 122]])
    ids = torch.cat((text[:, :12], image, text[:, 12:]), dim=1)
    extra = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 120).long()}
    theirs = generated(model, ids, 12, **extra)
    assert torch.equal(generated(windowkv.enable(model), ids, 12, **extra), theirs)


def test_an_encoder_decoder_gets_a_bounded_self_attention_cache() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 16,
        "vocab_size": 128,
        "sliding_window": WINDOW,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    module = hf.T5GemmaModuleConfig(**sizes)
    config = hf.T5GemmaConfig(
        encoder=module.to_dict(),
        decoder=module.to_dict(),
        vocab_size=128,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    model = hf.T5GemmaForConditionalGeneration(config).eval()
    model.generation_config.decoder_start_token_id = 1
    ids = tokens(1, 20)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    out = windowkv.enable(model).generate(ids, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    cache = getattr(out, "cache", None) or out.past_key_values
    assert type(cache.self_attention_cache) is DynamicSlidingWindowCache
    assert type(cache.cross_attention_cache) is DynamicCache


def test_an_assistant_that_is_enabled_too(model: Any) -> None:
    ids = tokens(1, 30)
    expected = uncached(model, ids, 30)
    windowkv.enable(model)
    assistant = windowkv.enable(MODELS["mistral"]())
    assert torch.equal(generated(model, ids, 30, assistant_model=assistant), expected)


def test_a_model_with_a_cache_class_of_its_own_goes_on_working(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = hf.MiniMaxConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
        eos_token_id=None,
    )
    model, ids = hf.MiniMaxForCausalLM(config).eval(), tokens(1, 20)
    expected = generated(model, ids, 8)
    windowkv.enable(model)
    assert "MiniMaxForCausalLM only works with a cache class of its own" in caplog.text
    assert torch.equal(generated(model, ids, 8), expected)


def test_an_enabled_model_is_freed_with_its_last_reference(model: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        twin = windowkv.enable(copy.deepcopy(model))
        freed = weakref.ref(twin)
        del twin
        assert freed() is None
    finally:
        gc.enable()


def test_a_shallow_copy_that_outlives_the_model_says_so(model: Any) -> None:
    twin = copy.copy(windowkv.enable(copy.deepcopy(model)))
    gc.collect()
    with pytest.raises(UnsupportedModelError, match="shallow copy"):
        generated(twin, tokens(1, 5), 2)
    assert generated(windowkv.enable(twin), tokens(1, 5), 2).shape == (1, 2)


def test_a_model_whose_generate_is_that_of_a_model_inside_is_looked_through() -> None:
    text = MODELS["mistral"]().config
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Blip2Config(
        vision_config=small | {"image_size": 16, "patch_size": 8},
        qformer_config=small | {"vocab_size": 8, "encoder_hidden_size": 16},
        text_config=text.to_dict(),
        num_query_tokens=2,
    )
    whole = windowkv.enable(hf.Blip2ForConditionalGeneration(config))
    assert type(cache_of(whole.language_model)) is DynamicSlidingWindowCache
    windowkv.disable(whole)
    assert type(cache_of(whole.language_model)) is DynamicCache
