"""What a request must give, from the request alone: plain integers, no tensors, no pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slipstream.encoder_input import EncoderInput
from slipstream.request import Request
from tests.sim import toy_grammar
from tests.sim.hash_model import NUM_LAYERS, VOCAB_SIZE, candidates, guess
from tests.sim.hash_source_encoder import FRAMES_PER_ENTRY

_MASK = 2**64 - 1
_OWN = 53


def _scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class OracleKind(NamedTuple):
    """What the target's layers keep and read."""

    recurrent: bool
    top_k: int


def _digits(value: int) -> tuple[int, int]:
    return value % 8, value // 8 % 8


def encoded_sums(encoder: EncoderInput | None, layer_idx: int) -> int | None:
    """What a layer of cross attention adds up."""
    if encoder is None:
        return None
    bins, num_frames = encoder.features.shape
    total = 0
    for entry in range(num_frames // FRAMES_PER_ENTRY):
        mixed = entry * FRAMES_PER_ENTRY + layer_idx
        for bin_idx in range(bins):
            for frame in range(entry * FRAMES_PER_ENTRY, (entry + 1) * FRAMES_PER_ENTRY):
                mixed = _scramble((mixed * 8191 + int(encoder.features[bin_idx, frame])) & _MASK)
        total += _scramble(((mixed >> 16) * 127 + entry) & _MASK)
    return total & _MASK


class HashSequence:
    """The states of one sequence, token by token, as if there were nothing before its first."""

    def __init__(
        self,
        first_position: int = 0,
        recurrent: bool = False,
        top_k: int = 0,
        encoder: EncoderInput | None = None,
    ) -> None:
        self._encoded = [encoded_sums(encoder, idx) for idx in range(NUM_LAYERS)]
        self._seen = [0] * NUM_LAYERS
        self._top_k = top_k  # keys that a token attends to; 0: all
        self._keys: list[list[tuple[int, int]]] = [[] for _ in range(NUM_LAYERS)]  # state, and what it adds
        self._length = first_position
        self._recurrent, self._chain, self._before = recurrent, 0, (0, 0)
        self.state = 0

    def append(self, token_id: int) -> None:
        position, state = self._length, token_id + 1
        for layer_idx in range(NUM_LAYERS):
            key = (state * 8191 + position * 127 + position) & _MASK
            self._keys[layer_idx].append((state, _scramble(key)))
            self._seen[layer_idx] = sum(added for _, added in self._chosen(layer_idx, state)) & _MASK
            own = _scramble((state + position * 3 + layer_idx) & _MASK)
            state = _scramble((self._seen[layer_idx] + own) & _MASK) >> 16
            if (encoded := self._encoded[layer_idx]) is not None:
                own = _scramble((state + position * 3 + (NUM_LAYERS + layer_idx) * _OWN) & _MASK)
                state = _scramble((encoded + own) & _MASK) >> 16
        self._length += 1
        self.state = state
        if self._recurrent:
            before, before_that = self._before
            mixed = self._chain * 8191 + state + 3 * before + 5 * before_that + 127 * position
            self._chain, self._before = _scramble(mixed & _MASK), (state, before)
            self.state = state if self._chain % 4 else _scramble((self._chain + state) & _MASK) >> 16

    def _chosen(self, layer_idx: int, state: int) -> list[tuple[int, int]]:
        """The keys that a token with this state attends to: the highest scores, the first of equal ones."""
        keys = self._keys[layer_idx]
        if not self._top_k or len(keys) <= self._top_k:
            return keys
        a, b = _digits(state // 7)

        def score(idx: int) -> int:
            c, d = _digits(keys[idx][0] // 1000)
            return a * c + b * d

        best = sorted(range(len(keys)), key=lambda idx: (-score(idx), idx))[: self._top_k]
        return [keys[idx] for idx in best]

    @property
    def hidden(self) -> list[float]:
        """The hidden state of the last token: hash, position, and what each layer has seen, in halves."""
        halves = [float(half) for seen in self._seen for half in (seen & 0xFFFFFFFF, seen >> 32)]
        return [float(self.state), float(self._length - 1), *halves]


def expected_vector(request: Request, recurrent: bool = False, top_k: int = 0) -> list[float]:
    """What a pooled request must give."""
    assert request.pooling is not None
    sequence, states = HashSequence(recurrent=recurrent, top_k=top_k, encoder=request.encoder), []
    for token_id in request.prompt_token_ids:
        sequence.append(token_id)
        states.append(sequence.hidden)
    return pool_states(states, request.pooling.pooling)


def pool_states(states: list[list[float]], kind: str | None) -> list[float]:
    columns, count = list(zip(*states, strict=True)), len(states)
    if kind in ("last", "cls"):
        return states[-1 if kind == "last" else 0]
    if kind == "max":
        return [max(column) for column in columns]
    if kind == "weighted_mean":
        total = count * (count + 1) / 2
        return [math.fsum(n * x for n, x in enumerate(column, 1)) / total for column in columns]
    return [math.fsum(column) / (count if kind == "mean" else count**0.5) for column in columns]


def next_token(state: int, num_used: int, forbidden: Iterable[int] = ()) -> int:
    return next(t for t in (*candidates(state, num_used), *range(VOCAB_SIZE)) if t not in forbidden)


def expected_output(
    request: Request, num_used: int = VOCAB_SIZE, recurrent: bool = False, top_k: int = 0
) -> tuple[list[int], str]:
    """All tokens of a request that is not aborted, and why it ends."""
    sequence = HashSequence(recurrent=recurrent, top_k=top_k, encoder=request.encoder)
    for token_id in request.prompt_token_ids:
        sequence.append(token_id)
    output: list[int] = []
    structure = request.params.structured
    place = None if structure is None else toy_grammar.first_state(structure)
    while True:
        held = held_back(request, len(output))
        if place is not None:
            held = set(range(VOCAB_SIZE)) - expected_legal(request, place, len(output))
        token_id = next_token(sequence.state, num_used, held)
        place = None if place is None else toy_grammar.next_state(place, token_id)
        output.append(token_id)
        if token_id in request.stop_token_ids:
            return output, "stop"
        if len(request.prompt_token_ids) + len(output) >= request.max_total_tokens:
            return output, "length"
        sequence.append(token_id)


def held_back(request: Request, num_output: int) -> set[int]:
    """Ends that may not come yet."""
    params = request.params
    early = num_output < params.min_tokens
    return set(request.stop_token_ids if early else (toy_grammar.END,) if params.ignore_eos else ())


def expected_legal(request: Request, place: int, num_output: int) -> set[int]:
    """What may come next in a grammar: an end that is held back comes if nothing else may."""
    allowed = toy_grammar.legal(place)
    return allowed - held_back(request, num_output) or allowed


def expected_certain(request: Request, output: Sequence[int]) -> list[int]:
    """Where the last token was the only one that might come: those after it, while the same holds of them."""
    if (structure := request.params.structured) is None or not output:
        return []
    place, num_output, found = toy_grammar.first_state(structure), 0, list[int]()
    for token_id in output[:-1]:
        place, num_output = toy_grammar.next_state(place, token_id), num_output + 1
    while len(allowed := expected_legal(request, place, num_output)) == 1 and num_output < request.max_total_tokens:
        token_id = min(allowed)
        found.append(token_id)
        place, num_output = toy_grammar.next_state(place, token_id), num_output + 1
        if token_id in request.stop_token_ids:
            break
    return found[1:]


def expected_prompt_choices(
    request: Request, num_used: int = VOCAB_SIZE, recurrent: bool = False, top_k: int = 0
) -> list[int]:
    """The likeliest token at every prompt position but the first."""
    sequence, found = HashSequence(recurrent=recurrent, top_k=top_k, encoder=request.encoder), []
    for token_id in request.prompt_token_ids[:-1]:
        sequence.append(token_id)
        found.append(next_token(sequence.state, num_used))
    return found


def expected_guesses(
    known: Sequence[int],
    following: Sequence[int],
    num_used: int,
    draft_ids: Sequence[int] | None = None,
    num_modules: int = 1,
    start: int = 0,
    top_k: int = 0,
    encoder: EncoderInput | None = None,
) -> list[int]:
    """What a drafter that reads and keeps everything right says while it is right: one guess for each that follows.

    ``draft_ids`` are the tokens it can say. Where its guess is none of them, the next likely one that is comes instead.
    Modules take turns. A model that has no keys of the tokens before ``start`` takes that for the beginning.
    """
    sequence = HashSequence(start, top_k=top_k, encoder=encoder)
    for token_id in known[start:]:
        sequence.append(token_id)
    sayable = sorted(range(VOCAB_SIZE) if draft_ids is None else draft_ids)
    found = []
    for idx, token_id in enumerate(following):
        likely = (guess(sequence.state, num_used, idx % num_modules), *candidates(sequence.state, num_used)[1:])
        found.append(next(t for t in (*likely, *sayable) if t in sayable))
        sequence.append(token_id)
    return found


def expected_continuation(known: Sequence[int], num_drafts: int, min_match: int, max_match: int) -> list[int]:
    """What followed the longest, and of those the latest, earlier occurrence of the last tokens."""
    tokens = list(known)
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                for idx in range(num_drafts):
                    tokens.append(tokens[start + length + idx])
                return tokens[len(known) :]
    return []


def num_leading(drafts: Sequence[int], following: Sequence[int]) -> int:
    """How many drafts come true before the first that does not."""
    pairs = enumerate(zip(drafts, following, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(following)))
