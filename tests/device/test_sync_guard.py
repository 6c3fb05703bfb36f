from __future__ import annotations

import pytest

from slipstream.device.cpu import CpuDevice
from slipstream.device.sim import SimDevice
from slipstream.device.sync_guard import ALLOWED_PHASES, HostSyncError, NoGuard, SyncGuard


def raises(guard: SyncGuard) -> bool:
    try:
        guard.check("a test")
    except HostSyncError as error:
        assert "a test would make the host wait" in str(error)
        return True
    return False


def test_every_phase_that_may_synchronise_says_why() -> None:
    assert "collect" in ALLOWED_PHASES
    for phase, why in ALLOWED_PHASES.items():
        assert phase.isidentifier()
        assert len(why.split()) > 5, f"{phase}: a reason is a sentence"


def test_the_table_of_phases_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        ALLOWED_PHASES["lunch"] = "hungry"  # type: ignore[index]


@pytest.mark.parametrize("guard", [SyncGuard(), SyncGuard(forbidden=True), NoGuard()], ids=["off", "on", "none"])
def test_an_unknown_phase_is_an_error(guard: SyncGuard) -> None:
    before = guard.forbidden
    with pytest.raises(ValueError, match="'lunch' is not among the phases"), guard.allow("lunch"):
        pass
    assert guard.forbidden == before


@pytest.mark.parametrize("phase", ALLOWED_PHASES)
def test_synchronising_is_allowed_inside_a_phase_and_nowhere_else(phase: str) -> None:
    guard = SyncGuard(forbidden=True)
    assert raises(guard)
    with guard.allow(phase):
        assert not raises(guard)
    assert raises(guard)


@pytest.mark.parametrize("forbidden", [False, True])
def test_nesting_restores_what_was_around(forbidden: bool) -> None:
    guard = SyncGuard(forbidden)
    with guard.forbid():
        assert raises(guard)
        with guard.allow("build"):
            assert not raises(guard)
            with guard.allow("collect"), guard.forbid():
                assert raises(guard)
                with guard.forbid():
                    assert raises(guard)
                assert raises(guard)
            assert not raises(guard)
        assert raises(guard)
    assert raises(guard) == forbidden


def test_an_error_inside_restores_too() -> None:
    guard = SyncGuard(forbidden=True)
    for context in (guard.allow("build"), guard.forbid()):
        with pytest.raises(KeyError), context:
            raise KeyError
        assert raises(guard)


def test_a_guard_that_is_off_never_raises() -> None:
    guard = NoGuard()
    assert not raises(guard)
    with guard.forbid():
        assert not raises(guard)
        with guard.allow("collect"):
            assert not raises(guard)
        assert not raises(guard)


def test_which_device_has_which_guard() -> None:
    assert isinstance(CpuDevice().sync_guard, NoGuard)
    assert raises(SimDevice().sync_guard), "a simulated device is strict from the start"
