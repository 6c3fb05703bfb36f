"""Scores, rankings and classes in the words of the API: Cohere's for reranking, and those that others share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.engine.scores import Numbers, PairScores, rank
from slipstream.engine.text_stream import TextStream
from slipstream.server.answers import Answer
from slipstream.server.embeddings import check_numbers
from slipstream.server.generation import Generation


@dataclass
class PooledAnswer(Answer):
    """Keeps the result of each text or pair until all are there."""

    _found: dict[int, Numbers] = field(default_factory=dict)

    def take_end(self, index: int, stream: TextStream) -> None:
        found, params = stream.vector, stream.request.pooling
        assert params is not None
        if found is not None:  # else it was aborted
            check_numbers(found, index)
            self._found[index] = found.finish(params)

    def content(self, results: Sequence[Numbers]) -> dict[str, Any]:
        """The fields of the answer but for id, model and usage, given the results in order."""
        raise AssertionError("a subclass says what is made of the results")

    def whole_bytes(self, generation: Generation, has_drafts: bool) -> bytes:
        count = generation.num_prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        results = [self._found[index] for index in sorted(self._found)]
        about = {"id": self.request_id, "created": self.created, "model": self.model}
        return msgspec.json.encode({**about, **self.content(results), "usage": usage})


@dataclass
class ScoreAnswer(PooledAnswer):
    plan: PairScores = field(default_factory=lambda: PairScores((), ()))

    def content(self, results: Sequence[Numbers]) -> dict[str, Any]:
        scores = enumerate(self.plan.of(results))
        return {"object": "list", "data": [{"index": i, "object": "score", "score": score} for i, score in scores]}


@dataclass
class RerankAnswer(PooledAnswer):
    plan: PairScores = field(default_factory=lambda: PairScores((), ()))
    documents: Sequence[str] = ()
    top_n: int | None = None
    returns_documents: bool = True

    def content(self, results: Sequence[Numbers]) -> dict[str, Any]:
        scores, ranked = self.plan.of(results), []
        for idx in rank(scores, self.top_n):
            entry: dict[str, Any] = {"index": idx, "relevance_score": scores[idx]}
            if self.returns_documents:
                entry["document"] = {"text": self.documents[idx]}
            ranked.append(entry)
        return {"results": ranked}


@dataclass
class ClassAnswer(PooledAnswer):
    labels: Sequence[str] = ()

    def content(self, results: Sequence[Numbers]) -> dict[str, Any]:
        data = [
            {
                "index": i,
                "label": self.labels[int(probs.argmax())],
                "probs": probs.tolist(),
                "num_classes": len(self.labels),
            }
            for i, probs in enumerate(results)
        ]
        return {"object": "list", "data": data}
