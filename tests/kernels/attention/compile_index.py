"""Compile a sparse indexer and its attention in DeepSeek-V3.2's sizes, as ``compile_latent`` does.

``python -m tests.kernels.attention.compile_index 90 bfloat16``.
"""

from __future__ import annotations

import sys

from tests.kernels.attention.compile_latent import compile_all  # isort: skip; decides how kernels are defined

import torch

from slipstream.kernels.attention import sparse_latent
from tests.kernels.triton_cases_index import of_deepseek_indexer

if __name__ == "__main__":
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), (sparse_latent,), of_deepseek_indexer())
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
