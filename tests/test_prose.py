"""What people read: short lines, plain words, links that lead somewhere, pages that the site lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINE = 120
# Files and folders whose words are checked.
PLACES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs", "examples", "slipstream", "benchmarks/README.md"),
)
# Lists of any words.
VOCABULARIES = {"words.py", "fillers.py", "prompt_templates.py"}
# An entry of the log is kept as it was written on its day.
LEFT_AS_WRITTEN = ROOT / "docs" / "log"
# Words of an old dialect, and what the field says instead.
DIALECT = {
    r"behind": "after, next",
    r"nobody|somebody|whoever": "no request, another request, the caller",
    r"stands?|stood|would_stand": "accepted, is",
    r"wish(es|ed)?": "needs, requirements",
    r"foresee[ns]?|foreseen": "known without verification",
    r"dead tokens?|empty places?": "padding, unused slots",
    r"drafts? (are|is) made": "draft tokens are proposed",
    r"drafts? (seldom |never )?pass(es|ed)?": "drafts are accepted",
    r"looks on": "follows",
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


def files(places: tuple[str, ...], *endings: str) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in endings]
    return sorted(p for p in found if LEFT_AS_WRITTEN not in p.parents and p.name not in VOCABULARIES)


def pages() -> list[Path]:
    own = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    return sorted([*own, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them from headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_lines_are_short(page: Path) -> None:
    long = [i for i, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1) if len(line) > MAX_LINE]
    assert not long, f"{name(page)}: lines {long} have more than {MAX_LINE} characters"


@pytest.mark.parametrize("page", files(PLACES, ".md", ".py", ".c", ".h"), ids=name)
def test_words_are_the_fields(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for pattern, better in DIALECT.items():
        found = re.search(rf"\b({pattern})\b", text, re.IGNORECASE)
        assert found is None, f"{name(page)} says '{found[0]}'; say: {better}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{name(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(path), f"{name(page)} links to {link}; the page has no such heading"


def test_pages_of_the_site_link_within_it() -> None:
    """What is outside of ``docs/`` is not part of the site."""
    for page in (ROOT / "docs").rglob("*.md"):
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in link and not link.startswith("#"):
                target = (page.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(ROOT / "docs"), f"{name(page)} links to {link}"


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"([\w./-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    entries = {page for page in there if page.startswith("log/")}  # the log's index links to them
    assert len(listed) == len(set(listed)) and set(listed) == there - entries
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert sorted(f"log/{e}" for e in re.findall(r"\(log/([^)]+)\)", log)) == sorted(entries)


def test_the_lists_of_contributing_name_what_is_there() -> None:
    """Files that exist, or are to be written into folders that do."""
    listed = re.findall(
        r"`((?:slipstream|tests|docs)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    assert len(listed) > 20
    for path in map(Path, listed):
        known = [part for part in path.parts if not re.search("NAME|SUBJECT", part)]
        assert ROOT.joinpath(*known).exists(), f"CONTRIBUTING.md names {path}, which is not there"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_no_merge_is_left_half_done(page: Path) -> None:
    marks = re.findall(r"^(?:<{7} |={7}$|.*>{7} )", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert not marks, f"{name(page)} has marks of a merge: {marks}"
