"""`MemoryRecorder`: what the caches of a model hold, layer kind by layer kind, while something runs.

Knows forwards, generate and how storages are counted. Knows nothing of why it is recorded.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache

from windowkv.cache import storages
from windowkv.continuation import CACHE_NAMES
from windowkv.errors import ConfigError, OptionError, UnsupportedModelError
from windowkv.integration import unwrapped
from windowkv.layout import read_layout
from windowkv.measurement import decoder_layers
from windowkv.plot.recorded import recording
from windowkv.recording import Recording, Sample
from windowkv.seams import GENERATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class MemoryRecorder(Recording):
    """Records the bytes that a model's caches hold, of any class of transformers, while a `with` block runs.

    A sample is taken after every forward, and after every decoder layer that reads several tokens, so that what a
    prompt takes meanwhile is seen. Storages are counted, each once: what a cache keeps alive, not what its views show.
    A run is one `generate`, with all caches that the model is handed in it, or forwards by hand with one cache. The
    model may be enabled or not, and computes the same; neither it nor a cache is kept alive by a recorder. Of a forward
    that is compiled with its hooks (`torch.compile(model)`) nothing is seen; of `torch.compile(model.forward)` each
    whole forward is. Runs are told apart where one thread runs at a time, by their caches alone once the model was
    enabled or disabled in the block.

        with windowkv.MemoryRecorder(model) as recorder:
            model.generate(**inputs)
        recorder.peak_bytes, recorder.samples[-1].nbytes  # {"sliding": ..., "full": ...}
        recorder.plot()

    Args:
        model: a transformers model whose forward takes a cache; wrappers (PEFT, torch.compile) are looked through.

    Raises:
        UnsupportedModelError: the model's forward takes no cache.
        OptionError: in `with`, while it is recording already.
    """

    def __init__(self, model: Any) -> None:
        """Watch nothing yet."""
        super().__init__()
        target = unwrapped(model)
        if not _takes_cache(target):
            raise UnsupportedModelError(
                f"the forward of {type(target).__name__} takes no cache: pass a transformers model that generates text "
                "or its decoder, such as AutoModelForCausalLM.from_pretrained(...)"
            )
        self._model = weakref.ref(target)
        self._kinds = _kinds(target.config)
        self._places: dict[int, int] = {}  # of decoder layers, by their ids
        self._undo: ExitStack | None = None
        self._start: float | None = None
        self._run = -1
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()  # of this run
        self._generating = self._seen_inside = False

    def __enter__(self) -> Self:
        """Begin, or go on."""
        model = self._model()
        if self._undo is not None or model is None:
            raise OptionError("this recorder is recording already" if self._undo else "this recorder's model is gone")
        self._start = perf_counter() if self._start is None else self._start
        with ExitStack() as stack:
            layers = decoder_layers(model)
            self._places = {id(layer): place for place, layer in enumerate(layers)}
            hooks: list[tuple[Any, Callable[..., None]]] = [(layer, self._after_layer) for layer in layers]
            hooks += [(model.get_decoder(), self._after_decoder), (model, self._after_model)]
            for module, hook in hooks:
                stack.callback(module.register_forward_hook(_Hook(hook), with_kwargs=True).remove)
            if callable(getattr(model, GENERATES, None)):
                stack.callback(_GenerateStandIn(model, self._tell_run).put())
            self._undo = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, however the block ended; the model is as it was."""
        undo, self._undo = self._undo, None
        self._caches = weakref.WeakSet()
        if undo is not None:
            undo.close()

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw what was recorded, as `windowkv.plot.recording`."""
        return recording(self, ax=ax)

    def _tell_run(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._generating:  # a model that drafts for itself generates while it generates
            return generate(*args, **kwargs)
        self._begin_run()
        self._generating = True
        try:
            return generate(*args, **kwargs)
        finally:
            self._generating, self._caches = False, weakref.WeakSet()

    def _after_layer(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        states = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)  # [..., Q, D]
        if states is not None and states.ndim > 1 and states.shape[-2] > 1:
            self._sample(_cache_among((*args, *kwargs.values())), self._places[id(module)])

    def _after_decoder(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._seen_inside |= self._sample(_cache_of(args, kwargs, output))

    def _after_model(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._seen_inside:  # the decoder was compiled
            self._sample(_cache_of(args, kwargs, output))
        self._seen_inside = False

    def _begin_run(self) -> None:
        self._run, self._caches = self._run + 1, weakref.WeakSet()

    def _sample(self, cache: Cache | None, layer: int | None = None) -> bool:
        """Note what the caches of this run hold; tells whether there is any."""
        if cache is None or self._start is None:
            return False
        if not self._generating and cache not in self._caches:
            self._begin_run()
        self._caches.add(cache)
        nbytes = _nbytes_by_kind(self._caches, self._kinds)
        self._samples.append(Sample(self._run, perf_counter() - self._start, _tokens_seen(cache), layer, nbytes))
        return True


def _takes_cache(model: Any) -> bool:
    if not callable(getattr(model, "get_decoder", None)) or not hasattr(model, "config"):
        return False
    return not signature(model.forward).parameters.keys().isdisjoint(CACHE_NAMES)


class _Hook:
    """Calls a recorder after a forward. A copy, which hangs on a copy of the model, calls nobody."""

    def __init__(self, tell: Callable[..., None] | None) -> None:
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        if self._tell is not None:
            self._tell(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)


class _GenerateStandIn:
    """Stands on a model in place of its `generate`, and tells a recorder. A copy is the copied model's, and tells none.

    Refers to the model weakly, as windowkv's seams do.
    """

    def __init__(self, model: Any, tell: Callable[..., Any] | None = None) -> None:
        self.__setstate__((model, vars(model).get(GENERATES)))
        self._tell = tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        generate = self.before if self.before is not None else partial(getattr(type(model), GENERATES), model)
        return generate(*args, **kwargs) if self._tell is None else self._tell(generate, *args, **kwargs)

    def __getstate__(self) -> tuple[Any, Any]:
        return self._model(), self.before

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self._model, self.before, self._tell = weakref.ref(state[0]), state[1], None

    def put(self) -> Callable[[], None]:
        """Take the place, and return what gives it back, whoever has come on top meanwhile."""
        model = self._model()
        setattr(model, GENERATES, self)
        return partial(self._leave, weakref.ref(model))

    def _leave(self, place: "weakref.ref[Any]") -> None:
        model = place()
        above = vars(model).get(GENERATES) if model is not None else None
        if above is self:
            delattr(model, GENERATES)
            if self.before is not None:
                setattr(model, GENERATES, self.before)
        while isinstance(above, _GenerateStandIn):
            if above.before is self:
                above.before = self.before
            above = above.before


def _kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer, as windowkv reads the config; none where it is no causal decoder's."""
    try:
        return tuple(spec.kind for spec in read_layout(config).layers)
    except ConfigError:
        return ()


