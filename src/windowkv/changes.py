"""Whether what changes a cache layer by layer came to its end.

Knows that layers change, and when. Knows nothing of what they hold.
"""


class Changes:
    """The change that goes on, and whether one broke off with some layers changed and others not.

    >>> changes = Changes()
    >>> changes.begin()
    >>> changes.broken  # no layer has changed yet
    False
    >>> changes.touch()
    >>> changes.broken
    True
    >>> changes.end()
    >>> changes.broken
    False
    """

    def __init__(self) -> None:
        """Know of no change."""
        self._open = self._touched = self._broke = False

    @property
    def broken(self) -> bool:
        """Whether some change began and did not end."""
        return self._broke or (self._open and self._touched)

    def begin(self) -> None:
        """Note that layers are about to change, one by one."""
        self._broke = self.broken
        self._open, self._touched = True, False

    def touch(self) -> None:
        """Note that the first of them did."""
        self._touched = True

    def end(self) -> None:
        """Note that all of them have changed."""
        self._open = self._touched = False
