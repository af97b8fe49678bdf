"""f32 and bf16 codecs and the finite scan (W51, W52, W11)."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wire import tensors
from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.tensors import (
    NonFiniteValues,
    check_finite,
    decode,
    decode_into,
    encode,
    load_loops,
    representable,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["vectors"]
OVERFLOW_BITS = 0x7F7F8000

finite_bits = st.integers(0, 2**32 - 1).filter(lambda b: b & 0x7F800000 != 0x7F800000)


def golden(kind: str) -> list:
    return [pytest.param(v, id=v["id"]) for v in GOLDEN if v["kind"] == kind]


def from_bits(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.float32))


def nearest_bf16(value: int) -> int:
    """Round to nearest, ties to even, in exact integers."""
    low, high = value & 0xFFFF, value >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


@pytest.mark.parametrize("vector", golden("tensor_roundtrip"))
def test_golden_roundtrip(vector: dict) -> None:
    dtype = DType(vector["input"]["dtype"])
    values = torch.tensor(vector["input"]["values"], dtype=torch.float32)
    assert torch.equal(decode(encode(values, dtype), dtype, len(values)), values)


@pytest.mark.parametrize("vector", golden("tensor_decode_error"))
def test_golden_decode_errors(vector: dict) -> None:
    dtype = DType(vector["input"]["dtype"])
    data = bytes.fromhex(vector["input"]["hex"])
    with pytest.raises(ProtocolError) as caught:
        decode(data, dtype, len(data) // 2)
    assert caught.value.code is ErrorCode.NON_FINITE


@pytest.mark.parametrize("vector", golden("bulk_dtype"))
def test_golden_bulk_dtypes(vector: dict) -> None:
    assert [DType(code).bulk for code in vector["input"]] == vector["expected"]


@given(st.lists(finite_bits, min_size=1, max_size=40))
def test_f32_keeps_every_bit(values: list[int]) -> None:
    """W51, signed zeros and subnormals included."""
    tensor = from_bits(*values)
    data = encode(tensor, DType.F32)
    assert bytes(data) == struct.pack(f"<{len(values)}I", *values)
    assert decode(data, DType.F32, len(values)).numpy().view(np.uint32).tolist() == values


@given(
    st.lists(finite_bits.filter(lambda b: b & 0x7FFFFFFF < OVERFLOW_BITS), min_size=1, max_size=40)
)
def test_bf16_rounds_to_nearest_even(values: list[int]) -> None:
    """W52."""
    expected = [nearest_bf16(value) for value in values]
    data = encode(from_bits(*values), DType.BF16)
    assert bytes(data) == struct.pack(f"<{len(values)}H", *expected)
    decoded = decode(data, DType.BF16, len(values)).numpy().view(np.uint32)
    assert decoded.tolist() == [half << 16 for half in expected]


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_bf16_refuses_what_rounds_to_infinity(sign: int) -> None:
    """W52: the largest that stays finite, and its neighbour."""
    assert representable(from_bits(sign | (OVERFLOW_BITS - 1)), DType.BF16)
    assert bytes(encode(from_bits(sign | (OVERFLOW_BITS - 1)), DType.BF16))[0] == 0x7F
    assert not representable(from_bits(sign | OVERFLOW_BITS), DType.BF16)
    with pytest.raises(NonFiniteValues):
        encode(from_bits(sign | OVERFLOW_BITS), DType.BF16)
    assert bytes(encode(from_bits(sign | OVERFLOW_BITS), DType.F32))


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 65535, 65536, 70000])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_bad_value_anywhere_is_found(
    dtype: DType, bad: float, at: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W11, W51: the scan goes over every block and the tail, before the compiler is done too."""
    load_loops()
    if not compiled:
        monkeypatch.setattr(tensors, "loaded", lambda _: False)
    values = torch.ones(70001)
    values[at] = bad
    with pytest.raises(NonFiniteValues):
        encode(values, dtype)
    assert not representable(values, dtype)
    raw = values.numpy().tobytes()
    if dtype is DType.BF16:
        raw = (values.numpy().view(np.uint32) >> 16).astype("<u2").tobytes()
    with pytest.raises(ProtocolError) as caught:
        check_finite(raw, dtype)
    assert caught.value.code is ErrorCode.NON_FINITE


def test_a_scan_never_waits_for_the_compiler() -> None:
    """A process that has not loaded the compiled scans does without: a scan may run on a loop."""
    program = """
import numpy as np
from wire import tensors
from wire.dtypes import DType
data = bytearray(4 * 100_000)
tensors.check_finite(data, DType.F32)
assert not tensors.loaded(tensors._largest_word)
tensors.load_loops()
kinds = len(tensors._largest_word.signatures)
for view in (data, bytes(data), memoryview(data)[4:], memoryview(bytes(data) + b"0")[1:]):
    tensors.check_finite(view, DType.F32)
assert len(tensors._largest_word.signatures) == kinds == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_wrong_length_is_refused(dtype: DType) -> None:
    data = bytes(encode(torch.ones(300), dtype))
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ProtocolError) as caught:
            decode(wrong, dtype, 300)
        assert caught.value.code is ErrorCode.BAD_LENGTH


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("offset", [0, 1, 2, 50])
def test_a_payload_may_lie_at_any_address(dtype: DType, offset: int) -> None:
    """A payload is a slice of the message that carried it."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    data = bytes(encode(values, dtype))
    message = bytearray(offset) + data
    view = memoryview(message)[offset:]
    check_finite(view, dtype)
    expected = decode(data, dtype, 1000)
    assert torch.equal(decode(view, dtype, 1000), expected)
    assert torch.equal(decode(view, dtype, 1000, copy=False), expected)
    out = np.empty(301, np.float32)
    decode_into(view, dtype, 77, out)
    assert out.tolist() == expected[77:378].tolist()


def test_f32_is_shared_only_on_request() -> None:
    data = bytearray(encode(torch.ones(4), DType.F32))
    copied, shared = decode(data, DType.F32, 4), decode(data, DType.F32, 4, copy=False)
    data[:4] = struct.pack("<f", 5.0)
    assert copied.tolist() == [1, 1, 1, 1]
    assert shared.tolist() == [5, 1, 1, 1]


def test_encode_leaves_its_input_alone() -> None:
    values = torch.randn(700)
    before = values.clone()
    for dtype in DType:
        encode(values, dtype)
    assert torch.equal(values, before)
