"""Parts of the kernels that truncate a row of logits: find the value at which a count or a mass is reached, unsorted.

Float32 numbers, read as integers with negative ones reversed, keep their order. A search that quarters a range of such
integers finds any float in sixteen passes over the row.
"""

from __future__ import annotations

from slipstream.kernels.triton_jit import jit, tl

BLOCK = 4096
NUM_WARPS = 16


@jit
def _key_of(x):
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def find_largest(values, size, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    return tl.max(largest, 0)


@jit
def find_threshold(values, size, largest, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest number above which less than the target lies, and the sum above it.

    Numbers weigh exp(x - largest), or 1 each. -inf weighs nothing. If all finite ones together do not reach the target,
    the result is below them all.
    """
    lower, upper = _key_of(tl.zeros_like(largest) + float("-inf")), _key_of(largest)
    above = tl.zeros_like(largest)
    for _ in range(16):
        span = upper - lower
        key1, key2, key3 = lower + (span >> 2), lower + (span >> 1), lower + (3 * span >> 2)
        pivot1, pivot2, pivot3 = _value_of(key1), _value_of(key2), _value_of(key3)
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
            weight = tl.exp(x - largest) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
            sum1 += tl.where(x > pivot1, weight, 0.0)
            sum2 += tl.where(x > pivot2, weight, 0.0)
            sum3 += tl.where(x > pivot3, weight, 0.0)
        mass1, mass2, mass3 = tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
        less1, less2, less3 = mass1 < target, mass2 < target, mass3 < target
        # Sums decrease as pivots increase, so the first below the target and the last not below are neighbours.
        lower = tl.where(less1, lower, tl.where(less2, key1, tl.where(less3, key2, key3)))
        upper = tl.where(less1, key1, tl.where(less2, key2, tl.where(less3, key3, upper)))
        above = tl.where(less1, mass1, tl.where(less2, mass2, tl.where(less3, mass3, above)))
    return _value_of(upper), above


@jit
def keep_at_least(values, out, size, threshold, BLOCK: tl.constexpr):
    """The row with everything below the threshold set to -inf."""
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=0.0)
        tl.store(out + column, tl.where(x.to(tl.float32) >= threshold, x, float("-inf")), mask=column < size)
