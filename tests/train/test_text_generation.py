"""Generated texts, with an engine that answers at once and numbers its texts, so that they can be recognised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.errors import ConfigError
from slipstream.output import Completion, RequestOutput, RequestTimings
from slipstream.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from slipstream.train.prompts import choose_prompt_format
from slipstream.train.settings import TrainSettings
from slipstream.train.text_generation import GeneratedText, TextGenerator, _held_out, whole_sentences
from tests import tiny_models

TEXT = "Number <{}> is here. It is a text"


class Sent(NamedTuple):
    request_id: str
    prompt: list[int]
    params: SamplingParams


class FakeClient:
    def __init__(self, tokenizer: Tokenizer, text: str = TEXT) -> None:
        self.tokenizer, self._text = tokenizer, text
        self.sent: list[Sent] = []

    def prepare(self, prompt: list[int], params: SamplingParams) -> Sent:
        return Sent(f"r{len(self.sent)}", prompt, params)

    def submit(self, sent: Sent, sink: Callable[[RequestOutput], None], *, every_token: bool) -> None:
        text = self._text.format(str(len(self.sent)))
        self.sent.append(sent)
        completion = Completion(0, text=text, token_ids=self.tokenizer.encode(text, add_special_tokens=False))
        sink(RequestOutput(sent.request_id, None, sent.prompt, [completion], 0, RequestTimings(0.0)))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    tiny_models.write_tokenizer(tmp_path)
    return Tokenizer.from_folder(tmp_path)


def write(
    tokenizer: Tokenizer, count: int, given: list[list[str]] | None = None, text: str = TEXT, **changes: Any
) -> tuple[FakeClient, list[GeneratedText]]:
    client = FakeClient(tokenizer, text)
    settings = TrainSettings(out="x", sequences=count, **{"max_len": 1024, **changes})
    generator = TextGenerator(client, choose_prompt_format(tokenizer)[0], settings, lambda *_: None)  # type: ignore[arg-type]
    return client, generator.write(given or [])


def texts_of(tokenizer: Tokenizer, written: list[GeneratedText]) -> list[str]:
    return [tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=False) for one in written]


def test_texts_that_occur_twice_are_not_held_out() -> None:
    turns = [f"turn {i}" for i in range(64)]
    held = _held_out(turns, 400)
    assert [i for i, flag in enumerate(held) if flag] == [8, 24, 40, 56]
    turns[60] = turns[24]
    assert [i for i, flag in enumerate(_held_out(turns, 400)) if flag] == [8, 40, 56]
    assert sum(_held_out([str(i) for i in range(40_000)], 400)) == 400


def test_held_out_and_training_texts_have_no_text_in_common(tokenizer: Tokenizer) -> None:
    _, written = write(tokenizer, 1200)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for one, text in zip(written, texts_of(tokenizer, written), strict=True):
        found[one.held_out] |= set(re.findall(r"<(\d+)>", text))
    assert len(found[True]) > 60 and len(found[False]) > 1000
    assert not found[True] & found[False]


def test_a_given_prompt_that_the_target_also_generates_is_not_held_out(tokenizer: Tokenizer) -> None:
    given = [[f"given {i}"] for i in range(16)]
    given[8] = ["Hello!"]  # what an empty turn becomes
    _, written = write(tokenizer, 64, given, text="  {:.0}")
    assert not [one for one in written[:16] if one.held_out]
    _, written = write(tokenizer, 64, [[f"given {i}"] for i in range(16)], text="  {:.0}")
    assert [i for i, one in enumerate(written[:16]) if one.held_out] == [8]


def test_shares(tokenizer: Tokenizer) -> None:
    client, written = write(tokenizer, 1000)
    texts = texts_of(tokenizer, written)
    assert len(written) == 1000
    follow_ups = [text for text in texts if text.count("user: ") == 2]
    assert len(follow_ups) == 150
    singles, built = texts[:600], texts[600:]
    assert all(text.count("<s>user: ") == 1 for text in singles)
    documents = [sent for sent in client.sent if not tokenizer.decode(sent.prompt).startswith("user: ")]
    assert len(documents) == 125
    assert all(0.7 <= sent.params.temperature <= 0.9 and sent.params.max_tokens == 300 for sent in documents)  # type: ignore[operator]
    numbers = {str(client.sent.index(sent)) for sent in documents}
    long_tasks = [text for text in built if text not in follow_ups]
    of_documents = [text for text in long_tasks if set(re.findall(r"<(\d+)>", text)[:-1]) & numbers]
    assert len(long_tasks) == 250 and 95 < len(of_documents) < 155
    assert 15 < len([text for text in of_documents if "nglish" in text]) < 65
    answered = [sent.params.temperature for sent in client.sent[725:]]
    assert 0.58 < answered.count(0.0) / len(answered) < 0.68 and set(answered) == {0.0, 0.7, 1.0}


def test_everything_after_the_templates_beginning_is_trained_on(tokenizer: Tokenizer) -> None:
    _, written = write(tokenizer, 100, [["Hi", "And?"]])
    begin = len(tokenizer.encode("<s>user: ", add_special_tokens=False))
    assert {one.learn_from for one in written} == {begin}
    for one, text in zip(written, texts_of(tokenizer, written), strict=True):
        answer = tokenizer.decode(one.token_ids[one.answer_from :].tolist())
        assert re.fullmatch(TEXT.format(r"\d+"), answer) and text.endswith("<s>assistant: " + answer)
    [later] = [text for text in texts_of(tokenizer, written) if "And?" in text]
    assert re.fullmatch(
        r"<s>user: Hi</s><s>assistant: Number <\d+> .*</s><s>user: And\?</s><s>assistant: .*text", later
    )


def test_repetition_is_cut_in_answers_and_in_texts_composed_of_them(tokenizer: Tokenizer) -> None:
    _, written = write(tokenizer, 100, [["Hi", "And?"]], text="<{}>" + "abc" * 40)
    for one, text in zip(written, texts_of(tokenizer, written), strict=True):
        answer = tokenizer.decode(one.token_ids[one.answer_from :].tolist())
        assert re.fullmatch(r"<\d+>(abc){16}", answer), "48 tokens, each a letter"
        assert max(map(len, re.findall(r"(?:abc)+", text))) == 48


def test_long_contexts_fit(tokenizer: Tokenizer) -> None:
    _, written = write(tokenizer, 400, text="<{}> " + "It goes on and on. Then it went away again. " * 6, max_len=512)
    lengths = [one.answer_from for one in written[240:]]
    assert max(lengths) <= 512 - 16 and min(lengths) < 150 and max(lengths) > 350


def test_prompts_that_leave_no_room(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="every prompt is longer than --max-len 32 allows"):
        write(tokenizer, 16, [["x" * 100]] * 16, max_len=32)


def test_openings_fit_where_every_letter_is_a_token(tokenizer: Tokenizer) -> None:
    client, written = write(tokenizer, 200, text="{}", max_len=64)
    assert written and max(len(sent.prompt) for sent in client.sent) == 64 - 16
    with pytest.raises(ConfigError, match="every prompt is longer than --max-len 32 allows"):
        write(tokenizer, 200, text="{}", max_len=32)


def test_sentences() -> None:
    assert whole_sentences(" One. Two! Thr") == "One. Two!"
    assert whole_sentences("One. Two.\n") == "One. Two."
    assert whole_sentences("No end") == "No end"
    assert whole_sentences("") == ""
