"""enable and disable: which cache one model object's `generate` makes by default.

Knows the one seam in `generate` where a cache is made. Touches that model object, never a class or a global.
"""

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import Cache, DynamicCache, EncoderDecoderCache

from windowkv.cache import ROLLBACK, DynamicSlidingWindowCache
from windowkv.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT")

_SEAM = "_prepare_cache_for_generation"
_CACHE_NAMES = ("cache", "past_key_values")  # transformers renames the second to the first


@dataclass(frozen=True)
class CacheOptions:
    """How the caches of an enabled model are made."""

    rollback: int = ROLLBACK

    def new_cache(self, config: Any) -> DynamicSlidingWindowCache:
        """An empty cache for a model with this config."""
        return DynamicSlidingWindowCache(config, rollback=self.rollback)


def enable(model: ModelT, *, rollback: int = ROLLBACK) -> ModelT:
    """Make `DynamicSlidingWindowCache` the cache that `model.generate` makes when it is given none.

    Changes this one object, and returns it; enabling again replaces the options. A cache or a `cache_implementation`
    handed to `generate`, and `use_cache=False`, mean what they meant before; a `cache_implementation` that the model's
    own generation config names gives way. Wrappers (PEFT, torch.compile) are looked through.

    Args:
        model: a transformers model with `generate`.
        rollback: how many of the newest tokens a cache can always take back.

    Raises:
        UnsupportedModelError: the object has no `generate` of transformers.
        ConfigError, OptionError: as DynamicSlidingWindowCache; the model is unchanged.
    """
    target = _generating(model)
    options = CacheOptions(rollback=rollback)
    options.new_cache(target.config)  # whatever cannot be served is said now, not in the middle of a generation
    if not target._supports_default_dynamic_cache():
        logger.warning(
            "%s only works with a cache class of its own, which generate goes on using", type(target).__name__
        )
    # A partial, not a bound method or a subclass: it follows the model through deepcopy and pickle.
    setattr(target, _SEAM, partial(_prepare_cache, target, options))
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable`: the object is as if it had never been enabled. Does nothing to a model that is not enabled."""
    vars(_generating(model)).pop(_SEAM, None)
    return model


def _generating(model: Any) -> Any:
    """The object whose `generate` runs, under the wrappers of PEFT and torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            break
    if not callable(getattr(type(model), _SEAM, None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no generate of transformers: pass the model that generates text, such as "
            "AutoModelForCausalLM.from_pretrained(...), or pipeline.model"
        )
    return model


def _prepare_cache(
    model: Any, options: CacheOptions, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Let transformers decide whether a cache is made, and put ours in the place of a new dynamic one."""
    prepare = partial(getattr(type(model), _SEAM), model)
    handed = any(model_kwargs.get(name) is not None for name in _CACHE_NAMES)
    if handed or generation_config.cache_implementation != model.generation_config.cache_implementation:
        prepare(generation_config, model_kwargs, *args, **kwargs)
        return
    generation_config = copy.copy(generation_config)
    generation_config.cache_implementation = None
    prepare(generation_config, model_kwargs, *args, **kwargs)
    for name in _CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            model_kwargs[name] = _replaced(model_kwargs[name], options.new_cache(model.config))
            if generation_config.is_assistant:
                model_kwargs[name].activate_past_recording()


def _replaced(cache: Cache, ours: Cache) -> Cache:
    """Ours in the place of a plain dynamic cache; transformers' own of any other kind."""
    if type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache:
        cache.self_attention_cache = ours
    return ours if type(cache) is DynamicCache else cache
