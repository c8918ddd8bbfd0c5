"""enable and disable: which cache one model object's `generate` makes and continues, and how that model attends.

Knows what of a model is changed, and changed back: that object's, never a class's or a global's.
"""

import logging
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin

from windowkv.attention_interface import base_name, fast_name, is_plain_decoder
from windowkv.cache import ROLLBACK
from windowkv.chunks import Chunk, checked_chunk
from windowkv.continuation import after_forward, before_forward
from windowkv.errors import OptionError, UnsupportedModelError
from windowkv.layout import keys_follow_length
from windowkv.prefix.store import PrefixStore
from windowkv.quantisation import Quantisation, check_unsaid
from windowkv.seams import (
    DRAFTS,
    FEEDS_PROMPT,
    GENERATES,
    LENGTH_STEP,
    MAKES_CACHE,
    CachePreparation,
    Drafting,
    Generating,
    GenerationOptions,
    Prefill,
)
from windowkv.static_cache import checked_length

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT")


def enable(
    model: ModelT,
    *,
    rollback: int = ROLLBACK,
    prefill_chunk: Chunk = "auto",
    attention: Literal["auto", "model"] = "auto",
    prefix_store: PrefixStore | None = None,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: Literal["dynamic", "static"] = "dynamic",
    max_cache_len: int | None = None,
    offload: bool = False,
) -> ModelT:
    """Make `DynamicSlidingWindowCache` the cache that `model.generate` makes when it is given none.

    Changes this one object, and returns it; enabling again replaces the options. A cache or a `cache_implementation`
    handed to `generate`, and `use_cache=False`, mean what they meant before; a `cache_implementation` that the model's
    own generation config names gives way, also where the same one is handed over. Wrappers (PEFT, torch.compile, models
    that generate by a language model inside) are looked through.

    A `DynamicSlidingWindowCache` that is used in `generate` remembers the ids that it has seen. When a later prompt
    differs from them, the cache goes back to where they agree, or starts anew where that is beyond `rollback`. Tokens
    that a cache was fed by hand before are taken to agree.

    Args:
        model: a transformers model with `generate`.
        rollback: how far back from the furthest position reached a cache can always go, in tokens.
        prefill_chunk: how many tokens of a prompt are read at a time. "auto" is 1,024 for decoders known to give the
            same result then, and 2,048 in bfloat16 on CPUs with matrix units (AMX); None is the whole prompt at once.
            Prompts with inputs that generate cannot split (images, embeddings), and the prompts of models with
            recurrent layers, are read at once.
        attention: "auto" computes only what each layer's window lets a query see, where that is known to give the
            model's own result, and otherwise does as "model", which leaves the model's attention as it is.
        prefix_store: where prompts of ids alone find what others had computed of their beginning, and leave what they
            compute, single texts with their continuation. Padding on the left is no hindrance in full and sliding
            layers.
        kv_dtype: as DynamicSlidingWindowCache.
        quantize: as DynamicSlidingWindowCache.
        cache: "static" makes a `SlidingWindowCache` for each `generate` instead, around which transformers compiles the
            model's forward where it does so for static caches (on accelerators); prompts are then read at once unless
            prefill_chunk says otherwise, ids are not remembered, and caches for assisted decoding stay dynamic.
        max_cache_len: the most tokens of a request with static caches, which are all made for that length, so that
            nothing is compiled twice; None is what a request or an earlier one needs, in steps of 256.
        offload: as DynamicSlidingWindowCache; not with static caches or a prefix store.

    Raises:
        UnsupportedModelError: the object has no `generate` of transformers.
        ConfigError, OptionError: as DynamicSlidingWindowCache, or an option has no such value, or the store serves
            another model; the model is unchanged.
    """
    target = _generating(model)
    static = _checked_static(target, cache, max_cache_len, prefix_store)
    if offload and (static or prefix_store is not None):
        raise OptionError('offload=True: neither with cache="static" nor with a prefix_store; use one of them')
    chunk = checked_chunk(prefill_chunk)
    if prefill_chunk == "auto" and (static or not is_plain_decoder(target) or keys_follow_length(target.config)):
        chunk = None
    quantisation = Quantisation(kv_dtype, quantize)
    if kv_dtype is None:
        check_unsaid(quantize)
    options = GenerationOptions(rollback, chunk, prefix_store, quantisation, static, max_cache_len, offload)
    if static and kv_dtype is not None:
        raise OptionError(f'kv_dtype={kv_dtype!r} with cache="static": static caches are not quantised')
    if attention not in ("auto", "model"):
        raise OptionError(f'attention={attention!r}: "auto" or "model"')
    # What cannot be served is said now, not while generating.
    example = options.new_cache(target.config, LENGTH_STEP)
    options = replace(options, offload=offload and example.offloaded)  # said once, not for every cache
    if prefix_store is not None:
        if not isinstance(prefix_store, PrefixStore):
            raise OptionError(f"prefix_store={prefix_store!r}: a windowkv.PrefixStore")
        prefix_store.bind(target, kv_dtype=kv_dtype, quantize=quantize, rollback=rollback)
    if not target._supports_default_dynamic_cache():
        logger.warning(
            "%s only works with a cache class of its own, which generate goes on using", type(target).__name__
        )
    disable(target)
    setattr(target, MAKES_CACHE, CachePreparation(target, options, _recording_hooks(target)))
    setattr(target, FEEDS_PROMPT, Prefill(target, options))
    setattr(target, DRAFTS, Drafting(target, options))
    if prefix_store is not None:
        setattr(target, GENERATES, Generating(target, options))
    if attention == "auto" and (fast := fast_name(target, example.layout)):
        _set_attention(target, fast)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable`: the object is as if it had never been enabled. Does nothing to a model that is not enabled."""
    target = _generating(model)
    preparation = vars(target).pop(MAKES_CACHE, None)
    if preparation is not None and preparation.belongs_to(target):  # else this is a shallow copy of another
        for hook in preparation.hooks:
            hook.remove()
    for seam in (FEEDS_PROMPT, DRAFTS, GENERATES):
        vars(target).pop(seam, None)
    _set_attention(target, base_name(_decoder_config(target)._attn_implementation))
    return model


def _decoder_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _set_attention(model: Any, name: str | None) -> None:
    # The public setter would change the attention of a vision or audio tower too.
    _decoder_config(model)._attn_implementation_internal = name


def _checked_static(model: Any, cache: Any, max_cache_len: int | None, prefix_store: PrefixStore | None) -> bool:
    """Whether caches are to be static. Raises OptionError for what does not go together with that."""
    if cache not in ("dynamic", "static"):
        raise OptionError(f'cache={cache!r}: "dynamic" or "static"')
    static = bool(cache == "static")
    if max_cache_len is not None:
        checked_length(max_cache_len)
        if not static:
            raise OptionError(f'max_cache_len={max_cache_len}: dynamic caches have no such length; use cache="static"')
    if static and prefix_store is not None:
        raise OptionError('prefix_store: what static caches hold is not stored; use cache="dynamic"')
    if static and model.config.is_encoder_decoder:
        raise OptionError(f'cache="static": {type(model).__name__} has an encoder; use cache="dynamic"')
    return static


def unwrapped(model: Any) -> Any:
    """The object whose `generate` runs, under the wrappers of PEFT, torch.compile, and models that delegate."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif _delegates(model):
            model = model.language_model
        else:
            return model


def _generating(model: Any) -> Any:
    """The unwrapped model. Raises UnsupportedModelError where it has no `generate` of transformers."""
    model = unwrapped(model)
    if not callable(getattr(type(model), MAKES_CACHE, None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no generate of transformers: pass the model that generates text, such as "
            "AutoModelForCausalLM.from_pretrained(...), or pipeline.model"
        )
    return model


def _delegates(model: Any) -> bool:
    """Whether generate is that of a language model inside, as in BLIP-2."""
    own = getattr(type(model), "generate", None) not in (None, GenerationMixin.generate)
    return own and isinstance(getattr(model, "language_model", None), GenerationMixin)


def _recording_hooks(model: Any) -> tuple[RemovableHandle, ...]:
    return (
        model.register_forward_pre_hook(before_forward, with_kwargs=True),
        model.register_forward_hook(after_forward, with_kwargs=True),
    )
