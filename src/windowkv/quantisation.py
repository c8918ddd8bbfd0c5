"""Which layers are quantised, what stays as it was computed, and what a packed token weighs; in integers.

Knows layouts, positions and bytes. Knows nothing of tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windowkv.errors import OptionError
from windowkv.layout import CacheLayout, LayerSpec
from windowkv.window import Retention, Span

RESIDUAL = 64  # newest tokens that stay as computed, or `rollback` of them where that is more
SLICE = 1024  # tokens of a prompt that are packed at once, so that no copy of it all is made in float32
STEP = 32  # tokens are packed so many at a time: a handful of small operations per token would cost more than attention


@dataclass(frozen=True)
class Format:
    """What a token of one head becomes: codes, and 16-bit numbers for every group of them."""

    bits: int
    group: int  # numbers of head_dim that share a scale
    numbers: int  # of a group: a scale, and where codes are no multiples of it, what code 0 stands for

    def group_of(self, head_dim: int) -> int:
        """Numbers in a group: all of a head that the usual group does not divide.

        >>> [Format(8, group=64, numbers=1).group_of(head_dim) for head_dim in (16, 80, 128)]
        [16, 80, 64]
        """
        return head_dim if head_dim % self.group else self.group

    def nbytes(self, head_dim: int) -> int:
        """Bytes of one token's key or value of one head.

        >>> [each.nbytes(256) for each in FORMATS["int8"] + FORMATS["int4"]], 2 * 256
        ([264, 264, 160, 144], 512)
        """
        return head_dim * self.bits // 8 + 2 * self.numbers * (head_dim // self.group_of(head_dim))


# Of keys and of values. Some numbers of every key are far greater than the others, so that in 4 bits small groups are
# worth their scales; values are not like that.
FORMATS: Mapping[str, tuple[Format, Format]] = {
    "int8": (Format(8, group=64, numbers=1),) * 2,
    "int4": (Format(4, group=32, numbers=2), Format(4, group=64, numbers=2)),
    "fp8": (Format(8, group=64, numbers=1),) * 2,
}


@dataclass(frozen=True)
class PackedRetention:
    """How much of the past a quantised layer keeps, and which of it packed.

    The newest `residual` tokens, and up to `step - 1` before them, stay as computed; what is older is packed, once, in
    steps on a fixed grid. So where it ends is a function of the furthest position reached, like capacities. One more is
    held as computed, so that there is a way back by one token to what was held before it.

    >>> retention = PackedRetention(Retention(None, rollback=2), residual=4, step=2)
    >>> [retention.packed_until(seen) for seen in (4, 5, 6, 7, 8, 9)]
    [0, 0, 2, 2, 4, 4]
    """

    whole: Retention
    residual: int
    step: int = STEP
    recent: Retention = field(init=False)  # of what stays as computed
    packed: Retention = field(init=False)

    def __post_init__(self) -> None:
        """Work out the two parts."""
        whole, residual = self.whole, self.residual
        assert residual >= whole.rollback, "or what is packed would have to be taken back"
        # It holds the newest residual + step tokens, and a recorded draft as `whole` would.
        recent = Retention(residual - whole.rollback + self.step + 1, whole.rollback)
        kept = None if whole.kept is None else max(0, whole.kept - residual)
        packed = Retention(None) if kept is None else Retention(window=1, rollback=kept)
        object.__setattr__(self, "recent", recent)
        object.__setattr__(self, "packed", packed)

    def packed_until(self, seen: int, reach: int = 0) -> int:
        """Up to which position tokens are packed after `seen` of them, unless it was further already.

        `reach` as in `Retention.append`: a draft stays as computed until it is accepted.
        """
        oldest = seen - self.residual - max(0, reach - self.whole.rollback)
        return max(0, oldest // self.step * self.step)

    def way_back(self, computed: Span) -> int:
        """How many tokens can be taken back and still leave as computed all that was so before them, on any grid.

        computed: positions that are held as computed, up to the newest.

        >>> retention = PackedRetention(Retention(None, rollback=2), residual=4, step=2)
        >>> retention.way_back(Span(94, 100)), retention.way_back(Span(96, 100)), retention.way_back(Span(0, 7))
        (1, 0, 7)
        """
        return Retention(self.residual + self.step).rollback_room(computed)


@dataclass(frozen=True)
class Form:
    """How a cache stores tokens: in two of one form, a text that was fed in the same pieces left the same values."""

    quantisation: "Quantisation"
    residual: int  # newest tokens that stay as computed; 0 where nothing is packed

    def __str__(self) -> str:
        """As stored beginnings are told apart by it; nothing where nothing is packed."""
        kv_dtype, quantize = self.quantisation.kv_dtype, self.quantisation.quantize
        return "" if kv_dtype is None else f"{kv_dtype}:{quantize}:{self.residual}"


@dataclass(frozen=True)
class Quantisation:
    """What is stored in fewer bits, and in which layers.

    Raises OptionError for a `kv_dtype` or a `quantize` that there is not.
    """

    kv_dtype: str | None = None
    quantize: str = "full"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.kv_dtype is not None and not (isinstance(self.kv_dtype, str) and self.kv_dtype in FORMATS):
            raise OptionError(
                f"kv_dtype={self.kv_dtype!r}: {', '.join(map(repr, FORMATS))}, or None for no quantisation"
            )
        if self.quantize not in ("full", "all"):
            raise OptionError(
                f'quantize={self.quantize!r}: "full" for the full layers, "all" for those with a window too'
            )

    def __str__(self) -> str:
        """As a sentence names it."""
        return "unquantised" if self.kv_dtype is None else f"{self.kv_dtype} in {self.quantize} layers"

    def nbytes(self, spec: LayerSpec) -> int:
        """Bytes of one packed token of one row."""
        keys, values = FORMATS[str(self.kv_dtype)]
        return spec.kv_heads * (keys.nbytes(spec.head_dim) + values.nbytes(spec.value_head_dim))

    def packs(self, spec: LayerSpec) -> bool:
        """Whether a layer is quantised. One whose window is little more than what stays as computed is not."""
        if self.kv_dtype is None:
            return False
        wide = spec.window is not None and spec.window > 2 * RESIDUAL
        return spec.kind == "full" or (self.quantize == "all" and spec.bounded and wide)

    def packing_nbytes(self, spec: LayerSpec, rows: int, tokens: int) -> int:
        """Bytes at most, besides what is kept, while that many tokens of a layer are packed at once."""
        copies = 4 * 4 * min(tokens, SLICE) * spec.kv_heads * max(spec.head_dim, spec.value_head_dim)  # in float32
        return rows * (tokens * self.nbytes(spec) + copies) if self.packs(spec) else 0

    def form(self, rollback: int) -> Form:
        """How a cache with that rollback stores tokens."""
        return Form(Quantisation(), 0) if self.kv_dtype is None else Form(self, max(RESIDUAL, rollback))

    def retention(self, spec: LayerSpec, rollback: int) -> Retention | PackedRetention:
        """How much of the past a layer keeps, and how."""
        whole = Retention(spec.window, rollback)
        return PackedRetention(whole, max(RESIDUAL, rollback)) if self.packs(spec) else whole

    def check(self, layout: CacheLayout) -> None:
        """Raise OptionError when some layer cannot be quantised so."""
        for spec in filter(self.packs, layout.layers):
            for head_dim in (spec.head_dim, spec.value_head_dim):
                if head_dim * FORMATS[str(self.kv_dtype)][0].bits % 8:
                    raise OptionError(
                        f"kv_dtype={self.kv_dtype!r}: head_dim={head_dim} is odd, and two codes share a byte"
                    )


def check_unsaid(quantize: str) -> None:
    """Raise OptionError where a caller says which layers are quantised, and not in how many bits."""
    if quantize != "full":
        raise OptionError(f"quantize={quantize!r} without kv_dtype: say in how many bits, kv_dtype='int8'")
