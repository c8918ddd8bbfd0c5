"""What can go wrong, by name: every error that windowkv raises on purpose.

Each message names the value, the limit, and what would work.
"""


class WindowKVError(Exception):
    """Base of all windowkv errors; catch this to catch them all."""


class ConfigError(WindowKVError, ValueError):
    """A model config that cannot be read, contradicts itself, or describes no causal decoder."""


class OptionError(WindowKVError, ValueError):
    """An option of windowkv with a value that it cannot have."""


class InputError(WindowKVError, ValueError):
    """Keys, values or indices that do not fit what a cache already holds."""


class RollbackError(WindowKVError, RuntimeError):
    """More tokens to take back than a cache still can; the cache is unchanged."""


class UnsupportedOperationError(WindowKVError, TypeError):
    """Something that one kind of cache cannot do, and another can."""


class UnsupportedModelError(WindowKVError, TypeError):
    """An object that `windowkv.enable` cannot serve."""


class TinyModelError(WindowKVError, ValueError):
    """A config of which no small model with the same kinds of layers can be made."""


class ModelSourceError(WindowKVError, OSError):
    """A model that was named but cannot be found or read."""


class CacheFileError(WindowKVError, OSError):
    """A file that holds no cache, not the one asked for, or not whole any more; or a cache that cannot be written."""
