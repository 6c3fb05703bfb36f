"""Fixtures that several parts of the suite share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import gguf

# Left out of `make test-fast`: engines in processes of their own, the default model, statistics, long simulations.
# Each room keeps files that are not among them; a single test elsewhere is marked `long`.
LONG_FILES = {
    *("tests/attention/backends/test_flex.py", "tests/commands/test_generate.py", "tests/commands/test_tune.py"),
    *("tests/engine/test_default_model.py", "tests/engine/test_loop.py", "tests/engine/test_process.py"),
    *(
        "tests/kernels/attention/test_triton_attention.py",
        "tests/checkpoints/test_gguf.py",
        "tests/text/test_tokenizer.py",
    ),
    *("tests/server/test_abuse.py", "tests/server/test_crash.py", "tests/server/test_extremes.py"),
    *("tests/server/test_front_ends.py", "tests/server/test_hostile_clients.py", "tests/server/test_signals.py"),
    *("tests/server/test_speculation.py", "tests/sim/test_drafter_failures.py", "tests/sim/test_failures.py"),
    *("tests/sim/test_recurrent.py", "tests/sim/test_seeds.py", "tests/speculate/test_eagle.py"),
    *("tests/speculate/test_hybrid.py", "tests/speculate/test_lossless.py", "tests/speculate/test_ngram_search.py"),
    *("tests/speculate/test_rejection.py", "tests/speculate/test_unbiased_engine.py", "tests/test_lossless_fuzz.py"),
    *("tests/test_shipped_head.py", "tests/train/test_trainer.py", "tests/train/test_train.py"),
    "tests/weights/test_gguf_blocks.py",
}

# A step that reads what it did not write must not pass a test by luck.
os.environ["SLIPSTREAM_POISON"] = "1"
# A shell that starts the suite in the background makes it ignore Ctrl-C, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tiny models gain nothing from threads, and lose much where other processes need the cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", help="a model folder for the tests on a GPU, instead of a tiny random one")
    parser.addoption("--fast", action="store_true", help="the first case of each test, without long ones")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes in a test's name may hold the time of day (a sound file does), and workers must collect the same names."""
    return argname if isinstance(val, bytes) and len(val) > 16 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For the inner loop: a test with many cases runs one, so that every room is covered in little time."""
    if not config.getoption("--fast"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("long") is None and item.nodeid.partition("::")[0] not in LONG_FILES:
            kept.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=list({*items}.difference(kept.values())))
    items[:] = kept.values()


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


@pytest.fixture(scope="session")
def smollm2_reader(smollm2_path: Path) -> gguf.GGUFReader:
    """The default model's file as the ``gguf`` package reads it, which takes it two seconds."""
    import gguf

    return gguf.GGUFReader(smollm2_path)
