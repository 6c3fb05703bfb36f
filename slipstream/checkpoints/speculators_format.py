"""Configs of the ``speculators`` library, converted to the form of other draft heads.

Their decoder layer has its own config, ``transformer_layer_config``; flags of the method are at the top level.
"""

from __future__ import annotations

from typing import Any

from slipstream.errors import ModelError, nearest
from slipstream.fields import Fields

# The library's name of each method, and the architecture used here.
_ARCHITECTURES = {"eagle3": "Eagle3Speculator", "eagle": "EagleSpeculator", "dflash": "DFlashSpeculator"}
_SHOWN = 60  # characters of a value in a message
# Keys that do not describe the network, or that the decoder layer's own config gives.
_NOT_COPIED = (
    "architectures",
    "auto_map",
    "model_type",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "transformer_layer_architecture",
    "transformer_layer_config",
)


def is_speculators(hf: dict[str, Any]) -> bool:
    return "speculators_model_type" in hf


def plain_config(hf: Fields) -> Fields:
    """The same head as a plain config would describe it, with the defaults in which the two formats differ."""
    method = str(hf["speculators_model_type"])[:_SHOWN]
    if method not in _ARCHITECTURES:
        raise ModelError(
            f"'speculators_model_type' is '{method}', which is not supported{nearest(method, _ARCHITECTURES)} "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    layer = hf.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelError("the speculators config has no 'transformer_layer_config'; download the head again")
    flags = {key: value for key, value in hf.items() if key not in _NOT_COPIED and value is not None}
    # These heads always have their own output matrix.
    plain = {**layer, **flags, "architectures": [_ARCHITECTURES[method]], "tie_word_embeddings": False}
    if method == "eagle3":
        plain.setdefault("norm_before_residual", True)  # the default of other heads is the opposite
    elif method == "eagle":
        plain["eagle_fc_bias"] = plain.pop("fusion_bias", False)
    return Fields(plain, hf.source)


def proposed_tokens(hf: dict[str, Any]) -> int | None:
    """How many tokens the head was trained to draft, if its config says so."""
    config = Fields.from_dict(hf).section("speculators_config")
    methods = config.get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise config.refuse("proposal_methods", "a list of objects")
    value = methods[0].get("speculative_tokens")
    return value if isinstance(value, int) and value > 0 else None
