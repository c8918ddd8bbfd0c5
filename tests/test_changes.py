"""What broke off stays so, whatever comes after it."""

import copy

from windowkv.changes import Changes


def test_a_change_that_broke_off_stays_so() -> None:
    changes = Changes()
    changes.begin()
    changes.touch()
    changes.end()
    assert not changes.broken
    changes.begin()
    changes.begin()  # the first ended before any layer changed
    assert not changes.broken
    changes.touch()
    assert changes.broken
    assert copy.copy(changes).broken
    changes.begin()
    changes.end()
    assert changes.broken
