"""Times of words: weights against transformers', paths against all there are, words by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.encoder_input import EncoderInput
from slipstream.errors import ModelError
from slipstream.text.tokenizer import Tokenizer
from slipstream.transcription.aligner import Aligner, read_alignment_heads
from slipstream.transcription.word_times import (
    TokenWord,
    find_path,
    limit_words_at_pauses,
    merge_punctuation,
    split_words,
    time_words,
)
from tests.transcription import tiny_whisper

TOKENIZER = Tokenizer(tiny_whisper.make_tokenizer(), named_tokens={})
TOKEN_IDS = [tiny_whisper.START, tiny_whisper.NO_TIMESTAMPS, 72, 101, 108, 108, 111, tiny_whisper.END]


def test_weights_are_those_of_transformers(tmp_path: Path) -> None:
    """Heads in the order in which they are named, and nothing for what comes after the sound."""
    model = tiny_whisper.make_model()
    tiny_whisper.save_folder(tmp_path, model)
    config = tmp_path / "generation_config.json"
    config.write_text(config.read_text().replace("{", '{"alignment_heads": [[2, 1], [0, 3], [2, 0]],', 1))
    features = np.random.default_rng(0).standard_normal((80, 3000)).astype(np.float32)
    found = Aligner(tmp_path).weights(EncoderInput(features), TOKEN_IDS, num_frames=1001)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        given = {"input_features": torch.from_numpy(features)[None], "decoder_input_ids": torch.tensor([TOKEN_IDS])}
        layers = model(**given, output_attentions=True).cross_attentions
    kept = torch.stack([layers[layer][0, head, :, :500] for layer, head in ((2, 1), (0, 3), (2, 0))])
    expected = kept / kept.sum(dim=2, keepdim=True)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-5)


def test_heads(tmp_path: Path) -> None:
    tiny_whisper.save_folder(tmp_path, tiny_whisper.make_model())
    assert read_alignment_heads(open_checkpoint(tmp_path), 3, 2) == ((1, 0), (1, 1), (2, 0), (2, 1))
    config = tmp_path / "generation_config.json"
    plain = config.read_text()
    for heads in ("[[3, 0]]", "[[0, 2]]", "[[0]]", "[0, 1]", "[[0, -1]]", "[[true, 0]]", '"all"'):
        config.write_text(plain.replace("{", f'{{"alignment_heads": {heads},', 1))
        with pytest.raises(ModelError, match="alignment_heads"):
            read_alignment_heads(open_checkpoint(tmp_path), 3, 2)


def all_paths(num_rows: int, num_columns: int) -> Iterator[list[tuple[int, int]]]:
    def extend(path: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        row, column = path[-1]
        if (row, column) == (num_rows - 1, num_columns - 1):
            yield path
        for down, right in ((1, 1), (1, 0), (0, 1)):
            if row + down < num_rows and column + right < num_columns:
                yield from extend([*path, (row + down, column + right)])

    return extend([(0, 0)])


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (1, 5), (4, 1), (2, 3), (4, 4), (3, 6)])
def test_the_path_has_the_largest_sum_of_all(num_rows: int, num_columns: int) -> None:
    gain = np.random.default_rng(num_columns).standard_normal((num_rows, num_columns)).astype(np.float32)
    best = max(all_paths(num_rows, num_columns), key=lambda path: sum(gain[at] for at in path))
    assert find_path(gain).tolist() == [list(at) for at in best]


def test_times() -> None:
    """Two heads look at one place after the other; the third looks everywhere, as some of a model's do."""
    begins, num_entries = [0, 0, 0, 10, 25, 40, 60, 80], 100
    weights = np.full((3, len(begins), num_entries), 1e-3, np.float32)
    for row in range(2, len(begins) - 1):
        weights[:2, row, begins[row] : begins[row + 1]] = 0.2
    words = [TokenWord(" Hel", 2), TokenWord(" lo", 1), TokenWord(" you", 1)]
    time_words(weights, 2, words)
    assert [(round(word.start, 2), round(word.end, 2)) for word in words] == [(0.0, 0.5), (0.5, 0.8), (0.8, 1.2)]


def split(text: str, language: str = "en") -> list[str]:
    return [word.text for word in split_words(TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER, language)]


def test_words() -> None:
    assert split(" Café, she-3.") == [" Café", ",", " she", "-3", "."]
    assert split("ab") == ["ab"]
    assert split("你好", "zh") == ["你", "好"]
    text = " Ünder \u2018it\u2019"
    words = split_words(ids := TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER, "de")
    assert "".join(word.text for word in words) == text and sum(word.num_tokens for word in words) == len(ids)


def test_punctuation_goes_with_its_word() -> None:
    words = [TokenWord(text, 1, i, i + 1) for i, text in enumerate([" He", " said", ":", ' "', "Go", "!", '"', " Yes"])]
    found = merge_punctuation(words)
    assert [(one.text, one.num_tokens, one.start, one.end) for one in found] == [
        (" He", 1, 0, 1),
        (" said:", 2, 1, 2),
        (' "Go!"', 4, 4, 5),
        (" Yes", 1, 7, 8),
    ]


def test_pauses_are_no_part_of_words() -> None:
    words = [TokenWord(" a", 1, 0.0, 0.4), TokenWord(".", 1, 0.4, 3.0), TokenWord(" b", 1, 3.0, 6.0)]
    words += [TokenWord(" c", 1, 6.0, 6.4), TokenWord(" d", 1, 6.4, 6.8)]
    limit_words_at_pauses(words)
    assert [(round(one.start, 2), round(one.end, 2)) for one in words[1:3]] == [(0.4, 1.2), (5.2, 6.0)]
