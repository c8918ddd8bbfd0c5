import os
import signal
from collections import Counter

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: threads only get in each other's way
# A shell that starts the tests in the background has them, and all that they start, ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-architecture", action="store_true", help="test all of transformers' architectures, not a sample"
    )
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run the first of every N tests of a file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    step, place = config.getoption("--one-in"), Counter[str]()
    kept, others = [], []
    for item in items:
        (others if place[item.path.name] % step else kept).append(item)
        place[item.path.name] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in every run, so that a change passes or fails by itself; new ones with all architectures."""
    hypothesis.settings.register_profile("same", derandomize=True)
    if not config.getoption("--every-architecture"):
        hypothesis.settings.load_profile("same")
