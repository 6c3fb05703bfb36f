"""Methods of drafting are known to their own files and to the registry. Everything else asks what a method needs.

What a user may say keeps its name: the option ``draft_model`` names the checkpoint that drafts, whatever the method,
and ``EngineConfig.draft_model`` is that network.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.commands.reference import engine_options_list
from slipstream.speculate.registry import find_method, keys_by_method, method_names

PACKAGE = Path(__file__).parent.parent / "slipstream"
ROOMS = ("engine", "scheduler", "runner", "graphs", "sampling", "attention", "kernels", "device", "server")
CONFIGURATION = ("config.py", "speculative_config.py", "cache_spec.py", "request.py", "plan.py", "output.py", "llm.py")
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash", "early_exit", "certain_tokens")
# The short option that names a checkpoint, where options are read.
OPTIONS = {"speculate/options.py": {"draft_model"}}


def files() -> list[Path]:
    rooms = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [*rooms, *(PACKAGE / name for name in CONFIGURATION)]


def names_in(path: Path) -> Iterator[str]:
    """Method names that the file's code says: as strings, as words of strings, and in ``is_...`` properties."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words = set(re.findall(r"\w+", node.value))
            # A message may tell the user of the option draft_model; a string of that word alone is a name.
            yield from words & (set(METHODS) - {"draft_model"}) | {node.value} & set(METHODS)
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        if isinstance(name, str) and name.removeprefix("is_") != name:
            yield from {name.removeprefix("is_")} & set(METHODS)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_method_is_named(path: Path) -> None:
    assert not set(names_in(path))
    own = {f"slipstream.speculate.{room}{name}" for name in METHODS for room in ("", "methods.")}
    assert own.isdisjoint(imports_of(path))


def test_in_their_own_room_methods_are_named_by_themselves_and_the_registry() -> None:
    found = {}
    for path in sorted((PACKAGE / "speculate").rglob("*.py")):
        if names := set(names_in(path)):
            found[path.relative_to(PACKAGE / "speculate").as_posix()] = names
    own = {f"methods/{name}.py": {name} for name in METHODS}
    options = {Path(path).name: names for path, names in OPTIONS.items()}
    assert found == {"registry.py": set(METHODS), **own, **options}


def test_the_test_finds_a_name(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    for line in ('x = "ngram"', 'say("drafts of mtp layers")', "if config.is_eagle: pass", 'a = b == "draft_model"'):
        path.write_text(line)
        assert list(names_in(path)), line
    path.write_text('"""Of ngram drafts."""\nx = "name one as draft_model"\n')
    assert not list(names_in(path))


def test_every_method_has_the_name_it_is_registered_under() -> None:
    assert method_names() == METHODS
    assert [find_method(name).name for name in METHODS] == list(METHODS)


def test_help_lists_what_the_registry_knows() -> None:
    text = " ".join(engine_options_list().split())
    assert f": {', '.join(METHODS[:-1])} or {METHODS[-1]};" in text
    assert "{" not in text.replace('{"method": "ngram", "num_speculative_tokens": 4}', "")


def test_the_page_on_speculation_has_every_method_and_key() -> None:
    page = (PACKAGE.parent / "docs" / "speculation.md").read_text(encoding="utf-8")
    listed = [f"`{name}`" for name in METHODS]
    assert f"{', '.join(listed[:-1])} or {listed[-1]}" in page
    for key, method in keys_by_method().items():
        assert f"- `{key}`: `{method}`: " in page
    for name in METHODS:
        assert f"**`{name}`**" in page


def test_options_are_read_without_torch() -> None:
    """The command line does so before anything else, and torch takes seconds."""
    code = (
        "import sys\n"
        "from slipstream.config import EngineOptions\n"
        "from slipstream.engine.find_models import resolve_models\n"
        "from slipstream.speculate.options import read_speculation\n"
        "for words in ({'method': 'ngram'}, {'method': 'mtp'}, {'method': 'eagle3', 'model': 'm'}, {'model': 'm'}):\n"
        "    assert read_speculation(EngineOptions(speculative_config=words)) is not None\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
