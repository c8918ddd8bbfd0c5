"""What several models' caches will hold over the length of a text, as planned.

Knows plans. Knows nothing of how bytes are counted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from windowkv.cache import ROLLBACK
from windowkv.errors import OptionError
from windowkv.memory import Plan
from windowkv.model_source import load_config
from windowkv.planner import plan
from windowkv.plot.canvas import LINES, Label, figure_of, label_right, name_axes, new_axes
from windowkv.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIRST = 256  # tokens, where the lengths begin that are chosen here


def plans(
    models: Mapping[str, PreTrainedConfig | str | Path] | Sequence[str],
    *,
    tokens: int | Sequence[int],
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw the bytes that `plan` says of each model against the length of a text, both axes logarithmic.

    A dashed line is the same without a token dropped. No weights are needed. The options are those of `plan`.

    Args:
        models: configs, or models' folders, config.jsons or names, by what the picture is to call them; or names alone.
        tokens: the lengths of texts, each at least 1; or the longest, and as many times half of it as are above 256.
        batch_size: as `plan`.
        dtype: as `plan`.
        rollback: as `plan`.
        kv_dtype: as `plan`.
        quantize: as `plan`.
        ax: where to draw; a new figure unless given.

    Raises:
        ConfigError, ModelSourceError, OptionError: as `plan`, where there is no model or no length, or matplotlib is
            missing.
    """
    if isinstance(models, str):
        models = [models]
    named = models if isinstance(models, Mapping) else {name: name for name in models}
    lengths = _halves(tokens) if isinstance(tokens, int) else sorted(set(tokens))
    if not named or not lengths or lengths[0] < 1:
        raise OptionError(f"models={list(named)}, tokens={tokens}: a model or more, and lengths of 1 token or more")
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "rollback": rollback}
    options |= {"kv_dtype": kv_dtype, "quantize": quantize}
    planned = {name: _plans(source, lengths, options) for name, source in named.items()}
    axes = new_axes(
        ax,
        title=_title(lengths[-1], batch_size),
        subtitle="Solid: what windowkv holds, as planned. Dashed: the same if no token were ever dropped.",
        height=5.5,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for place, (name, each) in enumerate(planned.items()):
        _draw_model(axes, name, each, place)
    axes.set_xlim(right=1.03 * lengths[-1])
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30 if len(lengths) > 8 else 0)
    axes.yaxis.set_major_formatter(lambda nbytes, _: size(round(nbytes)).replace(".00", "").replace(".0", ""))
    name_axes(axes, "tokens in each text", "keys and values held (bytes)")
    axes.minorticks_off()
    label_right(axes, [_label(name, each[-1], place) for place, (name, each) in enumerate(planned.items())])
    return figure_of(axes)


def _plans(source: Any, lengths: Sequence[int], options: Mapping[str, Any]) -> list[Plan]:
    config = load_config(source) if isinstance(source, str | Path) else source
    return [plan(config, tokens=length, **options) for length in lengths]


def _draw_model(axes: "Axes", name: str, planned: Sequence[Plan], place: int) -> None:
    color, marker = LINES[place % len(LINES)]
    lengths = [each.tokens for each in planned]
    style: dict[str, Any] = {"color": color, "marker": marker, "clip_on": False}
    axes.plot(lengths, [each.total_bytes for each in planned], linewidth=2, markersize=6, label=name, **style)
    whole = [each.baseline_bytes for each in planned]
    axes.plot(
        lengths, whole, linewidth=1.2, linestyle=(0, (4, 3)), markersize=3.5, label=f"{name}, none dropped", **style
    )


def _label(name: str, last: Plan, place: int) -> Label:
    color, _ = LINES[place % len(LINES)]
    held, whole = size(last.total_bytes), size(last.baseline_bytes)
    return Label(last.total_bytes, f"{name}\n{held}" + (f", not {whole}" if held != whole else ""), color)


def _title(tokens: int, batch_size: int) -> str:
    texts = f"{tokens:,} tokens" if batch_size == 1 else f"{batch_size:,} texts of {tokens:,} tokens"
    return f"Keys and values of up to {texts}"


def _halves(longest: int) -> list[int]:
    """A length, its half, a quarter, as far as that is `_FIRST` or more; a shorter length alone.

    >>> _halves(1500)
    [375, 750, 1500]
    """
    lengths = [longest]
    while lengths[0] // 2 >= _FIRST:
        lengths.insert(0, lengths[0] // 2)
    return lengths
