"""A new method of drafting is a few files, registered by its name: see ``toy_drafters``.

Whatever it drafts, the engine generates what the same network gives without any engine: on a CPU and on the simulated
device, in graphs, with chunks, shared prefixes and preemption.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from slipstream.plan import RowStatus
from slipstream.speculate import registry
from slipstream.speculate.options import fill_help, read_speculation
from slipstream.speculate.place_host_drafts import place_host_drafts
from slipstream.speculate.speculator import DraftBatch
from tests.bundles import make_rows
from tests.drill.toy_block import Block, BlockSpeculator
from tests.drill.toy_drafters import HostRepeat, Repeat
from tests.drill.toy_model import Twin
from tests.engine.drive import make_request, run
from tests.sim.tiny_engines import write

METHODS = (Repeat(), HostRepeat(), Block())
PROMPTS = [[7, 9, 7, 9, 7, 9], list(range(40, 75)), [5] * 19, [200, 3, 200, 3, 200], [11]]
LENGTH = 24
SIM = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (1, 2, 4, 32)}
SETTINGS = [
    {},
    {"attention_backend": "reference", "long_prefill_token_threshold": 5},
    {"num_gpu_blocks_override": 7},  # too few for all: requests are preempted
    {**SIM, "cudagraph_mode": "none"},
    {**SIM, "cudagraph_mode": "full"},
    {**SIM, "cudagraph_mode": "full", "attention_backend": "triton", "long_prefill_token_threshold": 5},
    {**SIM, "cudagraph_mode": "piecewise", "num_gpu_blocks_override": 7},
]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    for method in METHODS:
        registry.register(method)


class Written:
    """A target that mostly says a few words, so that a drafter which does the same is right now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = write(folder).target
        config = json.loads((self.folder / "config.json").read_text())
        layers = {"toy_layers": ["attention"] * config["num_hidden_layers"]}
        (self.folder / "config.json").write_text(json.dumps({**config, **layers}))
        tensors = {name: tensor.double() for name, tensor in load_file(self.folder / "model.safetensors").items()}
        twin = Twin(self.folder, tensors)
        self.expected = [twin.generate(prompt, LENGTH) for prompt in PROMPTS]

    def engine(self, method: str, **options: Any) -> Engine:
        speculative = {"method": method, "num_speculative_tokens": 3, **options.pop("speculative_config", {})}
        given = {"model": str(self.folder), "dtype": "float64", "max_model_len": 128, "max_num_seqs": 3, **options}
        return build_engine(EngineOptions.from_dict({**given, "speculative_config": speculative}))

    def check(self, engine: Engine) -> None:
        requests = [make_request(f"r{i}", prompt, LENGTH) for i, prompt in enumerate(PROMPTS)]
        outcomes = run(engine.core, requests)
        for i, expected in enumerate(self.expected):
            assert outcomes[f"r{i}"].token_ids == expected, f"prompt {i}"
        engine.core.scheduler.check_idle()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("method", [method.name for method in METHODS])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_twins_tokens(written: Written, method: str, options: dict[str, Any]) -> None:
    engine = written.engine(method, **options)
    written.check(engine)
    stats = engine.core.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, "drafts of both kinds"
    written.check(engine)  # prefixes are found again
    if "num_gpu_blocks_override" in options:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("method", [method.name for method in METHODS])
@pytest.mark.parametrize("where", [{}, {**SIM, "cudagraph_mode": "full"}], ids=str)
def test_the_number_of_drafts_may_adapt(written: Written, method: str, where: dict[str, Any]) -> None:
    engine = written.engine(method, speculative_config={"adaptive": True}, **where)
    while where and engine.core.use_idle_time():
        pass
    written.check(engine)


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_noise_is_the_requests_own(written: Written, method: str) -> None:
    """Drafts decide how soon tokens come, and not which."""
    texts = []
    for options in ({}, {**SIM, "cudagraph_mode": "full"}):
        engine = written.engine(method, **options)
        requests = [make_request(f"r{i}", prompt, LENGTH, seed=i, temperature=0.8) for i, prompt in enumerate(PROMPTS)]
        outcomes = run(engine.core, requests)
        texts.append([outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))])
    plain = build_engine(EngineOptions(model=str(written.folder), dtype="float64", max_model_len=128, max_num_seqs=3))
    requests = [make_request(f"r{i}", prompt, LENGTH, seed=i, temperature=0.8) for i, prompt in enumerate(PROMPTS)]
    outcomes = run(plain.core, requests)
    assert texts == [[outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))]] * 2


