import os
import signal

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: threads only get in each other's way
# A shell that starts the tests in the background has them, and all that they start, ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-architecture", action="store_true", help="test all of transformers' architectures, not a sample"
    )
