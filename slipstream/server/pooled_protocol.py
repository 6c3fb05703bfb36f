"""The schema of requests for vectors, scores, rankings and classes of texts, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from slipstream.server.protocol import Body
from slipstream.server.sampling_fields import ListOf, TokenId

MAX_TEXTS = 2048  # in a request


class PooledFields(Body):
    """Fields of requests for vectors, scores and classes."""

    model: str | None = Field(None, description="Any name this server lists; its model if left out.")
    user: str | None = Field(None, description="Accepted and ignored.")
    # Extensions.
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Cut longer texts to so many tokens; -1: to what the model takes."
    )
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")


class EmbeddingRequest(PooledFields):
    input: (
        str
        | Annotated[ListOf[str], Field(max_length=MAX_TEXTS)]
        | ListOf[TokenId]
        | Annotated[ListOf[ListOf[TokenId]], Field(max_length=MAX_TEXTS)]
    ) = Field(..., min_length=1, description="A text, or several, each a string or token ids.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of float32, little-endian.")
    dimensions: int | None = Field(None, ge=1, le=2**31 - 1, description="Numbers to keep of each vector.")
    # Extensions.
    pooling: str | None = Field(None, description="Which hidden states make a vector.")
    normalize: bool | None = Field(None, description="Divide each vector by its length.")
    prompt_name: str | None = Field(None, description="Which of the checkpoint's prompts is put before each text.")


class RankedDocument(Body):
    text: str


Documents = Annotated[ListOf[str], Field(min_length=1, max_length=MAX_TEXTS)]


class RerankRequest(PooledFields):
    query: str = Field(min_length=1)
    documents: Documents | Annotated[ListOf[RankedDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: int | None = Field(None, ge=1, le=2**31 - 1, description="Documents in the answer, the best ones.")
    return_documents: bool = Field(True, description="Whether the answer has the documents' texts.")
    instruction: str | None = Field(None, description="What is searched for, of models that are told.")


class ScoreRequest(PooledFields):
    text_1: str | Documents | None = Field(None, description="One text, or as many as the others.")
    text_2: str | Documents | None = None
    queries: str | Documents | None = Field(None, description="Another name of text_1.")
    documents: str | Documents | None = Field(None, description="Another name of text_2.")
    instruction: str | None = Field(None, description="What is searched for, of models that are told.")


class ClassifyRequest(PooledFields):
    input: (
        str
        | Annotated[ListOf[str], Field(max_length=MAX_TEXTS)]
        | ListOf[TokenId]
        | Annotated[ListOf[ListOf[TokenId]], Field(max_length=MAX_TEXTS)]
    ) = Field(..., min_length=1, description="A text, or several, each a string or token ids.")


# --- responses -------------------------------------------------------------------------------------


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankedText(BaseModel):
    text: str


class RankedResult(BaseModel):
    index: int
    relevance_score: float
    document: RerankedText | None = None


class RerankResponse(BaseModel):
    id: str
    created: int
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage


class PairScore(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class TextClass(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[TextClass]
    usage: EmbeddingUsage
