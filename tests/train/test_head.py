"""What is trained is what is run, and its gradients are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.train import attention as attention_module
from slipstream.train import loss as loss_module
from slipstream.train.attention import KeyValue, draft_attention
from slipstream.train.eagle3 import make_head
from slipstream.train.export import write_head
from slipstream.train.loss import soft_cross_entropy, target_distribution
from slipstream.train.settings import FORMATS, TrainSettings
from slipstream.train.target import padded_length
from slipstream.train.trainer import Trainer
from slipstream.train.vocabulary import choose_vocabulary
from tests import tiny_models
from tests.engine.drive import make_request, run
from tests.speculate.test_head_drafts import watch
from tests.train.conftest import OPTIONS, open_target_model
from tests.train.test_trainer import random_texts


def naive_attention(q: Tensor, past: list[KeyValue]) -> Tensor:
    """One row, index and head at a time."""
    rows, length, heads, head_dim = q.shape
    group = heads // past[0][0].shape[2]
    out = []
    for row in range(rows):
        for t in range(length):
            for head in range(heads):
                kv = head // group
                keys = torch.cat([past[0][0][row, : t + 1, kv], *(k[row, t : t + 1, kv] for k, _ in past[1:])])
                values = torch.cat([past[0][1][row, : t + 1, kv], *(v[row, t : t + 1, kv] for _, v in past[1:])])
                out.append((keys @ q[row, t, head] / head_dim**0.5).softmax(dim=0) @ values)
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (3, 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_of_a_draft_step(
    num_steps: int, heads: int, kv_heads: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "_has_fused_kernel", lambda _q: fused)
    generator = torch.Generator().manual_seed(num_steps)

    def random(num_heads: int) -> Tensor:
        return torch.randn(2, 5, num_heads, 6, generator=generator, dtype=torch.float64).requires_grad_()

    q, past = random(heads), [(random(kv_heads), random(kv_heads)) for _ in range(num_steps)]
    inputs = [q, *(part for pair in past for part in pair)]
    pull = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    ours, naive = draft_attention(q, past), naive_attention(q, past)
    torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad(ours, inputs, pull), torch.autograd.grad(naive, inputs, pull), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)


def test_loss_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_CHUNK", 3)  # several parts, the last one smaller
    generator = torch.Generator().manual_seed(0)
    states, weight, normed, head = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (7, 11, 7, 11))
    target = target_distribution(normed, head)
    torch.testing.assert_close(target, (normed @ head.T).softmax(dim=-1))
    inputs = [states.requires_grad_(), weight.requires_grad_()]
    ours = soft_cross_entropy(states, weight, target)
    plain = torch.nn.functional.cross_entropy(states @ weight.T, target)
    torch.testing.assert_close(ours, plain)
    mine, expected = torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * plain, inputs)
    for left, right in zip(mine, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("format", FORMATS)
def test_the_engine_drafts_the_trainers_chain(format: str, target: Path, tmp_path: Path) -> None:  # noqa: A002
    settings = TrainSettings(**OPTIONS, model=str(target), out=str(tmp_path))
    target_model = open_target_model(target)
    ids = torch.randperm(272, generator=torch.Generator().manual_seed(5))[:200]
    vocabulary = choose_vocabulary(ids, 272, 200)
    head = make_head(settings, target_model, vocabulary)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # far enough from its beginning that every weight matters
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    write_head(
        tmp_path,
        head,
        vocabulary,
        target_model.config,
        format=format,
        dtype=torch.float64,
        verifier=str(target),
        num_drafts=3,
    )
    speculative = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 4}
    options = {"model": str(target), "dtype": "float64", "block_size": 4, "long_prefill_token_threshold": 5}
    core = build_engine(EngineOptions.from_dict({**options, "max_num_seqs": 3, "speculative_config": speculative})).core
    with torch.inference_mode():
        seen = watch(core)
        prompts = [[3, 200, 17, 45, 90, 8, 131], [60, 61], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
        run(core, [make_request(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)])
    assert len(seen) > 12
    different = set()
    for drafted in seen:
        tokens = torch.zeros(1, padded_length(len(drafted.tokens)), dtype=torch.int64)
        tokens[0, : len(drafted.tokens)] = torch.tensor(drafted.tokens)
        drafts = head.drafts(target_model.read(tokens).features, tokens, 4)[0, len(drafted.tokens) - 2]
        assert drafted.drafts[: drafted.room] == drafts[: drafted.room].tolist()
        different.add(tuple(drafts.tolist()))
    assert len(different) > 6


def test_types_fit_in_sixteen_bits(target: Path, tmp_path: Path) -> None:
    """As on a GPU: products in bfloat16, weights and their gradients in float32. Shapes and types only: not every CPU
    that the suite runs on can multiply such numbers."""
    settings = TrainSettings(**OPTIONS, model=str(target), out=str(tmp_path))
    target_model = open_target_model(target, "float32")
    head = make_head(settings, target_model, choose_vocabulary(torch.arange(200), 272, 200))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, buffer in list(head.named_buffers()):
            setattr(head, name, mode.from_tensor(buffer.bfloat16() if name == "embedding" else buffer))
        features, token_ids = torch.zeros(2, 16, 96, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.int64)
        normed, matrix = torch.zeros(9, 32, dtype=torch.bfloat16), torch.zeros(200, 32, dtype=torch.bfloat16)
        distribution = target_distribution(normed, matrix)
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for states in head.states(features, token_ids, 3):
                assert states.dtype is torch.float32
                rows = head.norm(states.flatten(0, 1)[torch.arange(9)])
                loss = loss + soft_cross_entropy(rows, head.lm_head.weight, distribution)
        loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype is torch.float32
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in head.parameters())


def test_a_head_begins_with_the_targets_last_layer(target: Path, tmp_path: Path) -> None:
    settings = TrainSettings(**OPTIONS, model=str(target), out=str(tmp_path))
    target_model = open_target_model(target)
    head = make_head(settings, target_model, choose_vocabulary(torch.arange(200), 272, 200))
    theirs = load_file(target / "model.safetensors")
    layer = {name: theirs[f"model.layers.6.{name}.weight"].double() for name in target_layer_names()}
    ours = {name: head.midlayer.get_parameter(f"{name}.weight") for name in layer if name != "input_layernorm"}
    for name, weight in ours.items():
        assert torch.equal(weight[..., -layer[name].shape[-1] :], layer[name])
    assert torch.equal(head.midlayer.hidden_norm.weight, layer["input_layernorm"])
    assert torch.equal(head.midlayer.input_layernorm.weight, torch.ones(32, dtype=torch.float64))
    assert torch.equal(head.lm_head.weight, theirs["lm_head.weight"].double()[:200])


def target_layer_names() -> list[str]:
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    return [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize("variant", ["gemma3", "mixtral", "qwen3", "qwen2-tied", "llama-biases", "phi3"])
def test_other_targets(variant: str, tmp_path: Path) -> None:
    """One step for each kind of model."""
    folder = tiny_models.save(
        tiny_models.build(variant, num_hidden_layers=7, **_WITH_WINDOWS.get(variant, {})), tmp_path
    )
    settings = TrainSettings(**OPTIONS, model=str(folder), out=str(tmp_path / "out"))
    target_model = open_target_model(folder, "float32")
    head = make_head(settings, target_model, choose_vocabulary(torch.arange(200), 272, 200))
    trainer = Trainer(settings, target_model, head, random_texts(12), tmp_path / "checkpoint")
    losses = [float(trainer.train_step(0.5)) for _ in range(3)]
    assert losses[-1] < losses[0]


_WITH_WINDOWS = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]}}
