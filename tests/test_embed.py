"""``LLM.embed``: vectors of texts as ``transformers`` makes them, and what a user may say of them."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream import LLM, AsyncLLM, EmbeddingOutput, RequestError, SamplingParams
from slipstream.pooling import PooledVector, PoolingParams
from tests import tiny_models

# Two begin alike for several pages.
TEXTS = ["hello world", "a", "the same beginning of a text, " * 2 + "one", "the same beginning of a text, " * 2 + "two"]
SIZE = 48
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("qwen3")
    model.config.is_matryoshka = True
    return tiny_models.save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=4, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval()


def expected(model: PreTrainedModel, token_ids: list[int], kind: str = "last", size: int = SIZE) -> npt.NDArray[Any]:
    with torch.no_grad():
        hidden = model.model(torch.tensor([token_ids])).last_hidden_state[0]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[kind][:size]
    return (vector / vector.norm()).numpy()


def check(llm: LLM, outputs: list[EmbeddingOutput], model: PreTrainedModel, kind: str = "last") -> None:
    assert len(outputs) == len(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        token_ids = llm.tokenizer.encode(text)
        assert output.error is None and output.num_prompt_tokens == len(token_ids) and output.total_s > 0
        assert output.embedding.shape == (SIZE,) and output.embedding.dtype == np.float32
        # Unit vectors of float32 sums.
        np.testing.assert_allclose(output.embedding, expected(model, token_ids, kind), rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", ["last", "cls", "mean"])
@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 1}, {}, {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 20}, {"device": "sim"}],
    ids=str,
)
def test_equals_transformers(folder: Path, reference: PreTrainedModel, options: dict[str, Any], kind: str) -> None:
    with LLM(str(folder), **{"max_num_seqs": 4, "dtype": "float32", "max_model_len": 256, **options}) as llm:
        check(llm, llm.embed(TEXTS, pooling=kind), reference, kind)
        again = llm.embed(TEXTS, pooling=kind)
        check(llm, again, reference, kind)
        assert any(output.num_cached_tokens for output in again) == (kind == "last"), "prefix hits"


def test_texts_token_ids_and_single_ones(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello world")
    for texts in ("hello world", ["hello world"], ids, [ids], np.array(ids)):
        (output,) = llm.embed(texts)  # type: ignore[arg-type]
        np.testing.assert_array_equal(output.embedding, llm.embed("hello world")[0].embedding)
    assert llm.embed([]) == []


def test_dimensions_and_length(llm: LLM, reference: PreTrainedModel) -> None:
    (plain,) = llm.embed("hello world", normalize=False)
    assert abs(np.linalg.norm(plain.embedding) - 1) > 0.1
    (short,) = llm.embed("hello world", dimensions=10)
    np.testing.assert_allclose(
        short.embedding, expected(reference, llm.tokenizer.encode("hello world"), size=10), rtol=0, atol=3e-6
    )
    (both,) = llm.embed("hello world", dimensions=10, normalize=False)
    np.testing.assert_array_equal(both.embedding, plain.embedding[:10])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pooling": "maen"},
            "pooling must be last, cls, mean, max, mean_sqrt_len or weighted_mean, not 'maen', did you mean 'mean'?",
        ),
        ({"pooling": 3}, "pooling must be last, cls, mean, max, mean_sqrt_len or weighted_mean, not 3"),
        ({"normalize": 1}, "normalize must be true or false, not 1"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1 and at most 2147483647, not 0"),
        ({"dimensions": True}, "dimensions must be an integer of at least 1"),
        ({"dimensions": 49}, "dimensions 49 is above the 48 of this model's vectors"),
        ({"priority": "high"}, "priority must be an integer"),
    ],
    ids=str,
)
def test_bad_values_are_one_line(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.embed("x", **options)
    assert message.split(", did")[0] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fine", ""], "prompt 1: the prompt is empty"),
        ([[1], [999]], "prompt 1: prompt holds 999, which is not a token id below 272"),
        ([[1] * 257], "the prompt has 257 tokens, the context holds 256"),
        ([[0.5]], "prompt holds 0.5, which is not a token id"),
        (None, "the prompt must be a text or a list of token ids"),
    ],
    ids=str,
)
def test_bad_texts_are_one_line(llm: LLM, texts: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.embed(texts)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert llm.embed([[1] * 256])[0].error is None


def test_generating_goes_on_beside(llm: LLM) -> None:
    alone = llm.generate("hello", GREEDY)[0].token_ids
    stream = llm.stream("hello", GREEDY)
    next(stream)
    vectors = llm.embed(TEXTS)
    *_, last = stream
    assert last.token_ids == alone and not any(output.error for output in vectors)


def test_async(folder: Path, reference: PreTrainedModel, llm: LLM) -> None:
    async def run() -> list[EmbeddingOutput]:
        async with AsyncLLM(str(folder), max_num_seqs=4, max_model_len=256) as engine:
            one, many = await asyncio.gather(engine.embed(TEXTS[0]), engine.embed(TEXTS))
            np.testing.assert_array_equal(one[0].embedding, many[0].embedding)
            task = asyncio.create_task(engine.embed([[7] * 200] * 40))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await _settle(engine)
            return many

    check(llm, asyncio.run(run()), reference)


async def _settle(engine: AsyncLLM) -> None:
    deadline = time.monotonic() + 20
    while engine.stats.num_running or engine.stats.num_waiting:
        assert time.monotonic() < deadline, "aborted requests stay"
        await asyncio.sleep(0.01)


def test_in_a_process_of_its_own(folder: Path, reference: PreTrainedModel, llm: LLM) -> None:
    with LLM(str(folder), max_num_seqs=4, max_model_len=256, own_process=True) as other:
        outputs = other.embed(TEXTS)
        check(llm, outputs, reference)
        for output, own in zip(outputs, llm.embed(TEXTS), strict=True):
            np.testing.assert_allclose(output.embedding, own.embedding, rtol=0, atol=1e-6)
        with pytest.raises(RequestError, match="pooling must be"):
            other.embed("x", pooling="most")


def test_ctrl_c_ends_all_of_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(queue.SimpleQueue[EmbeddingOutput]):
        def get(self, *_: Any, **__: Any) -> EmbeddingOutput:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.llm.queue", SimpleNamespace(SimpleQueue=Interrupted))
        with pytest.raises(KeyboardInterrupt):
            llm.embed([[7] * 200] * 20)
    assert not llm.client.output.submissions
    deadline = time.monotonic() + 20
    while llm.stats.num_running or llm.stats.num_waiting:
        assert time.monotonic() < deadline, "texts go on for no reader"
        time.sleep(0.01)
    assert llm.embed("x")[0].error is None


def test_a_vector_of_no_numbers_is_an_error(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    folder = tiny_models.save(model, tmp_path)
    with LLM(str(folder), max_num_seqs=4, max_model_len=64) as llm:
        for kind in ("last", "cls", "mean"):
            bad, good = llm.embed([[5, 6], [6, 7]], pooling=kind)
            assert bad.error is not None and "not numbers" in bad.error and bad.embedding.size == 0
            assert good.error is None and np.isfinite(good.embedding).all()


def test_lengths_of_extreme_vectors() -> None:
    for scale in (1e-38, 1.0, 5e37):
        values = np.array([3, 4], dtype=np.float32) * np.float32(scale)
        found = PooledVector(values.tobytes()).finish(PoolingParams("last", True))
        np.testing.assert_allclose(found, [0.6, 0.8], rtol=1e-6)
    assert not PooledVector(np.zeros(2, np.float32).tobytes()).finish(PoolingParams("last", True)).any()


# --- what the checkpoint says ---------------------------------------------------------------------


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ("Transformer", "Pooling", *more)
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, **pooling}))


def test_the_checkpoints_own_pooling(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("qwen3"), tmp_path)
    for kind, flag in (("mean", "mean_tokens"), ("cls", "cls_token"), ("last", "lasttoken")):
        for more in ((), ("Normalize",)):
            write_modules(folder, {"pooling_mode_lasttoken": False, f"pooling_mode_{flag}": True}, *more)
            with LLM(str(folder), max_num_seqs=2, max_model_len=64) as llm:
                (own,), (said,) = llm.embed("hello"), llm.embed("hello", pooling=kind, normalize=bool(more))
                np.testing.assert_array_equal(own.embedding, said.embedding)


def test_a_pooling_that_is_not_supported_is_refused_when_it_is_used(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("qwen3"), tmp_path)
    write_modules(folder, {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    with LLM(str(folder), max_num_seqs=2, max_model_len=64) as llm:
        with pytest.raises(RequestError, match="asks for pooling 'cls_token' and 'max_tokens', which is not supported"):
            llm.embed("hello")
        assert llm.embed("hello", pooling="mean")[0].error is None
        assert len(llm.generate("hello", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_of_the_layers_alone(tmp_path: Path, is_tied: bool) -> None:
    """As Qwen3-Embedding is published: tensors without the prefix of a causal model, and none for logits."""
    model = tiny_models.build("qwen3")
    folder = tiny_models.save(model, tmp_path)
    model.config.tie_word_embeddings = is_tied
    model.model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with LLM(str(folder), max_num_seqs=2, max_model_len=64) as llm:
        (output,) = llm.embed("hello")
        vector = expected(model.double().eval(), llm.tokenizer.encode("hello"))
        np.testing.assert_allclose(output.embedding, vector, rtol=0, atol=3e-6)
        if is_tied:
            assert len(llm.generate("hello", GREEDY)[0].token_ids) == 8
        else:
            with pytest.raises(RequestError, match="no weights for logits, so it cannot generate; call embed"):
                llm.generate("hello", GREEDY)
