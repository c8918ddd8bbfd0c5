"""Memory-bounded KV caches for language models with sliding-window attention, a drop-in for transformers."""

import lazy_loader

# The names are in __init__.pyi. Importing them at their first use keeps `windowkv --help` from waiting for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
