"""Drafting methods by name. A method's file is imported when it is used, torch when the method is opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError, nearest
from slipstream.speculate.method import DraftMethod

_FILES = "slipstream.speculate.methods"
_METHODS = {
    "ngram": (f"{_FILES}.ngram", "Ngram"),
    "draft_model": (f"{_FILES}.draft_model", "SecondModel"),
    "eagle": (f"{_FILES}.eagle", "Eagle"),
    "eagle3": (f"{_FILES}.eagle3", "Eagle3"),
    "mtp": (f"{_FILES}.mtp", "Mtp"),
    "dflash": (f"{_FILES}.dflash", "DFlash"),
    "early_exit": (f"{_FILES}.early_exit", "EarlyExit"),
    "certain_tokens": (f"{_FILES}.certain_tokens", "CertainTokens"),
}
_METHOD_OF_A_MODEL = "draft_model"  # as in vLLM, a model without a method selects this one
registered: dict[str, DraftMethod] = {}


def register(method: DraftMethod) -> None:
    """Register a method under its name."""
    if method.name in _METHODS or registered.get(method.name, method) is not method:
        raise ValueError(f"two methods are called {method.name}")
    registered[method.name] = method


def method_names() -> tuple[str, ...]:
    return (*_METHODS, *registered)


def find_method(name: str) -> DraftMethod:
    if name in registered:
        return registered[name]
    module, class_name = _METHODS[name]
    method: DraftMethod = getattr(importlib.import_module(module), class_name)()
    return method


def read_method(given: Mapping[str, Any], where: str) -> DraftMethod:
    """The method that the user named; ``where`` is the option in messages."""
    name, model, known = given.get("method"), given.get("model"), method_names()
    if name is None and model is not None:
        named = [method for method in known if model in find_method(method).model_names]
        name = named[0] if named else _METHOD_OF_A_MODEL
    if isinstance(name, str) and name in known:
        return find_method(name)
    if name is None:
        raise ConfigError(f"{where} names no method; known are {', '.join(known)}")
    hint = nearest(str(name), known) or f"; known are {', '.join(known)}"
    raise ConfigError(f"unknown method {name!r} in {where}{hint}")


def keys_by_method() -> dict[str, str]:
    """Keys that belong to one method, with its name."""
    return {key: name for name in method_names() for key in find_method(name).keys}
