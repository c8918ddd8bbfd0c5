"""What the CPU can do, where that decides which of several ways is the fastest."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch


@cache
def has_matrix_units() -> bool:
    """Whether the CPU multiplies bfloat16 by AMX, as Xeons do since Sapphire Rapids."""
    # The first torch 2.11 may not tell.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))
