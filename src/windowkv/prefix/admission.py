"""What may be stored: which caches, and of which texts.

Knows what a cache says of itself. Knows nothing of what a store keeps.
"""

from typing import Any

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import InputError
from windowkv.history import TokenHistory
from windowkv.layout import difference, keys_follow_length, read_layout
from windowkv.prefix.texts import Text
from windowkv.prefix.tree import Ids


def check_cache(cache: Any, model: Any) -> None:
    """Raise InputError for what is no cache of a model, or must not serve another text."""
    if not isinstance(cache, DynamicSlidingWindowCache):
        raise InputError(f"a {type(cache).__name__}: a store keeps what a DynamicSlidingWindowCache holds")
    if cache.offloaded:
        raise InputError("this cache is offloaded: a store keeps what lies where the model is")
    if keys_follow_length(model.config):
        raise InputError("the keys of this model follow the length of the whole text: no beginning serves another text")
    cache.check_whole()
    if unlike := difference(cache.layout, read_layout(model.config)):
        raise InputError(f"this cache is for another model: {unlike}")


def check_text(ids: Ids, cache: DynamicSlidingWindowCache, row: int, padding: int) -> None:
    """Raise InputError where a row of a cache, after so much padding, has seen other tokens than a text begins with."""
    seen, rows, history = cache.get_seq_length(), cache.rows or 1, cache.history
    for name, value in (("row", row), ("padding", padding)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{name}={value!r}: an integer")
    if not 0 <= row < rows:
        raise InputError(f"row={row}: this cache holds rows 0 to {rows - 1}")
    if not 0 <= padding <= seen:
        raise InputError(f"padding={padding}: this cache has seen {seen} tokens")
    if padding + len(ids) < seen:
        raise InputError(f"{len(ids)} ids for a cache that has seen {seen - padding} tokens")
    if history is not None:
        ids = ids[: seen - padding]
        known = TokenHistory(history.tokens[row : row + 1] if history.rows > 1 else history.tokens)
        if known.common_prefix(Text(ids, padding).row(seen)) < len(history):
            raise InputError("this cache has seen other tokens than these ids")
