"""Vectors in the words of the API: lists of numbers, or their bytes in base64.

A vector is written as soon as it is there, so that the event loop never has many of them to write at once.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.engine.text_stream import TextStream
from slipstream.pooling import PooledVector
from slipstream.server.answers import Answer
from slipstream.server.errors import ApiError
from slipstream.server.generation import Generation

_NOT_NUMBERS = "the model produced hidden states that are not numbers for input %d"


@dataclass
class EmbeddingAnswer(Answer):
    encoding: Literal["float", "base64"] = "float"
    _parts: dict[int, bytes] = field(default_factory=dict)  # by place of the text, as they are in the answer

    def take_end(self, index: int, stream: TextStream) -> None:
        found, params = stream.vector, stream.request.pooling
        assert params is not None
        if found is None:
            return  # it was aborted
        check_numbers(found, index)
        values = _encode(found.finish(params), self.encoding)
        self._parts[index] = b'{"object":"embedding","index":%d,"embedding":%b}' % (index, values)

    def whole_bytes(self, generation: Generation, has_drafts: bool) -> bytes:
        data = b",".join(self._parts[index] for index in sorted(self._parts))
        count = generation.num_prompt_tokens
        usage = msgspec.json.encode({"prompt_tokens": count, "total_tokens": count})
        model = msgspec.json.encode(self.model)
        return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, model, usage)


def check_numbers(found: PooledVector, index: int) -> None:
    if not found.is_finite:
        raise ApiError(500, _NOT_NUMBERS % index)


def _encode(vector: npt.NDArray[np.floating], encoding: Literal["float", "base64"]) -> bytes:
    if encoding == "base64":  # of float32 in little-endian order, whatever the machine has
        return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
    return msgspec.json.encode(vector.tolist())