def _cache_of(args: Any, kwargs: dict[str, Any], output: Any) -> Cache | None:
    """The cache that a forward was handed, or else made and returned."""
    returned = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    return _cache_among((*args, *kwargs.values(), *returned))


def _cache_among(values: Iterable[Any]) -> Cache | None:
    return next((value for value in values if isinstance(value, Cache)), None)


def _nbytes_by_kind(caches: Iterable[Cache], kinds: Sequence[str]) -> dict[str, int]:
    """Bytes of the distinct storages of caches, by kind of layer."""
    counted: set[int] = set()
    held: Counter[str] = Counter()
    for cache in caches:
        for kind, layer in _layers(cache, kinds):
            new = {address: nbytes for address, nbytes in storages([layer]).items() if address not in counted}
            counted |= new.keys()
            if new:
                held[kind] += sum(new.values())
    return {kind: nbytes for kind, nbytes in held.items() if nbytes}


def _layers(cache: Cache, kinds: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(cache, EncoderDecoderCache):
        yield from _layers(cache.self_attention_cache, kinds)
        yield from (("cross_attention", layer) for layer in cache.cross_attention_cache.layers)
        return
    for place, layer in enumerate(cache.layers):
        told = "sliding" if getattr(layer, "is_sliding", False) else "full"
        yield kinds[place] if place < len(kinds) else told, layer


def _tokens_seen(cache: Cache) -> int | None:
    """None where no layer counts tokens."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None
