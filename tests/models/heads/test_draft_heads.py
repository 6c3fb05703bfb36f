"""Draft heads of every published kind, loaded from files and run beside a plain double: the same states and drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.context import AttentionContext
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.checkpoints.speculators_format import proposed_tokens
from slipstream.device.sim import SimDevice
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.mtp import is_mtp_tensor, mtp_tensors
from slipstream.models.heads.registry import build_head, read_head
from slipstream.models.load import count_parameters, load_weights
from slipstream.models.registry import architecture_of
from tests.contexts import context_of, step_of
from tests.models.heads import plain_heads
from tests.models.heads.plain_heads import PlainHead
from tests.models.heads.tiny_heads import (
    BODY,
    CASES,
    HIDDEN,
    NUM_LAYERS,
    SPECULATORS,
    TAPS,
    VOCAB,
    Case,
    TinyTarget,
    default_dtype,
    eagle3,
    load,
    tiny_target,
)

PAGE_SIZE, PAGES_PER_REQUEST = 4, 5
NUM_REQUESTS = 3


class Run:
    """A head and its plain double over some requests. Keys of earlier passes are in pages, or computed anew."""

    def __init__(self, head: DraftHead, plain: PlainHead) -> None:
        self.head, self.plain = head, plain
        config, num_pages = head.config, 1 + NUM_REQUESTS * PAGES_PER_REQUEST
        shape = (num_pages + 1, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        dtype = head.borrowed.like.dtype
        # Unwritten slots must not be read.
        self.kv_caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(config.num_layers)]
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.block_table = order.view(NUM_REQUESTS, PAGES_PER_REQUEST).int()
        # What the plain double has seen, by request and MTP layer.
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def one_pass(self, step: int, rows: list[tuple[int, Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Rows of (request, ids, state, plain state); what both make of them."""
        layer = step % self.head.config.num_layers if self.head.plan.kind == "mtp" else 0
        starts, doubles = [], []
        for request, ids, _, state in rows:
            before = self.seen.get((request, layer))
            starts.append(0 if before is None else len(before[0]))
            whole = (ids, state) if before is None else (torch.cat([before[0], ids]), torch.cat([before[1], state]))
            self.seen[request, layer] = whole
            doubles.append(self.plain.forward(step, *whole)[starts[-1] :])
        context = self.context([row[0] for row in rows], starts, [len(row[1]) for row in rows])
        ids, states = torch.cat([row[1] for row in rows]).int(), torch.cat([row[2] for row in rows])
        out = self.head.forward(layer, ids, states, context)
        return list(out.split([len(row[1]) for row in rows])), doubles

    def context(self, requests: list[int], starts: list[int], lens: list[int]) -> AttentionContext:
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
        tables = [self.block_table[request] for request, n in zip(requests, lens, strict=True) for _ in range(n)]
        pages = torch.stack(tables).gather(1, (positions // PAGE_SIZE).unsqueeze(1)).squeeze(1)
        query_start_loc = torch.tensor([0, *lens]).cumsum(0).int()
        seq_lens = torch.tensor([start + n for start, n in zip(starts, lens, strict=True)]).int()
        metadata = CommonAttentionMetadata(
            num_reqs=len(requests),
            num_actual_tokens=len(positions),
            max_query_len=max(lens),
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc.numpy(),
            query_lens=torch.tensor(lens).int(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.numpy(),
            block_table=self.block_table[requests],
            slot_mapping=pages.long() * PAGE_SIZE + positions % PAGE_SIZE,
        )
        backend = ReferenceBackend()
        return context_of(backend, backend.build(metadata), self.kv_caches, positions, metadata.slot_mapping)


def close(ours: Tensor, plain: Tensor) -> None:
    assert ours.shape == plain.shape
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


def first_states(head: DraftHead, plain: PlainHead, target: TinyTarget, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the first pass takes, from the states of the target that each of the two asks for."""
    if target.config["model_type"] == "mixtral":
        final = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(len(ids)), dtype=torch.float64)
        after: list[Tensor] = []
    else:
        after, final = plain_heads.target_states(ids, target.tensors, target.config)
    features = torch.cat([after[tap] for tap in head.taps], dim=-1) if head.taps else final
    assert features.shape[1] == max(1, len(head.taps)) * HIDDEN
    return head.combine(features), plain.combine(plain.features(after, final))


# Which tokens of each request a pass takes: all at once, or in chunks that begin and end inside pages.
CHUNKS = {"one pass": [[(0, 11), (0, 5), (0, 1)]], "chunks": [[(0, 3), (0, 5), (0, 0)], [(3, 11), (5, 5), (0, 1)]]}


@torch.inference_mode()
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_drafts_what_the_plain_head_drafts(make: Callable[[], Case], chunks: Any, tmp_path: Path) -> None:
    case = make()
    head, target = load(case, tmp_path), tiny_target(case.target)
    plain = case.plain(case.config, case.tensors, target.plain)
    run = Run(head, plain)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in (11, 5, 1)]
    states = [first_states(head, plain, target, prompt[:-1]) for prompt in prompts]
    for ours, double in states:
        close(ours, double)
    num_layers = head.config.num_layers if head.plan.kind == "mtp" else 1
    for step in range(num_layers):  # every MTP layer has keys of its own
        outputs: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in prompts]
        for chunk in chunks:
            rows = [
                (i, prompts[i][1:][a:b], states[i][0][a:b], states[i][1][a:b])
                for i, (a, b) in enumerate(chunk)
                if b > a
            ]
            for row, ours, double in zip(rows, *run.one_pass(step, rows), strict=True):
                close(ours, double)
                outputs[row[0]][0].append(ours)
                outputs[row[0]][1].append(double)
        states = [(torch.cat(ours), torch.cat(doubles)) for ours, doubles in outputs]
    last = [(ours[-1:], double[-1:]) for ours, double in states]
    drafted: set[int] = set()
    for step in range(1, 4):
        rows = []
        for i, (ours, double) in enumerate(last):
            logits = head.compute_logits(ours)
            assert logits.shape == (1, head.config.vocab_size)
            close(logits, plain.logits(double))
            draft_id = logits.argmax(-1)
            token = draft_id if head.target_ids is None else head.target_ids[draft_id]
            assert token.item() == plain.target_id(int(plain.logits(double).argmax()))
            drafted.add(int(token))
            rows.append((i, token, ours, double))
        new, doubles = run.one_pass(step, rows)
        for ours, double in zip(new, doubles, strict=True):
            close(ours, double)
        last = list(zip(new, doubles, strict=True))
    assert len(drafted) > 1, "a head that is stuck would prove nothing"


def test_taps() -> None:
    def taps(config: dict[str, Any], num_layers: int = 32) -> tuple[int, ...]:
        target = replace(tiny_target().model.config, num_layers=num_layers)
        return read_head({"architectures": ["LlamaForCausalLMEagle3"], **BODY, **config}, target).taps

    assert taps({}) == (2, 16, 29)
    assert taps({TAPS: [1, 15, 28]}) == (2, 16, 29)
    assert taps({TAPS: [2, 16, 29]}) == (2, 16, 29)
    assert taps({"eagle_config": {TAPS: [1, 15, 28]}}) == (2, 16, 29)
    assert taps({TAPS: [0, 32]}) == (0, 32)
    assert taps({TAPS: [29, 2, 16]}) == (2, 16, 29)
    assert taps({"eagle_config": {"use_aux_hidden_state": False}}) == ()
    assert taps({}, num_layers=3) == (0, 1, 2)


def test_what_is_the_targets_is_not_the_heads(tmp_path: Path) -> None:
    """Neither the borrowed embedding and matrix, nor copies of them in the file, are counted or kept twice."""
    case = CASES["mtp of DeepSeek"]()
    target = tiny_target()
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for name, theirs in copies.items():
        case.tensors[f"model.layers.{NUM_LAYERS}.{name}.weight"] = target.tensors[f"{theirs}.weight"].clone()
    head = load(case, tmp_path)
    assert head.embed_tokens is None
    assert head.lm_head is None
    assert not {id(p) for p in head.parameters()} & {id(p) for p in target.model.parameters()}
    assert all(p.shape[0] != VOCAB for p in head.parameters())
    # That they are copies is known only once they are compared with the target's.
    assert size_without_memory(case) == sum(p.numel() for p in head.parameters()) + 2 * VOCAB * HIDDEN


def test_an_embedding_of_its_own_is_kept(tmp_path: Path) -> None:
    head = load(CASES["eagle3 with an embedding, prefixed"](), tmp_path)
    assert head.embed_tokens is not None
    assert head.target_ids is not None
    assert head.target_ids.dtype == torch.int32


def test_offsets_of_zero_are_no_mapping(tmp_path: Path) -> None:
    case = eagle3({"draft_vocab_size": VOCAB}, reduced=False)
    case.tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    assert load(case, tmp_path).target_ids is None


def test_a_full_vocabulary_may_be_ordered_otherwise(tmp_path: Path) -> None:
    case = eagle3(reduced=False, extra={"lm_head.weight": (VOCAB, HIDDEN)})
    case.tensors["d2t"] = torch.arange(VOCAB - 1, -1, -1) - torch.arange(VOCAB)
    ids = load(case, tmp_path).target_ids
    assert ids is not None
    assert ids.tolist() == list(range(VOCAB - 1, -1, -1))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["eagle3 of NVIDIA", "eagle", "mtp of DeepSeek", "mtp of Qwen3-Next"])
def test_packed_weights_compute_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    case.tensors = {name: t.float() if t.is_floating_point() else t for name, t in case.tensors.items()}
    outputs = []
    for packed in (False, True):
        head = load(case, tmp_path, torch.float32)
        if packed:
            head.finish_weights()
        generator = torch.Generator().manual_seed(7)
        states = head.combine(torch.randn(6, max(1, len(head.taps)) * HIDDEN, generator=generator))
        run = Run(head, case.plain(case.config, case.tensors, tiny_target(case.target, torch.float32).plain))
        out = head.forward(0, torch.arange(6).int(), states, run.context([0, 1], [0, 0], [4, 2]))
        outputs.append((out, head.compute_logits(out)))
    for plain, fast in zip(*outputs, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


def size_without_memory(case: Case) -> int:
    """What must be known before anything is allocated: how many weights there will be."""
    target = tiny_target(case.target)
    plan = read_head(case.config, target.model.config, case.kind)
    with torch.device("meta"):
        head = build_head(plan, architecture_of(target.config)(target.model.config, 1), 1)
    return count_parameters(head) + head.count_adopted(case.tensors.keys())


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_head_without_memory_has_its_size(make: Callable[[], Case], tmp_path: Path) -> None:
    """Every tensor of the file is held once, but for the vocabulary and what MTP layers repeat."""
    case = make()
    tensors = {name: tensor for name, tensor in case.tensors.items() if name not in ("d2t", "t2d")}
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    repeated = [
        tensor
        for idx in range(NUM_LAYERS + 1, NUM_LAYERS + 3)
        for name in shared
        if (tensor := tensors.get(f"model.layers.{idx}.{name}")) is not None
    ]
    stored = sum(tensor.numel() for tensor in tensors.values()) - sum(tensor.numel() for tensor in repeated)
    assert size_without_memory(case) == stored
    assert sum(parameter.numel() for parameter in load(case, tmp_path).parameters()) == stored


@torch.inference_mode()
@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_pass_waits_for_nothing(make: Callable[[], Case], tmp_path: Path) -> None:
    """On the simulated device, where a host that looks at a value outside of building is an error."""
    case, device = make(), SimDevice(1)
    target, head = tiny_target(case.target), load(case, tmp_path)
    context = Run(head, case.plain(case.config, case.tensors, target.plain)).context([0, 1], [0, 0], [4, 2])
    ids, features = torch.arange(6).int(), torch.randn(6, max(1, len(head.taps)) * HIDDEN, dtype=torch.float64)
    with device.sync_guard.allow("build"), default_dtype(torch.float64):
        with device.torch_device:
            there = architecture_of(target.config)(target.model.config, 64)
            moved = build_head(head.plan, there, 64)
        load_weights(there, target.tensors.items())
        load_weights(moved, case.tensors.items())
        inputs = ids.to(device.torch_device), features.to(device.torch_device)
        moved_context = context_on(device, context)
    expected = head.compute_logits(head.forward(0, ids, head.combine(features), context))
    logits = moved.compute_logits(moved.forward(0, inputs[0], moved.combine(inputs[1]), moved_context))
    with device.sync_guard.allow("build"):
        close(logits.cpu(), expected)


def context_on(device: SimDevice, context: AttentionContext) -> AttentionContext:
    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device.torch_device)

    names = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping")
    step = step_of(context)
    metadata = replace(step.shared, **{name: there(getattr(step.shared, name)) for name in names})
    caches = [there(cache) for cache in step.caches.in_order]
    return context_of(step.caches.attention, metadata, caches, there(context.positions), metadata.slot_mapping)


# --- MTP layers in the target's checkpoint --------------------------------------------------------


def test_mtp_tensors_are_told_from_the_targets() -> None:
    case, target = CASES["mtp of DeepSeek"](), tiny_target()
    both = target.tensors | case.tensors | {"mtp.fc.weight": torch.zeros(1)}
    assert dict(mtp_tensors(both.items(), NUM_LAYERS)).keys() == case.tensors.keys() | {"mtp.fc.weight"}
    architecture = architecture_of(target.config)
    again = architecture(target.model.config, 1)
    load_weights(again, ((name, t) for name, t in both.items() if not is_mtp_tensor(name, NUM_LAYERS)))
    assert is_mtp_tensor("layers.61.enorm.weight", 61)
    assert not is_mtp_tensor("model.layers.60.mlp.up_proj.weight", 61)


def test_mtp_layers_are_like_the_targets_last() -> None:
    target = replace(tiny_target().model.config, windows=(0, 0, 0, 0, 0, 0, 0, 16))
    plan = read_head({"architectures": ["Qwen3NextForCausalLM"]}, target, "mtp")
    assert plan.mtp_style == "qwen3_next"
    assert plan.config.windows == (16,)
    assert plan.config.vocab_size == target.vocab_size


def test_tokens_the_head_was_trained_for() -> None:
    assert proposed_tokens(SPECULATORS) == 5
    assert proposed_tokens({}) is None
