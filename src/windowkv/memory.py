"""Exact bytes of a cache, before it exists: arithmetic over a layout and the capacities that buffers use too.

Knows counts of tokens and bytes. Knows nothing of tensors, models or where a layout came from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from windowkv.errors import OptionError
from windowkv.layout import CacheLayout, LayerSpec
from windowkv.quantisation import PackedRetention, Quantisation
from windowkv.window import Retention

_COUNTER = 8  # bytes in which a static layer counts its tokens


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a plan."""

    kind: str
    window: int | None
    capacity: int  # tokens that there is room for
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """The bytes of a cache after `tokens` tokens in each of `batch_size` rows, as `cache.nbytes` will count them.

    Of a decoder's own tokens: what an encoder saw is in no number. Of a model spread over tensor-parallel ranks,
    of one rank.
    """

    tokens: int
    batch_size: int
    itemsize: int  # bytes of one number
    layers: tuple[LayerPlan, ...]
    baseline_bytes: int  # a cache in which no layer ever drops a token
    # At most, while the whole prompt is computed in one go: all layers, the whole prompt of one layer besides, and of
    # those whose keys and values later layers share.
    peak_prefill_bytes: int
    # The same with transformers' DynamicCache: until the next token comes, it keeps the whole prompt of every layer, as
    # DynamicSlidingWindowLayer.update in its cache_utils.py keeps a slice of it all.
    transformers_peak_bytes: int
    uncounted: tuple[int, ...]  # layers of kinds that transformers stores, whose bytes are in no number here

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bound_bytes(self) -> int:
        """Bytes of the layers with a window, which do not grow any further once their bound is reached."""
        return sum(layer.nbytes for layer in self.layers if layer.window is not None)


def plan_layout(
    layout: CacheLayout,
    *,
    tokens: int,
    batch_size: int,
    itemsize: int,
    rollback: int,
    quantisation: Quantisation | None = None,
    max_cache_len: int | None = None,
) -> Plan:
    """The plan of a cache with this layout: of a static one for `max_cache_len` tokens, if that is given.

    Raises OptionError, naming the value, for a count that is none, and for more tokens than a static cache takes.
    """
    quantisation = quantisation or Quantisation()
    quantisation.check(layout)
    limit = tokens if max_cache_len is None else max_cache_len
    for name, value, least in (
        ("tokens", tokens, 0),
        ("batch_size", batch_size, 1),
        ("rollback", rollback, 0),
        ("max_cache_len", limit, 0 if max_cache_len is None else 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{name}={value!r}: it is an integer >= {least}")
    if tokens > limit:
        raise OptionError(f"tokens={tokens}: a static cache with max_cache_len={limit} takes no more than that")
    rows = batch_size * itemsize
    whole = [tokens * rows * _width(spec) for spec in layout.layers]
    if max_cache_len is None:
        layers = tuple(
            _plan_layer(spec, tokens, batch_size, itemsize, rollback, quantisation) for spec in layout.layers
        )
        read = whole
        # A layer's prompt, and what is packed of it while it lies beside what it is kept in.
        packing = [quantisation.packing_nbytes(spec, batch_size, tokens) for spec in layout.layers]
        peak = max((new + packed for new, packed in zip(whole, packing, strict=True)), default=0)
    else:
        layers = tuple(_plan_static_layer(spec, max_cache_len, rows, rollback) for spec in layout.layers)
        read = [_copied(spec, tokens, max_cache_len, rollback) * rows * _width(spec) for spec in layout.layers]
        peak = max((new + copy for new, copy in zip(whole, read, strict=True)), default=0)
    return Plan(
        tokens=tokens,
        batch_size=batch_size,
        itemsize=itemsize,
        layers=layers,
        baseline_bytes=sum(whole),
        peak_prefill_bytes=sum(layer.nbytes for layer in layers) + peak + _lent(layout, read),
        transformers_peak_bytes=sum(whole) + max(whole, default=0),
        uncounted=layout.foreign,
    )


def largest(fits: Callable[[int], bool], *, at_most: int) -> int:
    """The largest n from 0 to `at_most` that fits, where all below one that fits do too; -1 when not even 0 does.

    >>> largest(lambda n: n * n <= 50, at_most=1000)
    7
    """
    low, high = -1, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _lent(layout: CacheLayout, whole: list[int]) -> int:
    """Bytes of the prompts that stay alive for layers without keys and values of their own: one of each kind."""
    if not any(spec.kind == "shared" for spec in layout.layers):
        return 0
    last = {spec.kind: nbytes for spec, nbytes in zip(layout.layers, whole, strict=True) if spec.bounded}
    return sum(last.values())


def _plan_layer(
    spec: LayerSpec, tokens: int, rows: int, itemsize: int, rollback: int, quantisation: Quantisation
) -> LayerPlan:
    if not spec.buffered:
        return LayerPlan(spec.kind, spec.window, 0, 0)
    retention = quantisation.retention(spec, rollback)
    if not isinstance(retention, PackedRetention):
        capacity = retention.capacity(tokens)
        return LayerPlan(spec.kind, spec.window, capacity, capacity * rows * itemsize * _width(spec))
    recent, packed = retention.recent.capacity(tokens), retention.packed.capacity(retention.packed_until(tokens))
    nbytes = rows * (recent * itemsize * _width(spec) + packed * quantisation.nbytes(spec))
    return LayerPlan(spec.kind, spec.window, recent + packed, nbytes)


def _plan_static_layer(spec: LayerSpec, max_cache_len: int, rows: int, rollback: int) -> LayerPlan:
    if not spec.buffered:
        return LayerPlan(spec.kind, spec.window, 0, 0)
    capacity = Retention(spec.window, rollback).ring(max_cache_len).capacity
    return LayerPlan(spec.kind, spec.window, capacity, capacity * rows * _width(spec) + _COUNTER)


def _copied(spec: LayerSpec, tokens: int, max_cache_len: int, rollback: int) -> int:
    """Tokens of the temporary copy from which a static layer's prompt is attended; 0 where all lies in its slots."""
    ring = Retention(spec.window, rollback).ring(max_cache_len)
    return 0 if spec.window is None or tokens <= ring.room else spec.window - 1 + tokens


def _width(spec: LayerSpec) -> int:
    """Numbers that one token of one row takes."""
    return spec.kv_heads * (spec.head_dim + spec.value_head_dim) if spec.buffered else 0
