"""What stands on an enabled model in place of its methods: where generate makes a cache, feeds a prompt and drafts.

Knows these seams in `generate`. Knows nothing of how they come onto a model.
"""

import copy
import weakref
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMode

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.chunks import Chunk, chunk_tokens
from windowkv.continuation import (
    CACHE_NAMES,
    TEXT_INPUTS,
    align,
    check_continuable,
    handed_cache,
    start_anew,
    start_recording,
)
from windowkv.errors import InputError, UnsupportedModelError
from windowkv.layout import BIDIRECTIONAL_PROMPT, difference, read_layout
from windowkv.prefix.prompt import Feed, feed_through, leaving_ends, stored_texts
from windowkv.prefix.store import PrefixStore
from windowkv.quantisation import Form, Quantisation
from windowkv.static_cache import SlidingWindowCache

OurCache = DynamicSlidingWindowCache | SlidingWindowCache

# The methods of a model that are stood in for.
MAKES_CACHE, FEEDS_PROMPT, DRAFTS = "_prepare_cache_for_generation", "_prefill", "_get_candidate_generator"
GENERATES = "generate"
_CHUNKS_AFTER_A_PAST = Version(transformers.__version__) >= Version(
    "5.23"
)  # before, chunks repeat what a cache has seen
# Static caches are made for multiples of so many tokens: another length is another graph.
LENGTH_STEP = 256
_DRAFTERS: "weakref.WeakKeyDictionary[DynamicSlidingWindowCache, Any]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GenerationOptions:
    """What `generate` of an enabled model does differently."""

    rollback: int
    prefill_chunk: Chunk
    prefix_store: PrefixStore | None
    quantisation: Quantisation
    static: bool
    max_cache_len: int | None
    offload: bool

    @property
    def form(self) -> Form:
        """How its dynamic caches store tokens."""
        return self.quantisation.form(self.rollback)

    def new_cache(self, config: Any, length: int, *, drafts: bool = False) -> OurCache:
        """An empty cache for a model with this config, static ones for that many tokens.

        A draft may be longer than what a static cache can take back.
        """
        if self.static and not drafts:
            return SlidingWindowCache(config, length, rollback=self.rollback)
        return DynamicSlidingWindowCache(config, self.rollback, **asdict(self.quantisation), offload=self.offload)


class Seam:
    """What stands on an enabled model in place of one of its methods.

    Not a bound method and no subclass: it follows the model through deepcopy and pickle. It refers to the model weakly,
    so that an enabled model is freed as soon as nobody has it any more.
    """

    def __init__(self, model: Any, options: GenerationOptions, hooks: tuple[RemovableHandle, ...] = ()) -> None:
        """Stand on a model, with the hooks that were put there besides."""
        self.__setstate__((model, options, hooks))

    def __getstate__(self) -> tuple[Any, ...]:
        """The model itself, which a copy refers to weakly again."""
        return self.model, self.options, self.hooks

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """See `__getstate__`."""
        self._model, self.options, self.hooks = weakref.ref(state[0]), state[1], state[2]

    def belongs_to(self, model: Any) -> bool:
        """Whether it was made for that object, not for one that it is a shallow copy of."""
        return self._model() is model

    @property
    def model(self) -> Any:
        """The model on which it stands. Raises UnsupportedModelError when that is gone."""
        model = self._model()
        if model is None:
            raise UnsupportedModelError("a shallow copy of an enabled model outlived it: enable the copy itself")
        return model


class CachePreparation(Seam):
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
        prepare = partial(getattr(type(model), MAKES_CACHE), model)
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
        length = -(-max(needed, 1) // LENGTH_STEP) * LENGTH_STEP
        self.longest = max(self.longest, length)
        return self.longest


class Prefill(Seam):
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
            generation_config.prefill_chunk_size = chunk_tokens(self.options.prefill_chunk, model)
        feed = partial(_feed, partial(getattr(type(model), FEEDS_PROMPT), model, **kwargs))
        store = self.options.prefix_store
        texts = None
        if store is not None and not generation_config.is_assistant:
            texts = stored_texts(model, cache, input_ids, model_kwargs)
        if store is None or texts is None:
            return feed(input_ids, generation_config, model_kwargs)
        store.follow(model, self.options.form)  # a copy of a model has a store of its own
        return feed_through(store, texts, feed, input_ids, generation_config, model_kwargs)


class Generating(Seam):
    """What is left in a store when generate is done; stands there only where there is a store."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, and leave where the text ends."""
        model, store = self.model, self.options.prefix_store
        store.follow(model, self.options.form)
        with leaving_ends(store):
            return getattr(type(model), GENERATES)(model, *args, **kwargs)


class Drafting(Seam):
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
        choose = getattr(type(model), DRAFTS)
        drafter = choose(model, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, **kwargs)
        if isinstance(cache, DynamicSlidingWindowCache):
            if (earlier := _DRAFTERS.get(cache)) is not None:
                earlier.detach()  # an exception that is still kept may keep that drafter too
            # It lives as long as generate drafts.
            _DRAFTERS[cache] = weakref.finalize(drafter, _end_drafts, weakref.ref(cache))
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
