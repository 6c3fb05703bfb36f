"""``system_fingerprint``: another value wherever numbers may differ, the same where they may not."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config import EngineOptions
from slipstream.engine.resolve import resolve
from slipstream.server.routes import fingerprint_of
from tests.test_config import CPU, MODEL


def test_it_says_which_numerics_made_a_response() -> None:
    hardware = replace(CPU, name="a processor")
    plain = resolve(EngineOptions(), hardware, MODEL)
    others = [
        replace(plain, exact=True),
        replace(plain, processor="another"),
        replace(plain, weight_formats="Q4_K"),
        replace(plain, dtype="bfloat16"),
        replace(plain, device="cuda"),
        replace(plain, model=replace(MODEL, num_layers=MODEL.num_layers + 1)),
    ]
    found = [fingerprint_of(config, "a model") for config in (plain, *others)] + [fingerprint_of(plain, "its finetune")]
    assert len(set(found)) == len(found)
    assert found[1].endswith("-exact") and not found[0].endswith("-exact")
    assert fingerprint_of(plain.for_clients(), "a model") == found[0], "front ends know less of the configuration"
    scheduler = replace(plain.scheduler, max_num_seqs=3, num_drafts=2)
    assert fingerprint_of(replace(plain, scheduler=scheduler, steps_in_flight=4), "a model") == found[0]
