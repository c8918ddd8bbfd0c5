"""Numbers of bytes as people read them.

Knows units. Knows nothing of what is counted.
"""

_UNITS = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))  # name, bytes, digits behind the point


def size(nbytes: int | None) -> str:
    """Bytes in the largest unit of which there is one.

    >>> size(1000), size(150_994_944), size(2_200_000_000), size(None)
    ('1,000 B', '144.0 MiB', '2.05 GiB', 'unknown')
    """
    if nbytes is None:
        return "unknown"
    fitting = (f"{nbytes / weight:,.{digits}f} {unit}" for unit, weight, digits in _UNITS if nbytes >= weight)
    return next(fitting, f"{nbytes:,} B")


def unit(nbytes: int) -> tuple[str, int]:
    """The largest unit of which there is one, and its bytes.

    >>> unit(5000), unit(3)
    (('KiB', 1024), ('B', 1))
    """
    return next(((name, weight) for name, weight, _ in _UNITS if nbytes >= weight), ("B", 1))
