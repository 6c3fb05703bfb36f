"""The list of planted faults is kept true: each names one piece of the code."""

from __future__ import annotations

import ast

import pytest

from tests.sim.mutations import MUTATIONS
from tests.sim.planted import Mutation, find_places, plant, tokens_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_code_is_there_once(mutation: Mutation) -> None:
    assert len(find_places(mutation)) == 1
    _, text = plant(mutation)
    ast.parse(text)
    assert tokens_of(mutation.code) != tokens_of(mutation.changed)


def test_formatting_and_comments_do_not_matter() -> None:
    one_line = "found = take(first, second[a:b])"
    formatted = "found = take(\n    first,  # the first\n    second[\n        a:b\n    ],\n)"
    assert [token for token, _, _ in tokens_of(one_line)] == [token for token, _, _ in tokens_of(formatted)]


def test_code_of_another_function_is_not_found() -> None:
    where = "pages:PagePool."
    there = Mutation("", where + "pages_for", "return", "pass")
    assert len(find_places(there)) == 1
    assert not find_places(there._replace(where=where + "no_such_function"))
    assert not find_places(there._replace(code="no_such_name"))
