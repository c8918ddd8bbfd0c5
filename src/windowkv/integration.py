"""enable and disable: which cache one model object's `generate` makes and continues, and how that model attends.

Knows the seams in `generate`: where a cache is made, and where a prompt is fed. Touches that model object, never a
class or a global.
"""

import copy
import logging
import weakref
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.generation import GenerationMode

from windowkv.attention_interface import base_name, fast_name, is_plain_decoder
from windowkv.cache import ROLLBACK, DynamicSlidingWindowCache
from windowkv.continuation import (
    CACHE_NAMES,
    TEXT_INPUTS,
    after_forward,
    align,
    before_forward,
    check_continuable,
    handed_cache,
    start_anew,
    start_recording,
)
from windowkv.errors import InputError, OptionError, UnsupportedModelError
from windowkv.layout import BIDIRECTIONAL_PROMPT, difference, keys_follow_length, read_layout
from windowkv.prefix.prompt import Feed, feed_through, leaving_ends, stored_texts
from windowkv.prefix.store import PrefixStore
from windowkv.quantisation import Quantisation
from windowkv.static_cache import SlidingWindowCache, checked_length

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT")
OurCache = DynamicSlidingWindowCache | SlidingWindowCache

_MAKES_CACHE, _FEEDS_PROMPT, _DRAFTS = "_prepare_cache_for_generation", "_prefill", "_get_candidate_generator"
_GENERATES = "generate"
# Tokens of a prompt that are read in one forward. Of 512, 1,024 and 2,048, which differ by a tenth in time, the largest
# that takes no more memory than transformers does with the chunk that is best for it (Gemma 3 270M, 8k and 16k tokens).
PREFILL_CHUNK = 1024
_CHUNKS_AFTER_A_PAST = Version(transformers.__version__) >= Version(
    "5.23"
)  # before, chunks repeat what a cache has seen
# Static caches are made for multiples of so many tokens: another length is another graph.
_LENGTH_STEP = 256


@dataclass(frozen=True)
class GenerationOptions:
    """What `generate` of an enabled model does differently."""

    rollback: int
    prefill_chunk: int | None
    prefix_store: PrefixStore | None
    quantisation: Quantisation
    static: bool
    max_cache_len: int | None

    def new_cache(self, config: Any, length: int, *, drafts: bool = False) -> OurCache:
        """An empty cache for a model with this config, static ones for that many tokens.

        A draft may be longer than what a static cache can take back.
        """
        if self.static and not drafts:
            return SlidingWindowCache(config, length, rollback=self.rollback)
        return DynamicSlidingWindowCache(config, self.rollback, **asdict(self.quantisation))


