"""The fields of ``SamplingParams`` that sampling operations read, generated from the operations' declarations.

``python -m slipstream.commands.sampling_fields`` writes them; a test compares. Existing fields keep their order and new
ones are appended, so that positional arguments of callers keep their meaning.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream import sampling_params
from slipstream.errors import ConfigError
from slipstream.parameters import Check, Parameter, Switch, Texts, TokenIds, TokenNumbers
from slipstream.sampling.registry import packaged
from slipstream.values import Bounds

PAGE = Path(sampling_params.__file__)
_GENERATED = re.compile(r"(    # generated: parameters of sampling operations\n).*?(    # end\n)", re.DOTALL)
_TYPES: dict[type, str] = {
    Switch: "bool",
    Texts: "tuple[str, ...]",
    TokenIds: "tuple[int, ...]",
    TokenNumbers: "Mapping[int, float]",
}


def update(source: str) -> str:
    """The file's text with the generated fields replaced."""
    declared = {parameter.name: parameter for operation in packaged() for parameter in operation.parameters}
    order = dict.fromkeys((*(name for name in sampling_params.PARAMETERS if name in declared), *declared))
    written = "".join(_field(declared[name]) for name in order)
    updated, count = _GENERATED.subn(lambda markers: markers[1] + written + markers[2], source)
    if count != 1:
        raise ConfigError("sampling_params.py lacks the markers of generated fields; put the two comments back")
    return updated


def _field(declared: Parameter) -> str:
    may_be_none = declared.default is None
    values = [_call(declared.check), json.dumps(declared.help) if '"' not in declared.help else repr(declared.help)]
    if not may_be_none:
        values.append(f"default={_value(declared.default)}")
    values += [
        f"{name}={_value(value)}"
        for name, value in (("fallback", declared.fallback), ("minimum", declared.minimum))
        if value is not None
    ]
    annotation = _type(declared.check) + (" | None" if may_be_none else "")
    lines = "".join(f"        {value},\n" for value in values)
    return f"    {declared.name}: {annotation} = parameter(\n{lines}    )\n"


def _type(check: Check) -> str:
    if isinstance(check, Bounds):
        return "int" if check.is_integer else "float"
    return _TYPES[type(check)]


def _call(check: Any) -> str:
    """A constructor call without the arguments that equal their defaults."""
    defaults = check._field_defaults
    given: Iterable[tuple[str, Any]] = zip(check._fields, check, strict=True)
    arguments = [
        _value(value) if name not in defaults else f"{name}={_value(value)}"
        for name, value in given
        if name not in defaults or defaults[name] != value
    ]
    return f"{type(check).__name__}({', '.join(arguments)})"


def _value(value: Any) -> str:
    return "math.inf" if value == math.inf else repr(value)


def main() -> int:
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"slipstream/{PAGE.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
