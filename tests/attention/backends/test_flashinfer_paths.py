"""Which of FlashInfer's kernels serve where, what each promises, and what a batch must be told for them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from slipstream.attention.backends import flashinfer_library
from slipstream.attention.backends.flashinfer_library import FlashInferLibrary
from slipstream.attention.backends.flashinfer_paths import Choice, Features, HeadShape, Paths, choose_paths, needs_of
from slipstream.errors import ConfigError

LLAMA = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
PLAIN, DRAFTS = Features(), Features(query_len=4)
SM = {"80": (8, 0), "89": (8, 9), "90": (9, 0), "100": (10, 0), "103": (10, 3), "120": (12, 0)}
CHOSEN = {
    "80": ("native", "native"),
    "89": ("native", "native"),
    "90": ("native", "xqa"),
    "100": ("trtllm", "trtllm"),
    "103": ("trtllm", "trtllm"),
    "120": ("native", "native"),
}


def names(paths: Paths) -> tuple[str, str]:
    return paths.prefill.path, paths.decode.path


@pytest.mark.parametrize("features", [PLAIN, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("sm", SM)
def test_each_machine_has_its_paths(sm: str, features: Features) -> None:
    paths = choose_paths(SM[sm], LLAMA, features, installed=True)
    assert names(paths) == CHOSEN[sm]
    assert paths.problem is None and paths.check() is paths
    for choice in (paths.prefill, paths.decode):
        assert f"sm_{sm}" in choice.reason


@pytest.mark.parametrize("features", [PLAIN, DRAFTS, Features(window=64), Features(cascade=True)])
@pytest.mark.parametrize("sm", SM)
def test_without_the_package_there_is_one_line_to_read(sm: str, features: Features) -> None:
    paths = choose_paths(SM[sm], LLAMA, features, installed=False)
    assert names(paths) == ("none", "none")
    with pytest.raises(ConfigError, match=r"not installed; pip install 'slipstream\[flashinfer\]'") as error:
        paths.check()
    assert "\n" not in str(error.value)


def test_the_library_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_library, "is_installed", lambda: False)
    paths = choose_paths(SM["90"], LLAMA, PLAIN, installed=True)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[flashinfer\]'"):
        FlashInferLibrary(paths, torch.device("cpu"))


def test_importing_slipstream_does_not_import_the_package() -> None:
    modules = "slipstream.attention.backends.flashinfer, slipstream.attention.backends.flashinfer_library"
    code = f"import sys, {modules}; assert 'flashinfer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("capability", "shape", "features", "reason"),
    [
        (None, LLAMA, PLAIN, "NVIDIA GPU"),
        ((7, 5), LLAMA, PLAIN, "sm_80 or newer, this is sm_75"),
        ((9, 0), LLAMA._replace(dtype="float32"), PLAIN, "float32"),
        ((9, 0), LLAMA._replace(head_dim=96), PLAIN, "heads of 96"),
        ((9, 0), LLAMA._replace(num_kv_heads=5), PLAIN, "multiple"),
        *((capability, LLAMA, Features(seq_starts=True), "gaps") for capability in SM.values()),
    ],
)
def test_what_it_cannot_do_at_all(
    capability: tuple[int, int] | None, shape: HeadShape, features: Features, reason: str
) -> None:
    paths = choose_paths(capability, shape, features, installed=True)
    assert names(paths) == ("none", "none")
    assert paths.problem is not None and reason in paths.problem
    with pytest.raises(ConfigError, match=reason):
        paths.check()


def test_xqa_has_no_window_for_drafts() -> None:
    assert names(choose_paths(SM["90"], LLAMA, Features(window=64), True)) == ("native", "xqa")
    paths = choose_paths(SM["90"], LLAMA, Features(query_len=4, window=64), True)
    assert names(paths) == ("native", "native") and "window" in paths.decode.reason
    # Where lengths stay on the device and each token is masked for itself, both are possible.
    assert names(choose_paths(SM["100"], LLAMA, Features(query_len=4, window=64), True)) == ("trtllm", "trtllm")


@pytest.mark.parametrize(
    ("sm", "shape", "features", "chosen"),
    [
        ("90", LLAMA._replace(page_size=8), PLAIN, ("native", "native")),
        ("90", LLAMA._replace(page_size=128), PLAIN, ("native", "xqa")),
        ("90", LLAMA._replace(num_heads=64, num_kv_heads=1), PLAIN, ("native", "native")),
        ("90", LLAMA, Features(query_len=33), ("native", "native")),
        ("90", LLAMA._replace(num_heads=9, num_kv_heads=3, head_dim=64), PLAIN, ("native", "xqa")),
        ("100", LLAMA._replace(page_size=128), PLAIN, ("native", "native")),
        ("100", LLAMA._replace(page_size=64), DRAFTS, ("trtllm", "trtllm")),
    ],
)
def test_shapes_that_only_some_kernels_have(
    sm: str, shape: HeadShape, features: Features, chosen: tuple[str, str]
) -> None:
    assert names(choose_paths(SM[sm], shape, features, installed=True)) == chosen


def test_a_common_beginning_has_a_plan_of_its_own() -> None:
    for sm in SM:
        assert choose_paths(SM[sm], LLAMA, Features(cascade=True), True).cascade.path == "native"
        assert choose_paths(SM[sm], LLAMA, PLAIN, True).cascade.path == "none"
        assert choose_paths(SM[sm], LLAMA, Features(cascade=True, window=8), True).cascade.path == "none"


@pytest.mark.parametrize("context_parallel", [False, True])
@pytest.mark.parametrize("sm", SM)
def test_what_paths_promise(sm: str, context_parallel: bool) -> None:
    paths = choose_paths(SM[sm], LLAMA, Features(context_parallel=context_parallel), installed=True)
    is_native = {"native": True, "xqa": False, "trtllm": False}
    prefill, decode = (is_native[name] for name in CHOSEN[sm])
    assert paths.prefill.host_lengths == ("exact" if prefill else "none")
    assert paths.decode.host_lengths == ("exact" if decode else "none")
    exact = "always" if decode or context_parallel else "prefill" if prefill else "never"
    assert paths.exact_lengths == exact
    assert paths.host_lengths == ("none" if exact == "never" else "exact")
    assert paths.decode_graphs == paths.graph_support == ("never" if decode or context_parallel else "decode")
    assert paths.prefill_graphs == "never"


def test_reasons_are_readable() -> None:
    lines = choose_paths(SM["90"], LLAMA, PLAIN, installed=True).lines()
    assert lines == (
        "prefill: native (trtllm context kernels need sm_100 or sm_103, this is sm_90)",
        "decode: xqa (sm_90: trtllm decode runs as XQA; lengths stay on the device)",
        "cascade: none (not enabled)",
    )


# --- guards ---------------------------------------------------------------------------------------

PREFILL, DECODE = ("native", "trtllm"), ("native", "trtllm", "xqa")


@pytest.mark.parametrize(
    ("prefill", "decode", "num_prefills", "num_decodes", "cascade", "parallel"),
    list(itertools.product(PREFILL, DECODE, (0, 2), (0, 3), (False, True), (False, True))),
)
def test_a_guard_judges_the_whole_batch(
    prefill: str, decode: str, num_prefills: int, num_decodes: int, cascade: bool, parallel: bool
) -> None:
    paths = Paths(Choice(prefill, ""), Choice(decode, ""), Choice("native", ""), parallel)  # type: ignore[arg-type]
    plans_on_host = (num_prefills > 0 and prefill == "native") or (num_decodes > 0 and decode == "native")
    needs = needs_of(paths, num_prefills, num_decodes, cascade, parallel)
    assert needs.all_uses_trtllm is not plans_on_host
    assert needs.seq_lens_cpu is (plans_on_host or cascade or parallel)
    assert needs.paged_kv_indices is (plans_on_host or cascade)