def enable(
    model: ModelT,
    *,
    rollback: int = ROLLBACK,
    prefill_chunk: int | Literal["auto"] | None = "auto",
    attention: Literal["auto", "model"] = "auto",
    prefix_store: PrefixStore | None = None,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: Literal["dynamic", "static"] = "dynamic",
    max_cache_len: int | None = None,
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
        prefill_chunk: how many tokens of a prompt are read at a time; "auto" is 1,024 for decoders known to give the
            same result then, and None the whole prompt at once. Prompts with inputs that generate cannot split
            (images, embeddings), and the prompts of models with recurrent layers, are read at once.
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

    Raises:
        UnsupportedModelError: the object has no `generate` of transformers.
        ConfigError, OptionError: as DynamicSlidingWindowCache, or an option has no such value, or the store serves
            another model; the model is unchanged.
    """
    target = _generating(model)
    static = _checked_static(target, cache, max_cache_len, prefix_store)
    chunk = _checked_chunk(prefill_chunk)
    if prefill_chunk == "auto" and (static or not is_plain_decoder(target) or keys_follow_length(target.config)):
        chunk = None
    options = GenerationOptions(rollback, chunk, prefix_store, Quantisation(kv_dtype, quantize), static, max_cache_len)
    if static and kv_dtype is not None:
        raise OptionError(f'kv_dtype={kv_dtype!r} with cache="static": static caches are not quantised')
    if attention not in ("auto", "model"):
        raise OptionError(f'attention={attention!r}: "auto" or "model"')
    # What cannot be served is said now, not while generating.
    layout = options.new_cache(target.config, _LENGTH_STEP).layout
    if prefix_store is not None:
        if not isinstance(prefix_store, PrefixStore):
            raise OptionError(f"prefix_store={prefix_store!r}: a windowkv.PrefixStore")
        if options.quantisation.kv_dtype is not None:
            raise OptionError(f"kv_dtype={kv_dtype!r} and a prefix_store: a store serves caches without kv_dtype")
        prefix_store.bind(target)
    if not target._supports_default_dynamic_cache():
        logger.warning(
            "%s only works with a cache class of its own, which generate goes on using", type(target).__name__
        )
    disable(target)
    setattr(target, _MAKES_CACHE, _CachePreparation(target, options, _recording_hooks(target)))
    setattr(target, _FEEDS_PROMPT, _Prefill(target, options))
    setattr(target, _DRAFTS, _Drafting(target, options))
    if prefix_store is not None:
        setattr(target, _GENERATES, _Generating(target, options))
    if attention == "auto" and (fast := fast_name(target, layout)):
        _set_attention(target, fast)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable`: the object is as if it had never been enabled. Does nothing to a model that is not enabled."""
    target = _generating(model)
    preparation = vars(target).pop(_MAKES_CACHE, None)
    if preparation is not None and preparation.belongs_to(target):  # else this is a shallow copy of another
        for hook in preparation.hooks:
            hook.remove()
    for seam in (_FEEDS_PROMPT, _DRAFTS, _GENERATES):
        vars(target).pop(seam, None)
    _set_attention(target, base_name(_decoder_config(target)._attn_implementation))
    return model


def _decoder_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _set_attention(model: Any, name: str | None) -> None:
    # The public setter would change the attention of a vision or audio tower too.
    _decoder_config(model)._attn_implementation_internal = name


def _checked_chunk(prefill_chunk: Any) -> int | None:
    if prefill_chunk == "auto":
        return PREFILL_CHUNK
    if prefill_chunk is None or (isinstance(prefill_chunk, int) and prefill_chunk is not True and prefill_chunk > 0):
        return prefill_chunk
    raise OptionError(f'prefill_chunk={prefill_chunk!r}: a number of tokens >= 1, "auto", or None for no chunks')


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


def _generating(model: Any) -> Any:
    """The object whose `generate` runs, under the wrappers of PEFT and torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif _delegates(model):
            model = model.language_model
        else:
            break
    if not callable(getattr(type(model), _MAKES_CACHE, None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no generate of transformers: pass the model that generates text, such as "
            "AutoModelForCausalLM.from_pretrained(...), or pipeline.model"
        )
    return model


def _delegates(model: Any) -> bool:
    """Whether generate is that of a language model inside, as in BLIP-2."""
    own = getattr(type(model), "generate", None) not in (None, GenerationMixin.generate)
    return own and isinstance(getattr(model, "language_model", None), GenerationMixin)


class _Seam:
    """What stands on an enabled model in place of one of its methods.

    Not a bound method and no subclass: it follows the model through deepcopy and pickle. It refers to the model weakly,
    so that an enabled model is freed as soon as nobody has it any more.
    """

    def __init__(self, model: Any, options: GenerationOptions, hooks: tuple[RemovableHandle, ...] = ()) -> None:
        self.__setstate__((model, options, hooks))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.model, self.options, self.hooks

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._model, self.options, self.hooks = weakref.ref(state[0]), state[1], state[2]

    def belongs_to(self, model: Any) -> bool:
        """Whether it was made for that object, not for one that it is a shallow copy of."""
        return self._model() is model

    @property
    def model(self) -> Any:
        model = self._model()
        if model is None:
            raise UnsupportedModelError("a shallow copy of an enabled model outlived it: enable the copy itself")
        return model


class _CachePreparation(_Seam):
    """Which cache generate uses, and that it remembers what it is fed."""

    longest: int = 0  # static caches so far: a shorter one would be compiled anew

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        **kwargs: Any,
    ) -> None:
        """Let transformers decide whether a cache is made, and put ours in the place of a new dynamic one."""
        model, options = self.model, self.options
        args = (generation_mode, batch_size, max_cache_length)
        prepare = partial(getattr(type(model), _MAKES_CACHE), model)
        handed = handed_cache(model_kwargs)
        if handed is not None or generation_config.cache_implementation != model.generation_config.cache_implementation:
            prepare(generation_config, model_kwargs, *args, **kwargs)
        else:
            without_default = copy.copy(generation_config)
            without_default.cache_implementation = None
            prepare(without_default, model_kwargs, *args, **kwargs)
            drafts = generation_config.is_assistant
            drafted = drafts or generation_mode == GenerationMode.ASSISTED_GENERATION
            ours = options.new_cache(model.config, self._length(max_cache_length), drafts=drafted)
            _replace_caches(model_kwargs, ours, drafts=drafts)
        cache = handed_cache(model_kwargs)
        if isinstance(cache, OurCache) and _is_causal(model):
            _check_layout(cache, model.config)
        if isinstance(cache, SlidingWindowCache):
            cache.check_fits(max_cache_length)
        elif isinstance(cache, DynamicSlidingWindowCache) and _is_causal(model):
            start_recording(cache)

    def _length(self, needed: int) -> int:
        """Tokens that a static cache is made for, when a request needs some."""
        given: int | None = self.options.max_cache_len
        if given is not None:
            return given
        length = -(-max(needed, 1) // _LENGTH_STEP) * _LENGTH_STEP
        self.longest = max(self.longest, length)
        return self.longest


class _Prefill(_Seam):
    """How generate feeds a prompt: what of it the cache has not seen yet, in chunks."""

    def __call__(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Let transformers feed what is left of the prompt once the cache is brought back to where they agree."""
        model, cache = self.model, handed_cache(model_kwargs)
        if isinstance(cache, DynamicSlidingWindowCache):
            if not generation_config.is_assistant:
                cache.deactivate_past_recording()
            if _is_causal(model):
                _bring_to(cache, input_ids, generation_config, model_kwargs)
        elif isinstance(cache, SlidingWindowCache) and _told(generation_config, model_kwargs) != input_ids.shape[1]:
            cache.check_fits(cache.get_seq_length() + generation_config.max_length - 1)
        # This is generate's own copy of the config, made for one call.
        if generation_config.prefill_chunk_size is None and _can_be_chunked(model, model_kwargs):
            generation_config.prefill_chunk_size = self.options.prefill_chunk
        feed = partial(_feed, partial(getattr(type(model), _FEEDS_PROMPT), model, **kwargs))
        store = self.options.prefix_store
        texts = None
        if store is not None and not generation_config.is_assistant:
            texts = stored_texts(model, cache, input_ids, model_kwargs)
        if store is None or texts is None:
            return feed(input_ids, generation_config, model_kwargs)
        store.follow(model)  # a copy of a model has a store of its own
        return feed_through(store, texts, feed, input_ids, generation_config, model_kwargs)


class _Generating(_Seam):
    """What is left in a store when generate is done; stands there only where there is a store."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, and leave where the text ends."""
        model, store = self.model, self.options.prefix_store
        store.follow(model)
        with leaving_ends(store):
            return getattr(type(model), _GENERATES)(model, *args, **kwargs)


class _Drafting(_Seam):
    """Where assisted decoding begins."""

    def __call__(
        self,
        generation_config: Any,
        input_ids: Tensor,
        inputs_tensor: Any,
        logits_processor: Any,
        model_kwargs: Any,
        **kwargs: Any,
    ) -> Any:
        """Empty the cache when the whole prompt will be fed, and let transformers choose who drafts."""
        model, cache = self.model, handed_cache(model_kwargs)
        if isinstance(cache, DynamicSlidingWindowCache) and not model.config.is_encoder_decoder:
            told = _told(generation_config, model_kwargs)
            if told == input_ids.shape[1]:
                start_anew(cache)
            else:
                check_continuable(cache, input_ids, told)
        elif isinstance(cache, SlidingWindowCache) and _told(generation_config, model_kwargs) == input_ids.shape[1]:
            cache.reset()  # the whole prompt is about to be fed
        choose = getattr(type(model), _DRAFTS)
        drafter = choose(model, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, **kwargs)
        if isinstance(cache, DynamicSlidingWindowCache):
            weakref.finalize(drafter, _end_drafts, weakref.ref(cache))  # it lives as long as generate drafts
        return drafter


def _bring_to(
    cache: DynamicSlidingWindowCache, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Make a cache one that a prompt continues."""
    told = _told(generation_config, model_kwargs)
    if model_kwargs.get("inputs_embeds") is not None:
        check_continuable(cache, input_ids)
    elif told != input_ids.shape[1]:
        check_continuable(cache, input_ids, told)
    else:
        align(cache, input_ids, model_kwargs.get("attention_mask"))


def _end_drafts(drafted: "weakref.ref[DynamicSlidingWindowCache]") -> None:
    if (cache := drafted()) is not None:
        cache.deactivate_past_recording()


def _is_causal(model: Any) -> bool:
    """Whether what a token leaves in a cache depends on ids before it alone."""
    return not model.config.is_encoder_decoder and model.config.model_type not in BIDIRECTIONAL_PROMPT


def _told(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Of how many tokens the attention mask tells; None without one.

    As transformers has it: when that is as many as the ids are, these are the whole text, and else new tokens only. It
    drops a mask of ones, and remembers its width.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return getattr(generation_config, "_mask_length", None)
    return int(mask.shape[1]) if mask.ndim == 2 else None


def _check_layout(cache: OurCache, config: Any) -> None:
    unlike = difference(cache.layout, read_layout(config))
    if unlike:
        raise InputError(f"this cache is for another model: {unlike}")


def _feed(feed: Feed, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Feed a prompt at once where transformers would feed what the cache has seen again, chunk by chunk."""
    cache = handed_cache(model_kwargs)
    ours = isinstance(cache, DynamicSlidingWindowCache) and cache.history is not None
    if ours and cache.get_seq_length() and not _CHUNKS_AFTER_A_PAST:
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
    return feed(input_ids, generation_config, model_kwargs)


def _recording_hooks(model: Any) -> tuple[RemovableHandle, ...]:
    return (
        model.register_forward_pre_hook(before_forward, with_kwargs=True),
        model.register_forward_hook(after_forward, with_kwargs=True),
    )


def _replace_caches(model_kwargs: dict[str, Any], ours: OurCache, *, drafts: bool) -> None:
    """Ours in the place of a plain dynamic cache; transformers' own of any other kind."""
    if drafts and isinstance(ours, DynamicSlidingWindowCache):
        ours.activate_past_recording(drafts=True)
    for name in CACHE_NAMES:
        cache: Any = model_kwargs.get(name)
        if type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache:
            cache.self_attention_cache = ours
        elif type(cache) is DynamicCache:
            model_kwargs[name] = ours


def _can_be_chunked(model: Any, model_kwargs: dict[str, Any]) -> bool:
    cache = handed_cache(model_kwargs)
    if not isinstance(cache, OurCache) or model.config.is_encoder_decoder:
        return False
    if cache.layout.foreign:  # several models compute something else when tokens come on top of a recurrent state
        return False
    tensors = {name for name, value in model_kwargs.items() if isinstance(value, Tensor)}
    return tensors <= TEXT_INPUTS  # it splits these by chunk, and may not know how to split others
