"""A DeepSeek checkpoint with MTP layers as published: numbered after the target's own, with its own decoder layer.

``transformers`` writes none of them; their decoder layer is a model of one layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny_models

ADDING = ("o_proj.weight", "down_proj.weight", "down_proj")  # products that add to the stream


@dataclass
class DeepseekMtp:
    """One layer as a model of one layer, and its input projection."""

    body: PreTrainedModel
    eh_proj: Tensor  # [hidden, 2 * hidden]
    norms: dict[str, Tensor]

    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Of one sequence, the tokens at p + 1 and the target's states at p: [n, hidden], after the last norm."""
        eps, joined = self.body.config.rms_norm_eps, []
        embedded = embedded.clone()
        embedded[0] = 0  # some layers were trained so, and vLLM keeps to it
        for x, name in ((embedded, "enorm"), (hidden, "hnorm")):
            joined.append(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.norms[name])
        x = torch.cat(joined, dim=-1) @ self.eh_proj.T
        out: Tensor = self.body.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out

    def tensors(self, idx: int, folder: Path) -> dict[str, Tensor]:
        """By their names in a checkpoint whose own layers are fewer than ``idx + 1``."""
        self.body.save_pretrained(folder)
        found, prefix = {}, f"model.layers.{idx}."
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                found[prefix + name.removeprefix("model.layers.0.")] = tensor
        found[f"{prefix}shared_head.norm.weight"] = self.body.model.norm.weight.detach()
        found[f"{prefix}eh_proj.weight"] = self.eh_proj
        return found | {f"{prefix}{name}.weight": tensor for name, tensor in self.norms.items()}


def random_mtp(seed: int = 9, scale: float = 1.0, variant: str = "deepseek-v3", **changes: object) -> DeepseekMtp:
    """``scale``: of what the layer adds to its stream."""
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    body = tiny_models.build(variant, seed, **{**one, **changes})
    size, generator = body.config.hidden_size, torch.Generator().manual_seed(seed)
    _weaken(body, scale)
    norms = {name: torch.rand(size, generator=generator) + 0.5 for name in ("enorm", "hnorm")}
    return DeepseekMtp(body, torch.randn(size, 2 * size, generator=generator) / size**0.5, norms)


def _weaken(model: PreTrainedModel, scale: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ADDING):
                parameter *= scale


def write_target(
    folder: Path, mtp: list[DeepseekMtp], scale: float = 1.0, variant: str = "deepseek-v3", **changes: object
) -> PreTrainedModel:
    """A target with these layers after its own."""
    model = tiny_models.build(variant, **changes)
    _weaken(model, scale)
    tiny_models.save(model, folder)
    tensors, num_layers = load_file(folder / "model.safetensors"), model.config.num_hidden_layers
    for idx, layer in enumerate(mtp):
        tensors |= layer.tensors(num_layers + idx, folder / "mtp")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": len(mtp)}))
    return model


def write_guessing(folder: Path, num_layers: int = 1, scale: float = 0.03, variant: str = "deepseek-v3") -> Path:
    """A target whose next token is mostly, and never only, a matter of the last: some drafts are right, some not."""
    layers = []
    for idx in range(num_layers):
        mtp = random_mtp(9 + idx, scale, variant, initializer_range=0.3)
        # The next token from the embedding alone, but for what the layer adds itself.
        mtp.eh_proj = torch.cat([torch.eye(mtp.eh_proj.shape[0]), 0.01 * mtp.eh_proj[:, mtp.eh_proj.shape[0] :]], dim=1)
        mtp.norms["enorm"].fill_(1.0)
        layers.append(mtp)
    model = write_target(folder, [], scale, variant, initializer_range=0.3)
    for mtp in layers:
        with torch.no_grad():
            mtp.body.model.norm.weight.copy_(model.model.norm.weight)
    write_target(folder, layers, scale, variant, initializer_range=0.3)
    return folder
