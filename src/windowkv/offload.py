"""Full layers in host memory: on an accelerator is what a forward reads of them, while it reads it.

What a buffer holds stays an ordinary buffer's, in host memory, so that going back, forks, rows and files are as ever.
Knows devices and streams. Knows nothing of layers, models or caches.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from windowkv.buffers import Buffer
from windowkv.errors import InputError
from windowkv.rows import RowSelection
from windowkv.window import Retention

Arrival = Callable[[], tuple[Tensor, ...]]  # waits for copies that are under way, and returns them


class Transfers:
    """Copies between the memory of an accelerator and that of the host."""

    def available(self) -> bool:
        """Whether there is another memory than the host's."""
        return torch.accelerator.is_available()

    def leaves(self, device: torch.device) -> bool:
        """Whether what a forward computes on a device is to be kept elsewhere."""
        return device.type not in ("cpu", "meta")

    def to_host(self, states: Tensor) -> Tensor:
        """A copy in host memory, there when this returns."""
        return states.cpu()

    def pinned(self, storage: Tensor) -> Tensor:
        """A storage in memory that an accelerator can read by itself: the same one if it is."""
        return storage if storage.is_pinned() else storage.pin_memory()

    def fetch(self, storages: tuple[Tensor, ...], device: torch.device) -> Arrival:
        """Start to copy storages from host memory to a device, beside what is computed there."""
        stream = _side_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            copies = tuple(storage.to(device, non_blocking=True) for storage in storages)
        event = stream.record_event()

        def arrive() -> tuple[Tensor, ...]:
            current = torch.accelerator.current_stream(device)
            current.wait_event(event)
            for copy in copies:
                copy.record_stream(current)  # or its memory could be given to another copy while it is read
            return copies

        return arrive


class HostBuffer(Buffer):
    """A buffer that lies in host memory, whatever device its tokens come from; `append` answers on that device.

    Of an append only the new tokens go to the host. What is on the device besides is `fetch`ed for one append.
    """

    def __init__(self, retention: Retention, transfers: Transfers) -> None:
        """Hold nothing yet."""
        super().__init__(retention)
        self.transfers = transfers
        self._coming: tuple[torch.device, Arrival] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without copies that are under way: they are of this buffer alone."""
        return vars(self) | {"_coming": None}

    def fetch(self, device: torch.device) -> None:
        """Start to bring what it holds to the device of the next append, if it is not coming already."""
        if self._coming is None and self.storages and self.transfers.leaves(device):
            self._coming = device, self.transfers.fetch(self.storages, device)

    def prepare(self, *states: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """See `Buffer.prepare`. Raises InputError for states that carry gradients."""
        device = states[0].device
        if not self.transfers.leaves(device):
            return super().prepare(*states)
        if torch.is_grad_enabled() and any(state.requires_grad for state in states):
            raise InputError("an offloaded cache carries no gradients: run under torch.no_grad()")
        with torch.no_grad():
            visible = self._on(device).append(*states[:2])
            commit_on_host = super().prepare(*map(self.transfers.to_host, states))

        def commit() -> tuple[Tensor, ...]:
            with torch.no_grad():
                commit_on_host()
            self.storages = tuple(map(self.transfers.pinned, self.storages))
            return visible

        return commit

    def cut(self, end: int) -> None:
        """See `Buffer.cut`."""
        self._coming = None
        super().cut(end)

    def prepare_rows(self, rows: RowSelection) -> Callable[[], None]:
        """See `Buffer.prepare_rows`."""
        self._coming = None
        return super().prepare_rows(rows)

    def clear(self) -> None:
        """See `Buffer.clear`."""
        self._coming = None
        super().clear()

    def _on(self, device: torch.device) -> Buffer:
        """A buffer on a device with what this one holds, for one append."""
        if self._coming is not None and self._coming[0] != device:
            self._coming = None
        self.fetch(device)
        copy = Buffer(self.retention)
        if self._coming is not None:
            copy.span, copy.storages = self.span, self._coming[1]()
            self._coming = None
        return copy


def fetch_ahead(buffers: list[Any], at: int, device: torch.device) -> None:
    """Before buffer `at` is appended to, start to bring it to a device, and the next one in host memory behind it.

    Not the first one after the last: nothing is on the device between two forwards.
    """
    for buffer in [each for each in buffers[at:] if isinstance(each, HostBuffer)][:2]:
        buffer.fetch(device)


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
