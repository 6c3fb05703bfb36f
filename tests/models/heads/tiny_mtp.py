"""A Qwen3-Next checkpoint with an MTP layer. ``transformers`` drops its tensors, but has the same decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny_models

# As the layer's own are stored: what one is to be added to.
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")


@dataclass
class TinyMtp:
    """The layer as a model of one layer, and its input projection."""

    body: PreTrainedModel
    fc: Tensor  # [hidden, 2 * hidden]
    norms: dict[str, Tensor]

    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Of one sequence, the tokens at p + 1 and the target's states at p: [n, hidden], after the last norm."""
        eps = self.body.config.rms_norm_eps
        joined = []
        for x, name in ((embedded, _NORMS[0]), (hidden, _NORMS[1])):
            joined.append(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + self.norms[name]))
        x = torch.cat(joined, dim=-1) @ self.fc.T
        out: Tensor = self.body.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out

    def write(self, folder: Path) -> None:
        """Beside the target's tensors."""
        own = folder / "mtp"
        self.body.save_pretrained(own)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in load_file(own / "model.safetensors").items():
            if name.startswith(("model.layers.", "model.norm.")):
                tensors[name.replace("model.", "mtp.", 1)] = tensor
        tensors["mtp.fc.weight"] = self.fc
        tensors |= {f"mtp.{name}.weight": tensor for name, tensor in self.norms.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def random_mtp(seed: int = 9, scale: float = 1.0, **changes: object) -> TinyMtp:
    """``scale``: of what the layer adds to its stream."""
    body = tiny_models.build("qwen3-next", seed, num_hidden_layers=1, layer_types=["full_attention"], **changes)
    size = body.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter *= scale
    norms = {name: torch.rand(size, generator=generator) - 0.5 for name in _NORMS}
    return TinyMtp(body, torch.randn(size, 2 * size, generator=generator) / size**0.5, norms)


def write_hybrid(folder: Path, **changes: object) -> Path:
    """A target whose next token is mostly, and never only, a matter of the last: some drafts are right, some not."""
    model = tiny_models.build("qwen3-next", initializer_range=0.3, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter *= 0.012
    tiny_models.save(model, folder)
    # An MTP layer that has the next token from the embedding alone, but for what it adds itself.
    mtp = random_mtp(scale=0.012, initializer_range=0.3, **changes)
    mtp.fc = torch.cat([torch.eye(mtp.fc.shape[0]), 0.01 * mtp.fc[:, mtp.fc.shape[0] :]], dim=1)
    mtp.norms["pre_fc_norm_embedding"].zero_()
    with torch.no_grad():
        mtp.body.model.norm.weight.copy_(model.model.norm.weight)
    mtp.write(folder)
    return folder
