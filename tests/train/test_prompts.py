from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.text.tokenizer import Tokenizer
from slipstream.train.fillers import Fillers
from slipstream.train.prompts import ChatPromptFormat, PlainPromptFormat, choose_prompt_format, read_prompts
from tests import tiny_models


def test_lines_and_json_lines(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text('first\n\n  {"prompt": 1}  \n')
    assert read_prompts(lines) == [["first"], ['{"prompt": 1}']]
    entries = [{"prompt": " x "}, {"turns": ["a", "b"], "category": "writing"}, "y"]
    objects.write_text("\n".join(map(json.dumps, entries)))
    assert read_prompts(objects) == [["x"], ["a", "b"], ["y"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "is empty; put a prompt on each line"),
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', "line 2, is not JSON"),
        ("a.jsonl", b'{"text": "x"}', '"prompt" or "turns"'),
        ("a.jsonl", b'{"prompt": "x", "turns": ["y"]}', '"prompt" or "turns"'),
        ("a.jsonl", b'{"turns": []}', "texts that are not empty"),
        ("a.jsonl", b'{"prompt": 3}', "texts that are not empty"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)
    with pytest.raises(ConfigError, match="check the path"):
        read_prompts(tmp_path / "nowhere")


def tokenizer_with(folder: Path, template: str | None) -> Tokenizer:
    tiny_models.write_tokenizer(folder)
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def test_the_template_is_cut_where_the_user_speaks(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, tiny_models.CHAT_TEMPLATE)
    prompt_format, line = choose_prompt_format(tokenizer)
    assert isinstance(prompt_format, ChatPromptFormat) and line is None
    assert prompt_format.stop_ids == (tiny_models.EOS_ID,) and prompt_format.stop == ()
    fillers, generator = Fillers(["harbor"]), random.Random(0)
    openings = [prompt_format.opening(generator, fillers) for _ in range(400)]
    assert 70 < sum(opening.text == "" for opening in openings) < 130
    assert 140 < sum("arbor" in opening.text for opening in openings) < 220
    for opening in openings:
        assert tokenizer.decode(opening.token_ids) == "user: " + opening.text
    assert prompt_format.begin == len(tokenizer.encode("<s>user: ", add_special_tokens=False))
    assert tokenizer.decode(prompt_format.prompt(["a", "b", "c"])) == "user: aassistant: buser: cassistant: "


def test_a_turn_may_end_with_a_stop_string(tmp_path: Path) -> None:
    prompt_format, _ = choose_prompt_format(
        tokenizer_with(tmp_path, "{% for m in messages %}[Q]{{ m['content'] }}[/Q]{% endfor %}")
    )
    assert prompt_format.stop == ("[/Q]",) and prompt_format.stop_ids == ()


@pytest.mark.parametrize(("template", "message"), [(None, "no chat template"), ("hello", "does not show")])
def test_without_a_template_texts_are_continued(tmp_path: Path, template: str | None, message: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    prompt_format, line = choose_prompt_format(tokenizer)
    assert isinstance(prompt_format, PlainPromptFormat) and line is not None and message in line
    assert tokenizer.decode(prompt_format.prompt(["a", "b"])) == "a\n\nb"
    assert prompt_format.opening(random.Random(0), Fillers([])).token_ids
