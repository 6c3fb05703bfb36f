"""JSON files of a model folder: parsed completely, or an error of one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import ModelError
from slipstream.models.fields import Fields


def read_json(path: Path) -> Fields:
    """The JSON object in a file that must exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); download the model again") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    except RecursionError as error:
        raise ModelError(f"{path} is not valid JSON (too deeply nested); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object; download it again")
    return Fields(content, str(path))


def read_json_if_present(path: Path) -> Fields:
    """The JSON object in a file, empty if there is no such file."""
    return read_json(path) if path.is_file() else Fields({}, str(path))
