"""How tensors are stored in fewer bits: groups along head_dim, every token by itself.

So a token is packed once and for all: what is taken back, forked, reordered or dropped never touches another. Knows
tensors. Knows nothing of positions.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from windowkv.quantisation import FORMATS, Format

_LEAST = 1e-30  # of a scale: groups of zeros would divide by it
_NUMBER = torch.bfloat16  # scales: codes are computed from the rounded one, so that its rounding is no error of its own


class Codec(Protocol):
    """Tensors `[B, H, T, D]` as parts `[B, H, T, ...]`, and back."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts."""
        ...

    def pack(self, states: Tensor) -> tuple[Tensor, ...]:
        """The parts of states; of a token the same ones, whatever stands beside it."""
        ...

    def unpack(self, parts: tuple[Tensor, ...], out: Tensor) -> None:
        """Write what the parts stand for into `out` `[B, H, T, D]`, in its dtype; a single row into all."""
        ...

    def shapes(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Of each part, its last dimension and its dtype."""
        ...


class _Int8:
    """Symmetric: codes from -127 to 127 are multiples of their group's scale."""

    names = ("codes", "scale")
    dtype, highest = torch.int8, 127.0

    def __init__(self, layout: Format) -> None:
        self.layout = layout

    def pack(self, states: Tensor) -> tuple[Tensor, ...]:
        groups = _grouped(states.float(), self.layout)  # [B, H, T, groups, group]
        scale = (groups.abs().amax(-1, keepdim=True) / self.highest).clamp(min=_LEAST).to(_NUMBER)
        scaled = groups / scale.float()
        if not self.dtype.is_floating_point:
            scaled.round_()
        return scaled.clamp_(-self.highest, self.highest).to(self.dtype).flatten(-2), scale[..., 0]

    def unpack(self, parts: tuple[Tensor, ...], out: Tensor) -> None:
        codes, scale = parts
        out.copy_(codes)
        _grouped(out, self.layout).mul_(scale.to(out.dtype)[..., None])

    def shapes(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        return (head_dim, self.dtype), (head_dim // self.layout.group_of(head_dim), _NUMBER)


class _Fp8(_Int8):
    """Symmetric: codes are float8_e4m3fn."""

    dtype, highest = torch.float8_e4m3fn, 448.0

    def unpack(self, parts: tuple[Tensor, ...], out: Tensor) -> None:
        codes, scale = parts
        # torch converts float8 one by one on CPUs. The bits of one, shifted to where a wider format has them, are its
        # value but for a power of two: 17 times as fast.
        wide = codes.view(torch.int8).to(torch.int16)
        if out.dtype == torch.bfloat16:
            wide.bitwise_left_shift_(4).bitwise_and_(-0x7810)
            out.copy_(wide.view(torch.bfloat16))
            _grouped(out, self.layout).mul_((scale * 2.0**120)[..., None])
        else:
            wide.bitwise_left_shift_(7).bitwise_and_(-0x4001)
            out.copy_(wide.view(torch.float16))
            _grouped(out, self.layout).mul_((scale.to(out.dtype) * 2.0**8)[..., None])


class _Int4:
    """Asymmetric, 16 steps from the least to the greatest of a group; two codes in a byte.

    The first half of head_dim lies in the lower four bits and the other half in the upper ones: both are read and
    written as runs.
    """

    names = ("codes", "scale", "least")

    def __init__(self, layout: Format) -> None:
        self.layout = layout

    def pack(self, states: Tensor) -> tuple[Tensor, ...]:
        groups = _grouped(states.float(), self.layout)
        least = groups.amin(-1, keepdim=True).to(_NUMBER)
        above = groups - least.float()
        scale = (above.amax(-1, keepdim=True) / 15).clamp(min=_LEAST).to(_NUMBER)
        codes = (above / scale.float()).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
        low, high = codes.chunk(2, dim=-1)
        return low | high << 4, scale[..., 0], least[..., 0]

    def unpack(self, parts: tuple[Tensor, ...], out: Tensor) -> None:
        codes, scale, least = parts
        low, high = out.chunk(2, dim=-1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        groups = _grouped(out, self.layout)
        groups.mul_(scale.to(out.dtype)[..., None]).add_(least.to(out.dtype)[..., None])  # addcmul is 6 times slower

    def shapes(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        groups = head_dim // self.layout.group_of(head_dim)
        return (head_dim // 2, torch.uint8), (groups, _NUMBER), (groups, _NUMBER)


_CLASSES: Mapping[str, type[_Int8] | type[_Int4]] = {"int8": _Int8, "int4": _Int4, "fp8": _Fp8}
CODECS: Mapping[str, tuple[Codec, Codec]] = {  # of keys and of values
    name: (codec(FORMATS[name][0]), codec(FORMATS[name][1])) for name, codec in _CLASSES.items()
}


def _grouped(states: Tensor, layout: Format) -> Tensor:
    """A view `[B, H, T, groups, group]`."""
    group = layout.group_of(states.shape[-1])
    return states.view(*states.shape[:-1], states.shape[-1] // group, group)
