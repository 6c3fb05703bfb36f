"""DFlash heads as files, in the layout of the first published ones and in that of the ``speculators`` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.heads.network import HeadPlan
from slipstream.models.heads.registry import read_head
from slipstream.train.block_head import TrainableBlockHead
from slipstream.train.export import layer_config, write_files
from slipstream.train.settings import BlockSettings

_MOST_TAPS = 5


def default_block_taps(target: ModelConfig) -> tuple[int, ...]:
    """The numbers of layers after which the target is tapped: evenly spaced from the second to all but two."""
    last = target.num_layers - 3
    count = min(_MOST_TAPS, last)
    if count < 2:
        raise ConfigError(
            f"the model has {target.num_layers} layers; a DFlash head taps several, which takes 5 or more"
        )
    return tuple(2 + round(i * (last - 1) / (count - 1)) for i in range(count))


def plan_block_head(target: ModelConfig, settings: BlockSettings, mask_id: int, dtype: torch.dtype) -> HeadPlan:
    """The network to train, read from the config that will be written, so that it equals the network that is run."""
    return read_head(block_config(target, settings, mask_id, dtype), target, "dflash")


def block_config(target: ModelConfig, settings: BlockSettings, mask_id: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **_layers_config(target, settings, dtype),
        "num_target_layers": target.num_layers,
        "block_size": settings.block_size,
        # The index of the layer whose output is tapped.
        "dflash_config": {
            "mask_token_id": mask_id,
            "target_layer_ids": [tap - 1 for tap in default_block_taps(target)],
            "block_size": settings.block_size,
            "causal": False,
        },
    }


def block_speculators_config(
    target: ModelConfig, settings: BlockSettings, mask_id: int, dtype: torch.dtype
) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": settings.num_drafts}
    return {
        "architectures": ["DFlashSpeculator"],
        "model_type": "speculators",
        "speculators_model_type": "dflash",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": settings.model, "architectures": [target.architecture]},
        },
        "transformer_layer_config": _layers_config(target, settings, dtype),
        "draft_vocab_size": target.vocab_size,
        "block_size": settings.block_size,
        "target_hidden_size": target.hidden_size,
        "aux_hidden_state_layer_ids": list(default_block_taps(target)),  # layers before the tap
        "mask_token_id": mask_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _layers_config(target: ModelConfig, settings: BlockSettings, dtype: torch.dtype) -> dict[str, Any]:
    """Layers of the target's size, with norms on queries and keys."""
    layers = settings.layers
    return {
        **layer_config(target, dtype),
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }


def write_block_head(
    folder: Path,
    head: TrainableBlockHead,
    target: ModelConfig,
    settings: BlockSettings,
    dtype: torch.dtype,
    matrix: Tensor,
) -> Path:
    """Embedding and output matrix are the target's: the first layout leaves them out, the other has copies."""
    mask_id = head.block.mask_id
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    if settings.format == "speculators":
        shared = {"embed_tokens.weight": head.embedding, "lm_head.weight": matrix}
        tensors |= {name: value.detach().to("cpu", dtype).clone() for name, value in shared.items()}
        config = block_speculators_config(target, settings, mask_id, dtype)
    else:
        config = block_config(target, settings, mask_id, dtype)
    return write_files(folder, tensors, config)
