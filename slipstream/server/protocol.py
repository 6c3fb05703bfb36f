"""The schema of requests and responses, as in OpenAI's API, with our extensions marked.

Unknown fields are refused by name: silently dropping a misspelt option is worse than an error.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from slipstream.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKEN_IDS
from slipstream.server.sampling_fields import ListOf, TokenId, body_fields, gather_extra
from slipstream.structured import MAX_CHOICES

MAX_MESSAGES, MAX_TOOLS = 8192, 1024  # far beyond what fits a context; checked before the items are parsed
MAX_DETOKENIZE = 1 << 20
MAX_REQUEST_DRAFTS = 64  # above any engine's draft length: a client need not know this one's k


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        """OpenAI's client sends null for unset fields."""
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        names = {own.alias or name for name, own in cls.model_fields.items()}
        known = {key: value for key, value in given.items() if key in names}
        # Each unknown field would be an error; only the first is reported.
        return known | dict(itertools.islice(((key, given[key]) for key in given if key not in known), 1))


class StreamOptions(Body):
    include_usage: bool = False


if TYPE_CHECKING:
    _OperationFields = Body
else:
    _OperationFields = create_model("_OperationFields", __base__=Body, **body_fields())


class StructuredOutputs(Body):
    """Exactly one of the first five; named as in vLLM."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = None
    choice: Annotated[ListOf[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = Field(None, description="In llguidance's variant of Lark.")
    disable_any_whitespace: bool = Field(False, description="Of JSON: nothing between the parts of a document.")


class SamplingFields(_OperationFields):
    """Fields of both completions and chat completions. Those of sampling operations are named as in vLLM."""

    model: str | None = Field(None, description="Any name this server lists; its model if left out.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: str | Annotated[ListOf[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    user: str | None = Field(None, description="Accepted and ignored.")
    # Extensions, named as vLLM names them.
    ignore_eos: bool = False
    stop_token_ids: Annotated[ListOf[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    speculate: bool | None = Field(None, description="Whether to speculate for this request, if the engine does.")
    max_k: int | None = Field(None, ge=0, le=MAX_REQUEST_DRAFTS, description="Maximum draft length for this request.")
    structured_outputs: StructuredOutputs | None = Field(None, description="What the text must be.")
    extra: dict[str, Any] | None = Field(
        None,
        description="Parameters of registered sampling operations, by name; also accepted as fields of the body.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_extra(cls, data: Any) -> Any:
        return gather_extra(data) if isinstance(data, dict) else data


class CompletionRequest(SamplingFields):
    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]] = Field(..., min_length=1)
    max_tokens: int | None = Field(16, ge=1, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: Literal[False] = False


class FunctionDefinition(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted and ignored: a schema is enforced either way.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextPart(BaseModel):
    type: str = "text"
    text: str | None = None


class ChatMessage(BaseModel):
    """Roles and further keys are up to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(SamplingFields):
    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[ListOf[TokenId], Field(max_length=MAX_DETOKENIZE)]
    skip_special_tokens: bool = False


# --- responses -------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """OpenAI counts predictions that a client sent; these are the engine's drafts."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # if the engine speculates


class Speculation(BaseModel):
    """Acceptance of a choice's drafts, at its end, if the engine speculates. Not part of OpenAI's API."""

    drafts: int
    accepted: int
    mean_length: float = Field(description="Mean tokens per verification, the target's own token included.")
    acceptance_by_position: list[float] = Field(description="Acceptance rate by draft position.")
    synthetic: str | None = Field(None, description="Acceptance was forced for a benchmark: the text is meaningless.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: Speculation | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: Speculation | None = None


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: Speculation | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str
