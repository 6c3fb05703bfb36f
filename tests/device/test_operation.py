from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.device.operation import (
    Operation,
    TensorSpec,
    all_operations,
    map_tensors,
    operation,
    set_launcher,
    spec_of,
)
from tests.operation_checks import checked_operations


def test_a_device_can_queue_operations() -> None:
    @operation(lambda x: spec_of(x))
    def queued_double(x: Tensor) -> Tensor:
        return x * 2

    queue: list[tuple[Tensor, Operation[Any, Any], Any]] = []

    def launch(op: Operation[Any, Any], args: Any, kwargs: Any) -> Tensor:
        spec = op.specs(op.bind(args, kwargs))
        assert isinstance(spec, TensorSpec)
        out = torch.full(spec.shape, torch.nan, dtype=spec.dtype)
        queue.append((out, op, args))
        return out

    set_launcher("cpu", launch)
    try:
        out = queued_double(torch.ones(3))
    finally:
        set_launcher("cpu", None)
    assert out.isnan().all(), "nothing has run yet"
    for target, op, args in queue:
        target.copy_(op.body(*args))
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert queued_double(torch.ones(1)).tolist() == [2.0]


def test_names_are_unique() -> None:
    import slipstream.engine.build  # noqa: F401  brings every operation in

    assert {"rms_norm", "paged_attention", "commit", "prepare_inputs"} <= set(all_operations())
    with pytest.raises(ValueError, match="two operations are called rms_norm"):

        @operation(lambda x: spec_of(x))
        def rms_norm(x: Tensor) -> Tensor:
            return x


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Bundle:
    pair: Pair
    more: list[Tensor]
    missing: Tensor | None = None
    size: int = 3
    num_parts: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_parts", 2 + len(self.more))


@dataclass
class Loose:
    x: Tensor


@operation(like=("pair.second", "pair.first"), writes=("pair.first",))
def swap_and_clear(pair: Pair, spare: Tensor) -> tuple[Tensor, Tensor]:
    out = pair.second.clone(), pair.first.clone()
    pair.first.zero_()
    return out


@operation(writes=("pair.first",))
def clear_the_wrong_one(pair: Pair) -> None:
    pair.second.zero_()


@operation(lambda width, x: TensorSpec((x.shape[0], width), torch.int64))
def widen(x: Tensor, scale: float, width: int = 2) -> Tensor:
    return (x * scale).long().unsqueeze(1).expand(-1, width).contiguous()


def test_tensors_are_named_by_the_fields_they_lie_in() -> None:
    bundle = Bundle(Pair(torch.zeros(1), torch.ones(1)), [torch.zeros(2), torch.zeros(3)])
    seen: list[str] = []

    def double(name: str, tensor: Tensor) -> Tensor:
        seen.append(name)
        return tensor * 2

    made = map_tensors(bundle, "rows", double)
    assert seen == ["rows.pair.first", "rows.pair.second", "rows.more", "rows.more"]
    assert isinstance(made, Bundle) and made.pair.second.item() == 2.0 and made.missing is None and made.num_parts == 4
    loose = Loose(torch.zeros(1))  # may change between launch and run, so it is no bundle
    assert map_tensors(loose, "x", double) is loose
    assert len(seen) == 4


def test_without_a_queue_the_body_is_given_the_bundle_itself() -> None:
    pair, seen = Pair(torch.ones(2), torch.full((3,), 7.0)), []

    @operation(like="pair.first")
    def keep_bundle(pair: Pair) -> Tensor:
        seen.append(pair)
        return pair.first

    assert keep_bundle(pair) is pair.first
    assert seen[0] is pair


def test_outputs_are_like_arguments_or_made_of_those_that_the_shape_names() -> None:
    pair = Pair(torch.ones(2), torch.full((3,), 7.0))
    with checked_operations(compare_inputs=True):
        second, first = swap_and_clear(pair, torch.zeros(1))
        assert (second.tolist(), first.tolist(), pair.first.tolist()) == ([7.0] * 3, [1.0, 1.0], [0.0, 0.0])
        assert widen(torch.ones(2), 3.0).tolist() == [[3, 3], [3, 3]]
        assert widen(torch.ones(1), scale=3.0, width=3).tolist() == [[3, 3, 3]]


def test_a_write_that_is_not_declared_is_found_in_a_bundle() -> None:
    with (
        checked_operations(compare_inputs=True),
        pytest.raises(AssertionError, match=r"clear_the_wrong_one changed pair\.second"),
    ):
        clear_the_wrong_one(Pair(torch.ones(2), torch.ones(2)))


def test_declarations_that_cannot_be_right_are_refused() -> None:
    def body(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match="body has no argument called y"):
        operation(like="y")(body)
    with pytest.raises(ValueError, match="body has no argument called rows"):
        operation(writes=("rows.status",))(body)
    with pytest.raises(ValueError, match="body has no argument called z"):
        operation(lambda z: spec_of(z))(body)
    with pytest.raises(ValueError, match="body neither returns nor writes anything"):
        operation()(body)
    with pytest.raises(ValueError, match="body: either a shape function or like"):
        operation(lambda x: spec_of(x), like="x")(body)


def _field_type(kind: Any, name: str) -> Any:
    """Of a bundle, which may be missing."""
    kinds = [part for part in typing.get_args(kind) or (kind,) if part is not type(None)]
    assert len(kinds) == 1, kinds
    assert name in typing.get_type_hints(kinds[0]), f"{kinds[0]} has no {name}"
    assert dataclasses.is_dataclass(kinds[0]) or issubclass(kinds[0], tuple)
    return typing.get_type_hints(kinds[0])[name]


def test_fields_that_are_written_or_looked_at_exist() -> None:
    import slipstream.engine.build  # noqa: F401  brings every operation in

    num_fields = 0
    for op in all_operations().values():
        like = (op.like,) if isinstance(op.like, str) else op.like or ()
        for name in (*op.writes, *like):
            first, *fields = name.split(".")
            if fields:
                functools.reduce(_field_type, fields, typing.get_type_hints(op.body)[first])
                num_fields += 1
    assert num_fields
