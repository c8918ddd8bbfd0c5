from . import plot as plot
from .cache import DynamicSlidingWindowCache as DynamicSlidingWindowCache
from .errors import (
    CacheFileError as CacheFileError,
    ConfigError as ConfigError,
    InputError as InputError,
    ModelSourceError as ModelSourceError,
    OptionError as OptionError,
    RollbackError as RollbackError,
    TinyModelError as TinyModelError,
    UnsupportedModelError as UnsupportedModelError,
    UnsupportedOperationError as UnsupportedOperationError,
    WindowKVError as WindowKVError,
)
from .integration import disable as disable, enable as enable
from .memory import LayerPlan as LayerPlan, Plan as Plan
from .persist import load as load
from .planner import (
    max_batch_size as max_batch_size,
    max_tokens as max_tokens,
    plan as plan,
    weight_bytes as weight_bytes,
)
from .prefix.store import PrefixStore as PrefixStore
from .recorder import MemoryRecorder as MemoryRecorder
from .static_cache import SlidingWindowCache as SlidingWindowCache
