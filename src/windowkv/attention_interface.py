"""transformers' seams for attention: a mask function that makes no mask, and the attention function that goes with it.

Knows what transformers says of a mask, and what to hand over to the implementation that a model had. Does no attention.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from windowkv.attention import Scoring, ranges_attention, unmasked_attention, visible
from windowkv.layout import BIDIRECTIONAL_PROMPT, CacheLayout

_PREFIX = "windowkv_"
_STARTS = torch.int32  # no other mask has this dtype: it tells both seams what they are looking at
_BASE_MASKS: dict[str, Callable[..., Tensor | None]] = {"sdpa": sdpa_mask, "eager": eager_mask}
# Models that say to attend through transformers' interface, and look into their masks besides, or count positions
# by what they are fed at once, or (RecurrentGemma in older releases) keep what they have seen outside of any cache.
_OWN_WAYS = frozenset({"doge", "kosmos-2.5", "recurrent_gemma"}) | BIDIRECTIONAL_PROMPT


def is_plain_decoder(model: Any) -> bool:
    """Whether it is known of a model that its tokens attend to those before them alone, by transformers' interface."""
    types = {model.config.model_type, model.config.get_text_config(decoder=True).model_type}
    known = type(model).__module__.startswith("transformers.") and model._supports_attention_backend
    return bool(known and not model.config.is_encoder_decoder and not types & _OWN_WAYS)


def fast_name(model: Any, layout: CacheLayout) -> str | None:
    """The name of the implementation that replaces the one that a model has; None where that one should stay."""
    decoder = model.config.get_text_config(decoder=True)
    if not is_plain_decoder(model) or layout.foreign:
        return None
    return _PREFIX + decoder._attn_implementation if decoder._attn_implementation in _BASE_MASKS else None


def base_name(name: str | None) -> str | None:
    """The implementation that a model had before; the name itself when it is not one of ours."""
    return name.removeprefix(_PREFIX) if name else name


def ranges_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    base: str,
    **kwargs: Any,
) -> Tensor | None:
    """The first slot that each query sees, where that says all, else the base's own mask.

    The former is int32 `[B or 1, 1, Q, 1]`, and on the CPU: it is read there. A single query that sees everything has
    None for sdpa, which is what that base gives it too.
    Arguments as transformers' `sdpa_mask`. What each query sees must be one run of slots that ends at its own, which is
    so for windows, chunks and left padding over keys that end with the newest query.
    """
    if _covered(q_length, kv_length, q_offset, kv_offset, **kwargs):
        padded = attention_mask if attention_mask is not None and not attention_mask.all() else None
        single = base == "sdpa" and q_length == 1 and padded is None
        if single and _sees_all(mask_function, batch_size, kv_length, q_offset, kv_offset, **kwargs):
            return None
        padding = _left_padding(padded, kv_length, kv_offset)
        if padding is not None:
            own = torch.arange(q_offset, q_offset + q_length)
            first = _first_visible(mask_function, batch_size, own.to(kwargs.get("device", "cpu")), kv_offset).cpu()
            return torch.minimum(torch.maximum(first, padding), own - kv_offset).to(_STARTS)[:, None, :, None]
    if isinstance(kv_offset, Tensor) and attention_mask is not None:  # the base would ask how far a ring's slots reach
        mask_function, attention_mask = _without_padding(mask_function, attention_mask), None
        kwargs["allow_is_causal_skip"] = False
    return _BASE_MASKS[base](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def ranges_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    base: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query `[B, H * G, Q, D]`, key and value `[B, H, K, D]` -> `[B, Q, H * G, Dv]`.

    Whatever it does not do itself goes to the base with the mask that it would have had.
    """
    if attention_mask is None or attention_mask.dtype != _STARTS:
        if base == "sdpa" and query.shape[2] == 1 and _plain(module, query, key, base, **kwargs):
            if _is_masked_step(query, key, attention_mask):
                return _masked_step(query, key, value, attention_mask, kwargs.get("scaling")), None
            if attention_mask is None and query.device.type == "cpu" and not _is_traced():
                output = unmasked_attention(*_autocast(query, key, value), _scoring(query, **kwargs))
                return output.transpose(1, 2).contiguous(), None
        return _hand_over(base, module, query, key, value, attention_mask, **kwargs)
    starts = attention_mask[:, 0, :, 0].cpu()  # hooks of models on several devices move whatever they are handed
    if not _plain(module, query, key, base, **kwargs):
        seen = visible(starts.to(query.device), key.shape[2])[:, None].expand(query.shape[0], -1, -1, -1)
        if base == "eager":
            lowest = torch.finfo(query.dtype).min
            seen = query.new_zeros(seen.shape).masked_fill_(~seen, lowest)
        return _hand_over(base, module, query, key, value, seen, **kwargs)
    output = ranges_attention(*_autocast(query, key, value), starts, _scoring(query, **kwargs))
    return output.transpose(1, 2).contiguous(), None


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast would make of a kernel's arguments: it does not know all that are called here."""
    if not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _scoring(
    query: Tensor, *, scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any
) -> Scoring:
    return Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)


