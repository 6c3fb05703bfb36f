"""Fixtures that several parts of the suite share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from slipstream.models.hub import resolve_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.weights import open_checkpoint

# A step that reads what it did not write must not pass a test by luck.
os.environ["SLIPSTREAM_POISON"] = "1"
# A shell that starts the suite in the background has it ignore Ctrl-C, which programs that it starts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tiny models gain nothing from threads, and lose much where other processes want the cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", help="a model folder for the tests on a GPU, instead of a tiny random one")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: in the cache, or fetched once."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(smollm2_path).tokenizer()
