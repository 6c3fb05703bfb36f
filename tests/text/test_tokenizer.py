"""The tokenizer of the default model and those of folders against transformers'."""

from __future__ import annotations

import json
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.errors import ModelError, RequestError
from slipstream.text.tokenizer import Tokenizer
from tests.text.text_samples import CONVERSATIONS, SPECIALS, TEXTS

# The default model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(smollm2_path).tokenizer()


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path: Path) -> Any:
    """transformers' tokenizer, but with the digit rule of the published tokenizer.json.

    transformers does not know the rule when it reads a GGUF file; it shows in "\\n\\n1.", for example. A plain BPE
    further down checks the rule itself.
    """
    oracle = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    rule = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rule)
    return oracle


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_oracle: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_oracle.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == smollm2_oracle.decode(ids) == text
    assert smollm2.decode(ids) == smollm2_oracle.decode(ids, skip_special_tokens=True)
    assert [smollm2.token(token_id) for token_id in ids] == smollm2_oracle.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_smollm2_chat_equals_transformers(
    smollm2: Tokenizer, smollm2_oracle: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    text = smollm2_oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert smollm2.render_chat(messages, add_generation_prompt=add_generation_prompt) == text
    encoded = smollm2_oracle.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert smollm2.encode_chat(messages, add_generation_prompt=add_generation_prompt) == encoded["input_ids"]


def test_smollm2_special_tokens(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    assert smollm2.vocab_size == len(smollm2_oracle) == 49152
    assert smollm2.bos_token_id == smollm2_oracle.bos_token_id == 1
    assert smollm2.eos_token_id == smollm2_oracle.eos_token_id == 2
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.has_chat_template


def test_round_trip_of_random_text(smollm2: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):
        # Not the surrogates, nor the control characters: this vocabulary lacks the bytes of some.
        ranges = [(32, 127), (160, 0xD800), (0xE000, 0x10000), (0x10000, 0x1F700)]
        text = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(40)))
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_many_threads_get_the_same_answers(smollm2: Tokenizer) -> None:
    def work(_: int) -> list[Any]:
        ids = [smollm2.encode(text) for text in TEXTS]
        chats = [smollm2.encode_chat(messages) for messages in CONVERSATIONS]
        return [ids, chats, [smollm2.decode(some) for some in ids]]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(32)))
    assert all(result == results[0] for result in results)


def test_text_that_is_not_unicode_is_a_request_error(smollm2: Tokenizer) -> None:
    for bad in ("\ud800 lone surrogate", 3, None):
        with pytest.raises(RequestError, match="valid Unicode"):
            smollm2.encode(bad)  # type: ignore[arg-type]


def test_unknown_ids_have_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.token(10**6) == ""
    assert smollm2.decode([10**6]) == ""


# Folders


@pytest.fixture
def folder(tmp_path: Path, trained: tuple[dict[str, int], list[tuple[str, str]]]) -> Path:
    """What transformers saves, with things stored in it that must not leak into ours."""
    backend = Backend(models.BPE(vocab=trained[0], merges=trained[1]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS[:3])
    backend.add_tokens(SPECIALS[3:])
    end = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    )
    oracle.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    return tmp_path


def test_folder_equals_transformers(folder: Path) -> None:
    ours, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
        assert (
            ours.decode(ids)
            == oracle.decode(ids, skip_special_tokens=True)
            == oracle.decode(ids[1:], skip_special_tokens=True)
        )
    assert ours.vocab_size == len(oracle)
    assert (ours.bos_token_id, ours.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
    for messages in CONVERSATIONS:
        assert ours.render_chat(messages) == oracle.apply_chat_template(messages, tokenize=False)
        assert ours.encode_chat(messages) == oracle.apply_chat_template(messages)["input_ids"]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_flags_around_a_text_equal_transformers(folder: Path, add_bos: bool, add_eos: bool) -> None:
    edit_config(folder, add_bos_token=add_bos, add_eos_token=add_eos)
    ours, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("hello") == oracle.encode("hello")


def test_template_from_its_own_file_or_by_name(folder: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_config(folder, chat_template="{{ messages[0].content }} in config")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "x in config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }} default"}]
    edit_config(folder, chat_template=named)
    assert Tokenizer.from_folder(folder).render_chat(messages) == "<|endoftext|> default"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} in file")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "x in file"
    (folder / "chat_template.jinja").unlink()
    edit_config(folder, chat_template=...)
    assert not Tokenizer.from_folder(folder).has_chat_template


def test_tokens_written_as_objects_and_in_the_map(folder: Path) -> None:
    edit_config(folder, eos_token={"content": "<|im_end|>", "special": True}, bos_token=...)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    ours = Tokenizer.from_folder(folder)
    assert ours.token(ours.eos_token_id or -1) == "<|im_end|>"
    assert ours.token(ours.bos_token_id or -1) == "<|im_start|>"


def test_tokens_listed_only_in_the_config_are_added(folder: Path) -> None:
    known = Tokenizer.from_folder(folder)
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        str(known.vocab_size + 1): {"content": "<late>", "special": True, **flags},
        str(known.vocab_size): {"content": "<early>", "special": False, **flags},
    }
    edit_config(folder, added_tokens_decoder=listed)
    ours = Tokenizer.from_folder(folder)
    ids = ours.encode("<early><late>", add_special_tokens=False)
    assert ids == [known.vocab_size, known.vocab_size + 1]
    assert ours.decode(ids) == "<early>"


def test_a_named_token_is_special_even_if_the_file_forgot(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    for entry in stored["added_tokens"]:
        entry["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    edit_config(folder, added_tokens_decoder=...)
    ours = Tokenizer.from_folder(folder)
    assert ours.eos_token_id in ours.special_token_ids
    assert ours.decode(ours.encode("hi<|im_end|>", add_special_tokens=False)) == "hi"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_corrupt_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"half": ')
    with pytest.raises(ModelError, match=name) as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_nothing_warns(folder: Path, smollm2_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokenizer.from_folder(folder).encode("hi " * 5000)
        open_checkpoint(smollm2_path).tokenizer().encode("hi " * 20000)


def test_vocabularies_agree_up_to_what_fills_them(tmp_path: Path) -> None:
    def make(name: str, *tokens: str) -> Tokenizer:
        folder = tmp_path / name
        folder.mkdir()
        vocab = {token: idx for idx, token in enumerate(tokens)}
        Backend(models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
        return Tokenizer.from_folder(folder)

    plain, padded = make("plain", "a", "b", "c"), make("padded", "a", "b", "c", "[PAD3]", "[PAD4]")
    longer, other = make("longer", "a", "b", "c", "d"), make("other", "a", "c", "b")
    assert plain.agrees_with(padded) and padded.agrees_with(plain)
    assert padded.agrees_with(longer) and longer.agrees_with(plain)
    assert not plain.agrees_with(other) and not other.agrees_with(padded)
