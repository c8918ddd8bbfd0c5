"""Pictures: functions that draw on an axes, on a new one where none is passed, and return the matplotlib figure."""

import lazy_loader

# The names are in __init__.pyi. What draws is imported at its first use, and matplotlib, an extra, when it draws.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
