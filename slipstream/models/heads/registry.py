"""Which kind of head a config describes, and its network. A kind's file is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.checkpoints.hf_config import read_architecture_name
from slipstream.checkpoints.speculators_format import is_speculators, plain_config
from slipstream.config import ModelConfig
from slipstream.errors import ModelError, nearest
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder
from slipstream.models.heads.network import HeadNetwork, HeadPlan, Kind
from slipstream.models.heads.read_config import BODIES, DEEPSEEK_COUNT, QWEN_COUNT
from slipstream.models.layers import open_weights
from slipstream.values import describe_value
from slipstream.weights.eight_bits import EightBits, can_round
from slipstream.weights.matrix import WeightScheme
from slipstream.weights.registry import scheme_of

_MODULES: dict[Kind, str] = {
    "eagle": "slipstream.models.heads.eagle",
    "eagle3": "slipstream.models.heads.eagle3",
    "mtp": "slipstream.models.heads.mtp",
    "dflash": "slipstream.models.heads.dflash",
}
_ARCHITECTURES: dict[str, Kind] = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "EagleSpeculator": "eagle",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
}


def read_head(hf_config: dict[str, Any], target: ModelConfig, kind: Kind | None = None) -> HeadPlan:
    """Which kind of head a config describes, and all its settings.

    ``kind`` is the method that the user named. It decides where the config does not: the first EAGLE heads have the
    name of their decoder layer, and MTP layers are described by the config of the target that carries them.
    """
    hf = Fields.from_dict(hf_config, "the head's config.json")
    if is_speculators(hf):
        hf = plain_config(hf)
    elif hf.get("model_type") == "eagle" and isinstance(hf.get("model"), dict):
        # vLLM's first converter wrote it like this: the head's config inside another.
        hf = hf.changed(**{"model": None, **hf["model"], "architectures": ["EagleLlamaForCausalLM"]})
    expectations = (("architectures", list, "a list of names"), ("eagle_config", dict, "an object"))
    for key, value_type, expected in expectations:
        if hf.get(key) is not None and not isinstance(hf[key], value_type):
            raise ModelError(f"'{key}' in the head's config.json must be {expected}, not {describe_value(hf[key])}")
    plan: HeadPlan = importlib.import_module(_MODULES[_kind_of(hf, kind)]).read(hf, target)
    return plan


def build_head(plan: HeadPlan, target_model: Decoder, max_position: int) -> HeadNetwork:
    """The network without its weights. Call it under the device and the type it runs with."""
    head: HeadNetwork = importlib.import_module(_MODULES[plan.kind]).build(plan, target_model, max_position)
    open_weights(head, _scheme_beside(target_model.config, plan.config))
    return head


def _scheme_beside(target: ModelConfig, head: ModelConfig) -> WeightScheme:
    """A head of plain numbers beside a target that stays quantised is rounded; it would read more than the target."""
    if head.quantization is None and target.quantization is not None and can_round():
        return EightBits()
    return scheme_of(head.quantization)


def _kind_of(hf: Fields, named: Kind | None) -> Kind:
    name = read_architecture_name(hf)
    found = _ARCHITECTURES.get(name)
    if found is None and named is None and (hf.get(DEEPSEEK_COUNT) or hf.get(QWEN_COUNT)):
        return "mtp"
    if found is None and (named == "mtp" or name in BODIES.values()):
        found = named
    if found is None:
        raise ModelError(
            f"architecture {describe_value(name)} is not that of a draft head{nearest(name, _ARCHITECTURES)} "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    if named not in (None, found):
        raise ModelError(f"architecture '{name}' is that of a head for the method {found}, not for {named}")
    return found
