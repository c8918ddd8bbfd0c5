"""Memory-bounded KV caches for language models with sliding-window attention, a drop-in for transformers."""

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import (
    ConfigError,
    InputError,
    ModelSourceError,
    OptionError,
    RollbackError,
    UnsupportedModelError,
    WindowKVError,
)
from windowkv.integration import disable, enable
from windowkv.memory import LayerPlan, Plan
from windowkv.planner import max_tokens, plan

__all__ = [
    "ConfigError",
    "DynamicSlidingWindowCache",
    "InputError",
    "LayerPlan",
    "ModelSourceError",
    "OptionError",
    "Plan",
    "RollbackError",
    "UnsupportedModelError",
    "WindowKVError",
    "disable",
    "enable",
    "max_tokens",
    "plan",
]
