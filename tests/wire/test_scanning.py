"""Tensors scanned while they arrive get the verdict of a scan of the whole (W11)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.support import session
from wire import scanning
from wire.chunks import Partial, Reassembler, Slice
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import Role
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.messages import Broadcast, FinalFragment, PushFragment, encode_frame
from wire.scanning import Scanner
from wire.tensors import check_finite

NUMEL = 1500
LAYOUT = NumericLayout((numeric_fragment(MergeMode.AVG, [NUMEL]),))
BAD = {DType.F32: b"\0\0\x80\x7f", DType.BF16: b"\xc0\xff", DType.Q4: b"\0\0\xc0\xff"}
UNIT = {DType.F32: 4, DType.BF16: 2, DType.Q4: 132}


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages are treated as large ones: some pieces at once, some by workers."""
    monkeypatch.setattr(scanning, "INLINE_BYTES", 100)
    monkeypatch.setattr(scanning, "HOT_BYTES", 700)


async def verdict(
    scanner: Scanner, partial: Partial, start: int, dtype: DType
) -> ProtocolError | None:
    future: asyncio.Future[ProtocolError | None] = asyncio.get_running_loop().create_future()
    try:
        if scanner.complete(partial, partial.view[start:], dtype, future.set_result):
            return None
    except ProtocolError as error:
        return error
    return await future


async def arrive(
    inner: bytes,
    role: Role,
    dtype: DType,
    wire: DType,
    rng: random.Random,
    pool: ThreadPoolExecutor,
) -> bool:
    """Let an inner frame land over several sockets; whether its tensor was found finite."""
    which = session(role, dtype, layout=LAYOUT)
    scanner = Scanner(which, pool)
    chunks = Reassembler(role, which.inner_limit)
    edges = sorted(
        {0, len(inner), *(rng.randrange(1, len(inner)) for _ in range(rng.randrange(8)))}
    )
    waiting = list(itertools.pairwise(edges))
    rng.shuffle(waiting)
    open_slices: list[Slice] = []
    whole = None
    while waiting or open_slices:
        if waiting and (len(open_slices) < 3 or not open_slices):
            begin, end = waiting.pop()
            piece = chunks.begin(0, len(inner), begin, end - begin)
            assert piece is not None
            open_slices.append(piece)
        piece = rng.choice(open_slices)
        count = min(rng.randint(1, 2000), len(piece.view) - piece.filled)
        at = piece.start + piece.filled
        piece.view[piece.filled : piece.filled + count] = inner[at : at + count]
        piece.filled += count
        scanner.progress(piece)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if piece.filled == len(piece.view):
            open_slices.remove(piece)
            whole = chunks.finish(piece)
    assert whole is not None
    start = len(inner) - wire.size(NUMEL)
    return await verdict(scanner, whole, start, wire) is None


def message(role: Role, dtype: DType, final: bool, tensor: bytes) -> bytes:
    if role is Role.SYNCER:
        return encode_frame(PushFragment(0, 0, 1, 1, 0, 1, 1, 1, tensor))
    return encode_frame(FinalFragment(0, 1, tensor) if final else Broadcast(0, 1, tensor))


@pytest.mark.usefixtures("small")
@given(
    st.sampled_from(list(Role)),
    st.sampled_from(list(DType)),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, NUMEL - 1)),
    st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_any_arrival_gives_the_verdict_of_the_whole(
    executor: ThreadPoolExecutor,
    role: Role,
    dtype: DType,
    final: bool,
    bad_at: int | None,
    seed: int,
) -> None:
    wire = dtype
    if role is Role.LEARNER:
        wire = DType.F32 if final else dtype.bulk
    unit = UNIT[wire]
    tensor = bytearray(np.full(wire.size(NUMEL), 0x3C, np.uint8))
    if bad_at is not None:
        at = bad_at * unit % len(tensor)
        tensor[at : at + len(BAD[wire])] = BAD[wire]
        with pytest.raises(ProtocolError):
            check_finite(bytes(tensor), wire)
    inner = message(role, dtype, final, bytes(tensor))
    rng = random.Random(seed)
    finite = asyncio.run(arrive(inner, role, dtype, wire, rng, executor))
    assert finite == (bad_at is None)
