"""Writing while a model computes: one task at a time on a thread of its own.

Knows threads. Knows nothing of what is written.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs tasks one after the other, and none before the one ahead is done.

    What fails is logged: nobody waits for it. A program that ends waits for the last one.
    """

    def __init__(self) -> None:
        """Have nothing to do yet."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        """Start a task as soon as the one ahead is done, for which this waits."""
        with self._lock:
            self._join()
            # A thread per task: one that waits for tasks would be missing in a forked process.
            self._thread = threading.Thread(target=_run, args=(task,), name="windowkv-writer")
            self._thread.start()

    def wait(self) -> None:
        """Return when nothing is left to do."""
        with self._lock:
            self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _run(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception as why:  # every filesystem has errors of its own
        logger.warning("a beginning was not written to its file: %s", why)