def test_its_keys_and_limits_are_its_own() -> None:
    def read(**given: Any) -> Any:
        return read_speculation(EngineOptions(speculative_config=given))

    config = read(method="toy_repeat")
    assert (config.num_drafts, config.settings, config.needs) == (3, {"toy_period": 1}, Repeat.needs)
    assert read(method="toy_repeat", toy_period=2).settings == {"toy_period": 2}
    for given, message in (
        ({"method": "toy_repeats"}, "unknown method 'toy_repeats' in speculative_config; did you mean 'toy_repeat'?"),
        ({"method": "toy_repeat", "toy_period": 9}, "toy_period must be an integer from 1 to 4, not 9"),
        ({"method": "toy_repeat", "num_speculative_tokens": 6}, "must be an integer from 1 to 5, not 6"),
        ({"method": "mtp", "toy_period": 2}, "toy_period belongs to toy_repeat; leave it out with mtp"),
        ({"method": "toy_repeat", "model": "m"}, "toy_repeat takes no model; leave out 'm'"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(**given)
        assert message in str(caught.value)
    assert "toy_repeat" in fill_help("{methods}") and "toy_period" in fill_help("{keys}")


def test_a_period_is_drafted(written: Written) -> None:
    engine = written.engine("toy_repeat", speculative_config={"toy_period": 2})
    speculator, rows = engine.core.runner.speculator, engine.core.runner.rows
    rows.token_ids[0, :4] = torch.tensor([5, 6, 7, 8])
    rows.num_tokens[0] = 4
    batch = engine.core.runner.buffers.no_drafting.static(1, 1, 1, 128, 3)
    rows.batch_rows[0] = 0
    assert speculator.propose(batch, noise=False).tolist() == [[7, 8, 7]]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_host_drafts_beyond_steps_in_flight(written: Written, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with the tokens that were collected, for as many as may come until the step checks its drafts."""
    asked: list[tuple[list[int], int]] = []

    class Known:
        """A host that knows the text: every draft is right, however many steps are in flight."""

        def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> Sequence[int]:
            asked.append((list(token_ids), count))
            idx = int(request_id[1:])
            return written.expected[idx][len(token_ids) - len(PROMPTS[idx]) :][:count]

    monkeypatch.setattr(HostRepeat, "think_on_host", lambda _self, _config: Known())
    engine = written.engine("toy_host", device="sim", steps_in_flight=depth, cudagraph_mode="full")
    written.check(engine)
    stats = engine.core.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert max(count for _, count in asked) == 3 + 4 * (depth - 1)
    assert stats.num_steps < 35, "four tokens a step"


def test_drafts_that_steps_in_flight_have_refuted_are_not_checked() -> None:
    ints = partial(torch.tensor, dtype=torch.int32)
    tokens = torch.arange(20, dtype=torch.int32).repeat(6, 1)
    known = tokens.clone()
    staged = ints([[5, 4, 5, 6, 7, 8], [5, 4, 5, 9, 7, 8], [5, 4, 5, 6, 7, 8], [8, 1, 3, 3, 3, 3], [9, 2, 1, 1, 1, 1]])
    staged = torch.cat([staged, ints([[7, 4, 30, 31, 32, 33]])])
    num_tokens, num_drafts = ints([6, 7, 9, 8, 8, 7]), torch.full((6,), 9, dtype=torch.int32)
    rows = make_rows(
        token_ids=tokens,
        num_computed=num_tokens - 1,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        max_drafts=ints([3, 3, 3, 3, 3, 2]),
        max_total=ints([20] * 6),
        status=ints([int(RowStatus.RUNNING)] * 6),
    )
    place_host_drafts(staged, rows, 3)
    # Three after one that came; one came otherwise; all came; one; none that begins there; as many as it may have.
    assert num_drafts.tolist() == [3, 9, 9, 1, 9, 2]
    known[3, 8], known[5, 7:9] = 3, ints([30, 31])
    assert torch.equal(tokens, known)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_block_is_what_the_definition_says(written: Written, backend: str) -> None:
    """In one pass over keys that are as old as the text; whatever was rejected has left nothing."""
    engine = written.engine("toy_block", attention_backend=backend, num_gpu_blocks_override=7, max_num_seqs=2)
    speculator, rows = engine.core.runner.speculator, engine.core.runner.rows
    assert isinstance(speculator, BlockSpeculator)
    own, compared, others = speculator.propose, [], []

    def propose(batch: DraftBatch, noise: bool) -> torch.Tensor:
        drafts = own(batch, noise)
        for row, found in zip(batch.rows.tolist(), drafts.tolist(), strict=True):
            if found[0] < 0:
                continue
            text = rows.token_ids[row, : rows.num_tokens[row]].tolist()
            count = min(3, int(rows.max_total[row]) - len(text) + 1)
            start = int(rows.state.draft_start[row])
            compared.append(found == speculator.net.propose(text, start, count) + [-1] * (3 - count))
            others.append(found[:count] == speculator.net.propose(text, start, count, causal=True))
        return drafts

    speculator.propose = propose  # type: ignore[method-assign]
    written.check(engine)
    written.check(engine)
    assert len(compared) > 100 and all(compared)
    assert not all(others), "a causal pass says something else"


def test_a_backend_that_knows_no_blocks_is_refused(written: Written) -> None:
    with pytest.raises(ConfigError, match="attention_backend flex cannot do; use cpu, triton, flashinfer or reference"):
        written.engine("toy_block", attention_backend="flex")


def test_no_two_methods_have_one_name() -> None:
    class Other(Repeat):
        pass

    with pytest.raises(ValueError, match="two methods are called toy_repeat"):
        registry.register(Other())


def test_the_package_knows_none_of_this() -> None:
    for path in Path(registry.__file__).parent.parent.rglob("*.py"):
        assert "toy_" not in path.read_text(), path
