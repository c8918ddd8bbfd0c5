"""What caches held over time: samples, and their file.

Knows numbers alone. Knows nothing of caches, models or pictures.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from windowkv.errors import OptionError


@dataclass(frozen=True)
class Sample:
    """What the caches of one run held at one moment."""

    run: int  # which generate, or which cache that forwards by hand were given; from 0
    seconds: float  # since the recording began
    tokens: int | None  # that the cache had seen; None where it counts none
    layer: int | None  # the decoder layer that had just read several tokens; None after a whole forward
    nbytes: Mapping[str, int]  # of distinct storages, by kind of layer

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.nbytes.values())


class Recording:
    """Samples in the order in which they were taken."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        """Hold these samples."""
        self._samples = list(samples)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All of them."""
        return tuple(self._samples)

    @property
    def runs(self) -> tuple[tuple[Sample, ...], ...]:
        """The same, run by run."""
        return tuple(tuple(run) for _, run in groupby(self._samples, key=lambda sample: sample.run))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that held anything, in order of appearance."""
        return tuple(dict.fromkeys(kind for sample in self._samples for kind in sample.nbytes))

    @property
    def peak_bytes(self) -> int:
        """The most that was held at any moment; 0 where nothing was recorded."""
        return max((sample.total_bytes for sample in self._samples), default=0)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the samples as JSON, which `read_recording` reads."""
        Path(path).write_text(json.dumps({"samples": [asdict(sample) for sample in self._samples]}))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The samples that `Recording.write` wrote. Raises OptionError for another file."""
    try:
        return Recording(Sample(**sample) for sample in json.loads(Path(path).read_text())["samples"])
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{os.fspath(path)} is no recording of a MemoryRecorder: {error!r}") from error