def _is_masked_step(query: Tensor, key: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether single queries share keys with others in their group, under a mask that is the same for all heads."""
    masked = attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] == 1
    return masked and query.shape[1] > key.shape[1]


def _masked_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """A step of decoding into a static cache: the heads of a group become rows, where sdpa would repeat their keys."""
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, dim)  # [B, H, G, D]
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return output.reshape(rows, 1, heads, value.shape[-1])


def _covered(
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    *,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> bool:
    """Whether a mask is causal with a window at most, over keys that end with the newest query.

    transformers forbids to skip masks with anything else in them (packed rows, blocks of image tokens, both directions)
    and asks for vmap where a caller brings a function of its own.
    """
    return (
        allow_is_causal_skip
        and not use_vmap
        and _worthwhile(torch.device(device).type, q_length)
        and not _is_traced()
        # Static caches show keys that are yet to come, and count in tensors.
        and isinstance(q_offset, int)
        and q_length > 0
        and kv_offset + kv_length == q_offset + q_length
    )


def _sees_all(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    *,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> bool:
    """Whether a single query sees every key, all of them real.

    A mask function's tensor operations take as long as a layer's attention: it is asked only where nothing else tells.
    """
    if local_size is None and mask_function is causal_mask_function:
        return True
    windows = config is not None and getattr(config, "attention_chunk_size", None) is None  # no chunks, that is
    if local_size is not None and kv_length <= local_size and (kv_offset == 0 or windows):
        return True
    head, query, key = torch.tensor((0, q_offset, kv_offset)).unbind()
    return bool(mask_function(torch.arange(batch_size), head, query, key).all())


def _is_traced() -> bool:
    """Whether a graph is made of what runs, so that no branch may hang on values or lengths."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _worthwhile(device_type: str, q_length: int) -> bool:
    """Whether looking into a mask pays: an accelerator has to be waited for, and decodes well without."""
    return device_type != "meta" and (device_type == "cpu" or q_length > 1)


def _left_padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """How many of the keys are padding, `[B or 1, 1]`; None when some padding is not on the left."""
    if attention_mask is None:
        return torch.zeros(1, 1, dtype=torch.long)
    if attention_mask.ndim != 2 or attention_mask.shape[1] < kv_offset + kv_length:
        return None
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return (~real).sum(dim=1, keepdim=True).cpu() if bool((real[:, 1:] >= real[:, :-1]).all()) else None


def _without_padding(mask_function: Callable[..., Tensor], attention_mask: Tensor) -> Callable[..., Tensor]:
    """A mask function that hides what a padding mask `[B, n]` hides besides, and all positions from n on."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        width = attention_mask.shape[1]
        real = attention_mask[row, key.clamp(max=width - 1)].bool() & (key < width)
        return mask_function(row, head, query, key) & real

    return sees


def _first_visible(mask_function: Callable[..., Tensor], batch: int, queries: Tensor, kv_offset: int) -> Tensor:
    """The first slot that a mask function shows to each query, `[B, Q]`, by bisection: its own it always sees."""
    device = queries.device
    row, head = torch.arange(batch, device=device)[:, None], torch.zeros(1, 1, dtype=torch.long, device=device)
    query = queries[None]

    def sees(position: Tensor) -> Tensor:
        return mask_function(row, head, query, position).expand(batch, -1)

    low = torch.full((batch, len(queries)), kv_offset, device=device)
    if bool(sees(low).all()):
        return low[:1] - kv_offset
    high = query.expand(batch, -1)
    while bool((low < high).any()):
        middle = (low + high) // 2
        seen = sees(middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
    first = high - kv_offset
    return first[:1] if torch.equal(first, first[:1].expand_as(first)) else first


def _plain(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    base: str,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> bool:
    """Whether a call asks for nothing but scores, a softmax and their product."""
    told = any(isinstance(value, Tensor) and value.is_floating_point() for value in kwargs.values())
    wanted = output_attentions or getattr(getattr(module, "config", None), "output_attentions", False)
    beyond_base = base != "eager" and (softcap is not None or s_aux is not None)
    trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    return not (told or wanted or beyond_base or trained or dropout)


def _hand_over(base: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call what the model would have called; eager attention is a function of each modeling file."""
    forward: Callable[..., tuple[Tensor, Tensor | None]] = (
        sdpa_attention_forward
        if base == "sdpa"
        else vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    )
    return forward(module, *args, **kwargs)


for _base in _BASE_MASKS:
    AttentionMaskInterface.register(_PREFIX + _base, partial(ranges_mask, base=_base))
    AttentionInterface.register(_PREFIX + _base, partial(ranges_forward, base=_base))
