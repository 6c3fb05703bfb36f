"""The checkpoints of ``lossless_fuzz.py``: two tiny random targets, and drafters that are often right and often wrong.

A random drafter is never right, and a fuzz in which no draft is accepted says nothing. So the targets' next token is
mostly, and never only, a matter of the last one, and each drafter computes that from the embedding of the last token
alone, but for small random parts of its own, which read the caches that a real one reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny_models
from tests.models.heads import tiny_heads
from tests.models.heads.tiny_mtp import write_hybrid

NUM_LAYERS = 4
CONTEXT = 256
LETTERS = "abcdefghijklmnop"
_BYTES = (0xC3, 0xE2, 0xA4, 0xA9, 0xB1)  # that begin and end characters of several bytes, which tokens cut in two
_SIZE = tiny_heads.HIDDEN
_LONG = {"max_position_embeddings": CONTEXT}
_WIDE = {**_LONG, "num_key_value_heads": 4, "attention_bias": True}  # of the EAGLE-3 head: values of the full width
_OUTPUTS = ("o_proj.weight", "down_proj.weight")  # what a layer adds to its stream
# Of what the target's layers add beside the embedding: attention brings the context, the rest only obscures the token.
_TARGET_SHARES = {"o_proj.weight": 0.02, "down_proj.weight": 0.003}
_OWN_SHARE = 0.03  # of a drafter's own parts, beside the embedding


@dataclass(frozen=True)
class Folders:
    """Where the checkpoints are. The target with MTP layers is otherwise the same as the one without."""

    target: Path
    draft_model: Path
    eagle: Path
    eagle3: Path
    mtp: Path
    hybrid: Path


def write_models(folder: Path) -> Folders:
    folders = Folders(*(folder / name for name in Folders.__dataclass_fields__))
    for path in vars(folders).values():
        path.mkdir()
    target = build_target()
    tiny_models.save(target, folders.target)
    _write_first_layer(target, folders.draft_model)
    tensors = {name: tensor.detach().double() for name, tensor in target.state_dict().items()}
    _make_eagle(tensors).write(folders.eagle)
    _make_eagle3(tensors).write(folders.eagle3)
    tiny_models.save(target, folders.mtp)
    _add_mtp_layers(tensors, folders.mtp)
    write_hybrid(folders.hybrid, max_position_embeddings=CONTEXT)
    _favour_letters_of(folders.hybrid)
    return folders


def list_favoured_ids() -> list[int]:
    """Tokens that the targets mostly choose from, as the byte-level tokenizer numbers them."""
    alphabet = sorted(ByteLevel.alphabet())  # from 0xA1 on a byte is written as its character
    return [*(alphabet.index(char) for char in (*LETTERS, *map(chr, _BYTES))), tiny_models.EOS_ID]


# --- targets --------------------------------------------------------------------------------------


def build_target() -> PreTrainedModel:
    model = tiny_models.build("llama", num_hidden_layers=NUM_LAYERS, **_LONG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for output, share in _TARGET_SHARES.items():
                if name.endswith(output):
                    parameter *= share
        model.lm_head.weight *= _make_gains()  # type: ignore[operator]
    return model


def _make_gains() -> Tensor:
    gains = torch.full((tiny_models.VOCAB_SIZE, 1), 0.5)
    gains[list_favoured_ids()] = 1.5
    return gains


def _favour_letters_of(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= _make_gains()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# --- drafters -------------------------------------------------------------------------------------


def _write_first_layer(target: PreTrainedModel, folder: Path) -> None:
    """A draft model: the target with its first layer alone."""
    model = tiny_models.build("llama", num_hidden_layers=1, **_LONG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(target.get_parameter(name))
    tiny_models.save(model, folder)


def _scale_outputs(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith(_OUTPUTS):
            tensors[name] *= _OWN_SHARE


def _make_eagle(target: dict[str, Tensor]) -> tiny_heads.Case:
    """Its output goes to the target's output matrix as it is, so ``fc`` does what the target's last norm does."""
    case = tiny_heads.eagle(_LONG)
    _scale_outputs(case.tensors)
    embedding = target["model.embed_tokens.weight"]
    from_embedding = torch.diag(target["model.norm.weight"] / embedding.square().mean().sqrt())
    from_state = _OWN_SHARE * case.tensors["fc.weight"][:, _SIZE:]
    case.tensors["fc.weight"] = torch.cat([from_embedding, from_state], dim=1)
    return case


def _make_eagle3(target: dict[str, Tensor]) -> tiny_heads.Case:
    """Only attention reads the embedding, so each token attends mostly to itself: by large biases that rope turns."""
    case = tiny_heads.eagle3({tiny_heads.TAPS: [0, 2, NUM_LAYERS]}, _WIDE)
    tensors, layer = case.tensors, "midlayer.self_attn."
    ids = torch.tensor(sorted({*list_favoured_ids(), *range(0, tiny_models.VOCAB_SIZE, 4)})[: tiny_heads.DRAFT_VOCAB])
    mask = torch.zeros(tiny_models.VOCAB_SIZE, dtype=torch.bool)
    mask[ids] = True
    case.config["draft_vocab_size"] = len(ids)
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    tensors |= {"lm_head.weight": target["lm_head.weight"][ids].clone(), "norm.weight": target["model.norm.weight"]}
    tensors["fc.weight"] *= _OWN_SHARE
    tensors["midlayer.mlp.down_proj.weight"] *= _OWN_SHARE
    tensors["midlayer.input_layernorm.weight"].fill_(1.0)
    head_dim = case.config["head_dim"]
    turned = torch.where(torch.arange(head_dim) % (head_dim // 2) < 4, 8.0, 0.0)  # rope's fastest frequencies
    for name in ("q_proj", "k_proj"):
        tensors[f"{layer}{name}.weight"] *= 0.2
        tensors[f"{layer}{name}.bias"] = turned.double().repeat(_SIZE // head_dim)
    from_state = _OWN_SHARE * tensors[f"{layer}v_proj.weight"][:, _SIZE:]
    tensors[f"{layer}v_proj.weight"] = torch.cat([torch.eye(_SIZE, dtype=torch.float64), from_state], dim=1)
    tensors[f"{layer}o_proj.weight"] = torch.eye(_SIZE, dtype=torch.float64)
    for name in ("v_proj", "o_proj"):
        tensors[f"{layer}{name}.bias"] = torch.zeros(_SIZE, dtype=torch.float64)
    return case


def _add_mtp_layers(target: dict[str, Tensor], folder: Path, count: int = 2) -> None:
    """Two layers in DeepSeek's form, which take turns, beside the target's own tensors."""
    body: dict[str, Any] = json.loads((folder / "config.json").read_text())
    shapes: dict[str, tuple[int, ...]] = {}
    for idx in range(NUM_LAYERS, NUM_LAYERS + count):
        prefix = f"model.layers.{idx}."
        names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        shapes |= tiny_heads.layer_shapes(prefix, body) | {f"{prefix}{name}.weight": (_SIZE,) for name in names}
        shapes[f"{prefix}eh_proj.weight"] = (_SIZE, 2 * _SIZE)
    own = tiny_heads.random_tensors(shapes)
    _scale_outputs(own)
    for idx in range(NUM_LAYERS, NUM_LAYERS + count):
        prefix = f"model.layers.{idx}."
        from_state = _OWN_SHARE * own[f"{prefix}eh_proj.weight"][:, _SIZE:]
        own[f"{prefix}eh_proj.weight"] = torch.cat([torch.eye(_SIZE, dtype=torch.float64), from_state], dim=1)
        own[f"{prefix}enorm.weight"].fill_(1.0)
        own[f"{prefix}shared_head.norm.weight"] = target["model.norm.weight"]
    (folder / "config.json").write_text(json.dumps({**body, "num_nextn_predict_layers": count}))
    tensors = load_file(folder / "model.safetensors") | {name: tensor.float() for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
