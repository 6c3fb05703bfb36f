"""Scores, rankings and classes of texts against ``transformers``, and what a checkpoint cannot do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from slipstream import LLM, AsyncLLM, RequestError
from slipstream.engine.scores import rank
from slipstream.text.pair_template import PREFIX, SUFFIX, fill_pair
from slipstream.text.tokenizer import Tokenizer as OwnTokenizer
from tests import tiny_models
from tests.models import tiny_encoders

QUERY = "what is it"
DOCUMENTS = ["one thing", "another", "something else entirely, with more words", "x", "the last one"]


def logits_of(model: Any, folder: Path, pairs: list[tuple[str, ...]]) -> torch.Tensor:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    with torch.no_grad():
        for pair in pairs:
            encoded = tokenizer(*pair, return_tensors="pt")
            if getattr(model.config, "type_vocab_size", 1) < 2:
                encoded.pop("token_type_ids", None)
            found.append(model(**encoded).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("variant", ["bert-cross-encoder", "xlm-roberta-cross-encoder"])
def test_cross_encoders(tmp_path: Path, variant: str) -> None:
    model = tiny_encoders.build(variant)
    folder = tiny_encoders.save(model, tmp_path)
    expected = torch.sigmoid(logits_of(model, folder, [(QUERY, text) for text in DOCUMENTS])[:, 0]).numpy()
    assert np.ptp(expected) > 1e-3, "else the order would prove nothing"
    with LLM(str(folder)) as llm:
        found = llm.score(QUERY, DOCUMENTS)
        np.testing.assert_allclose([output.score for output in found], expected, rtol=0, atol=1e-5)
        ranked = llm.rerank(QUERY, DOCUMENTS)
        assert [output.index for output in ranked] == np.argsort(-expected).tolist()
        assert [output.document for output in ranked] == [DOCUMENTS[output.index] for output in ranked]
        assert llm.rerank(QUERY, DOCUMENTS, top_n=2) == ranked[:2]
        queries = [QUERY, "who", "why", "when", "how"]
        each = torch.sigmoid(logits_of(model, folder, list(zip(queries, DOCUMENTS, strict=True)))[:, 0]).numpy()
        np.testing.assert_allclose([output.score for output in llm.score(queries, DOCUMENTS)], each, atol=1e-5)
        with pytest.raises(RequestError, match="this checkpoint scores texts and makes no vectors"):
            llm.embed("x")
        with pytest.raises(RequestError, match="2 texts cannot be paired with 5"):
            llm.score(["a", "b"], DOCUMENTS)
        with pytest.raises(RequestError, match="without an instruction"):
            llm.rerank(QUERY, DOCUMENTS, instruction="find it")


@pytest.mark.parametrize("variant", ["bert-classifier", "mpnet-classifier"])
def test_classes(tmp_path: Path, variant: str) -> None:
    model = tiny_encoders.build(variant)
    model.config.id2label = {i: f"label-{i}" for i in range(model.config.num_labels)}
    folder = tiny_encoders.save(model, tmp_path)
    expected = torch.softmax(logits_of(model, folder, [(text,) for text in DOCUMENTS]), dim=1).numpy()
    with LLM(str(folder)) as llm:
        for output, probs in zip(llm.classify(DOCUMENTS), expected, strict=True):
            np.testing.assert_allclose(output.probs, probs, rtol=0, atol=1e-5)
            assert output.label == f"label-{int(probs.argmax())}" and output.error is None
        with pytest.raises(RequestError, match=r"tells . classes apart and gives no score; call classify"):
            llm.score("a", "b")


@pytest.mark.parametrize("num_labels", [1, 3])
def test_decoders_that_classify(tmp_path: Path, num_labels: int) -> None:
    shape = tiny_models.build("qwen3").config.to_dict()
    torch.manual_seed(4)
    own = {**shape, "num_labels": num_labels, "architectures": None, "pad_token_id": 0}
    model = Qwen3ForSequenceClassification(Qwen3Config(**own)).eval()
    folder = tiny_models.save(model, tmp_path)  # type: ignore[arg-type]
    with LLM(str(folder), long_prefill_token_threshold=7) as llm:
        ids = [llm.tokenizer.encode(text) for text in DOCUMENTS]
        with torch.no_grad():
            logits = torch.stack([model(torch.tensor([one])).logits[0] for one in ids])
        expected = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, dim=1)
        for output, probs in zip(llm.classify(DOCUMENTS), expected.numpy(), strict=True):
            np.testing.assert_allclose(output.probs, probs, rtol=0, atol=1e-5)
        with pytest.raises(RequestError, match="no weights for logits, so it cannot generate"):
            llm.generate("x")


def test_a_model_that_answers_yes_or_no(tmp_path: Path) -> None:
    """As Qwen3-Reranker is used with transformers: the probability of yes among the two."""
    model = tiny_models.build("qwen3")
    folder = tiny_models.save(model, tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no", "judge", "Judge"])
    tokenizer.save(str(folder / "tokenizer.json"))
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    with LLM(str(folder), max_model_len=512) as llm:
        scores = [output.score for output in llm.score(QUERY, DOCUMENTS, instruction="Find it")]
        ids = [
            [i for part in (PREFIX, fill_pair(QUERY, text, "Find it"), SUFFIX) for i in tokenizer.encode(part).ids]
            for text in DOCUMENTS
        ]
        with torch.no_grad():
            logits = [model(torch.tensor([one])).logits[0, -1] for one in ids]
        expected = [float(torch.softmax(one[[no, yes]], dim=0)[1]) for one in logits]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
        order = np.argsort(-np.array(expected)).tolist()
        assert [output.index for output in llm.rerank(QUERY, DOCUMENTS, instruction="Find it")] == order
        # It still generates and makes vectors, in the same steps.
        assert llm.embed("x")[0].embedding.shape == (48,)
        assert llm.generate("x")[0].error is None
        long = [output.score for output in llm.score(QUERY, ["word " * 400], truncate_prompt_tokens=-1)]
        assert len(long) == 1 and 0 <= long[0] <= 1
        with pytest.raises(RequestError, match="the context holds 512; shorten the prompt or set truncate"):
            llm.score(QUERY, ["word " * 400])
    for text in (PREFIX, SUFFIX):
        assert text.count("<|im_start|>") in (1, 2)


def test_cosines_of_vectors(tmp_path: Path) -> None:
    folder = tiny_encoders.save(tiny_encoders.build("bert"), tmp_path)
    with LLM(str(folder)) as llm:
        first, *others = (output.embedding.astype(np.float64) for output in llm.embed([QUERY, *DOCUMENTS]))
        expected = [float(first @ other) for other in others]
        np.testing.assert_allclose([output.score for output in llm.score(QUERY, DOCUMENTS)], expected, atol=1e-6)
        assert [output.index for output in llm.rerank(QUERY, DOCUMENTS)] == np.argsort(-np.array(expected)).tolist()
        with pytest.raises(RequestError, match="has no classifier; call embed, or score"):
            llm.classify("x")
        with pytest.raises(RequestError, match="top_n must be an integer of at least 1, not 0"):
            llm.rerank(QUERY, DOCUMENTS, top_n=0)
        with pytest.raises(RequestError, match="is not declared as one whose vectors may be shortened"):
            llm.embed("x", dimensions=3)


def test_async_and_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = tiny_encoders.save(tiny_encoders.build("bert-cross-encoder"), tmp_path)
    with LLM(str(folder)) as llm:
        expected, probs = llm.rerank(QUERY, DOCUMENTS), llm.classify(QUERY)[0].probs

    async def run() -> None:
        async with AsyncLLM(str(folder), own_process=True) as llm:
            found = await llm.rerank(QUERY, DOCUMENTS)
            assert [output.index for output in found] == [output.index for output in expected]
            scores = [output.score for output in await llm.score(QUERY, DOCUMENTS[:1])]
            assert scores == [pytest.approx(next(output.score for output in expected if output.index == 0), abs=1e-6)]
            np.testing.assert_allclose((await llm.classify(QUERY))[0].probs, probs, atol=1e-6)

    asyncio.run(run())


@pytest.mark.parametrize("limit", [3, 4, 5, 8, 12, 40])
@pytest.mark.parametrize(
    "pair", [("aaaaaaaaaa", None), ("aaaaaaaaaa", "bbb"), ("aaa", "bbbbbbbbbb"), ("aaaaaa", "bbbbbbb")]
)
def test_texts_are_cut_as_transformers_cuts_them(tmp_path: Path, pair: tuple[str, str | None], limit: int) -> None:
    tiny_encoders.write_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    own = OwnTokenizer.from_folder(tmp_path).encode_within(pair[0], limit, pair[1])
    expected = theirs(*[text for text in pair if text is not None], truncation=True, max_length=limit)
    assert own.ids == expected["input_ids"]
    types = expected["token_type_ids"]
    assert own.second_from == (types.index(1) if 1 in types else 0)


def test_ranks() -> None:
    assert rank([0.1, 0.5, 0.5, -1.0], None) == [1, 2, 0, 3]
    assert rank([0.1, 0.5, 0.5, -1.0], 2) == [1, 2] and rank([], 3) == []
