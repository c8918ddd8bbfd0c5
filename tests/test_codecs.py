"""What codecs lose, and what they weigh."""

import pytest
import torch
from torch import Tensor

from windowkv.codecs import CODECS
from windowkv.quantisation import FORMATS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the greatest absolute value in a group (int8), of its range (int4), of a number itself (fp8): half a step, and for
# int4 and fp8 the rounding of what a group stands on.
MOST = {"int8": 1 / 254 + 1 / 512 / 127, "int4": 1 / 30 + 1 / 128, "fp8": 1 / 16 + 1 / 512}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def round_trip(name: str, states: Tensor) -> Tensor:
    out, codec = torch.empty_like(states), CODECS[name][0]
    codec.unpack(codec.pack(states), out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 128, 256])
def test_no_number_is_further_off_than_half_a_step(name: str, head_dim: int, dtype: torch.dtype) -> None:
    states = random(2, 3, 50, head_dim, dtype=dtype)
    groups = states.float().unflatten(-1, (-1, FORMATS[name][0].group_of(head_dim)))
    off = (round_trip(name, states).float() - states.float()).abs().unflatten(-1, groups.shape[3:])
    greatest = groups.abs().amax(-1, keepdim=True)
    span = {"int8": greatest, "int4": groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)}
    scale = span.get(name, groups.abs() + greatest / 448 / 64)
    rounding = groups.abs().amax(-1, keepdim=True) * (torch.finfo(dtype).eps * 1.5 + 1 / 512 * (name == "int4"))
    assert bool((off <= MOST[name] * scale + rounding).all())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_parts_have_the_shapes_and_bytes_that_are_planned(name: str, head_dim: int) -> None:
    for codec, layout in zip(CODECS[name], FORMATS[name], strict=True):
        parts = codec.pack(random(2, 3, 50, head_dim))
        assert [(part.shape[-1], part.dtype) for part in parts] == list(codec.shapes(head_dim))
        assert all(part.shape[:3] == (2, 3, 50) for part in parts)
        assert sum(part[0, 0, 0].nbytes for part in parts) == layout.nbytes(head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_a_token_is_packed_alike_whatever_stands_beside_it(name: str, dtype: torch.dtype) -> None:
    states = random(2, 3, 37, 80, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    whole = CODECS[name][0].pack(states)
    for i, token in enumerate(states.split(1, dim=2)):
        for part, alone in zip(whole, CODECS[name][0].pack(token), strict=True):
            assert torch.equal(part[:, :, i : i + 1].view(torch.uint8), alone.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_huge_numbers_survive(name: str, dtype: torch.dtype) -> None:
    states = torch.zeros(1, 1, 3, 64, dtype=dtype)
    states[0, 0, 1], states[0, 0, 2, 5] = 30_000.0, -60_000.0
    out = round_trip(name, states)
    assert torch.equal(out[0, 0, 0], states[0, 0, 0])
    torch.testing.assert_close(out, states, rtol=0.01, atol=300)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_no_number_stays_none(name: str) -> None:
    states = random(1, 1, 2, 64)
    states[0, 0, 0, 3] = float("nan")
    out = round_trip(name, states)
    assert bool(out[0, 0, 0].isnan().any())
    assert bool(out[0, 0, 1].isfinite().all())


def test_every_float8_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 1, 4, 64)
    scale = torch.full((1, 1, 4, 1), 0.5, dtype=torch.bfloat16)
    for dtype in DTYPES:
        out = torch.empty(1, 1, 4, 64, dtype=dtype)
        CODECS["fp8"][0].unpack((codes, scale), out)
        expected = codes.float() * 0.5
        numbers = ~expected.isnan()
        assert torch.equal(out[numbers].float(), expected[numbers])
