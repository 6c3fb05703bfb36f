import os

import torch

# Without a GPU Triton kernels are interpreted. Triton looks when a kernel is defined, hence before any import of ours.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
