"""Striping and reassembly: cutting, ranges, memory, and any interleaving of slices."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.wire.support import connection, messages, session
from wire.chunks import SLACK_BYTES, Partial, Reassembler, Slice, cut
from wire.errors import ProtocolError
from wire.frames import SLICE_BYTES, Role
from wire.layout import MergeMode, NumericLayout, numeric_fragment
from wire.memory import HUGE, IDLE_SECONDS, MAPPED_FROM, Landing, SlabPool
from wire.messages import PushFragment, frame_parts
from wire.ranges import PAGE, RANGE_COST, RangeSet

# -- cutting (W24) -----------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(20, 40))
def test_w24_slices_are_whole_and_not_empty(body: int, slice_bytes: int) -> None:
    head, data = b"h" * 17, bytes(range(body))
    parts = list(cut(9, head, data, slice_bytes))
    sizes = [int.from_bytes(prefix[5:13], "little") - 24 for prefix, _ in parts]
    assert all(size == slice_bytes for size in sizes[:-1])
    assert 1 <= sizes[-1] <= slice_bytes
    inner = b"".join(prefix[37:] + bytes(view) for prefix, view in parts)
    assert inner == head + data
    assert {prefix[13:21] for prefix, _ in parts} == {(9).to_bytes(8, "little")}


def test_w24_an_exact_multiple_has_no_empty_slice() -> None:
    assert len(list(cut(0, b"h" * 10, bytes(30), 20))) == 2


def test_a_body_is_never_copied() -> None:
    data = np.zeros(3 * SLICE_BYTES, np.uint8)
    for _, view in cut(0, b"head", data.data):
        assert np.shares_memory(np.frombuffer(view, np.uint8), data)


def test_a_large_push_is_cut_and_joined_again() -> None:
    layout = NumericLayout((numeric_fragment(MergeMode.AVG, [3_000_001]),))
    values = np.arange(3_000_001, dtype="<f4")
    message = PushFragment(0, 0, 1, 1, 0, 1, 1, 1, memoryview(values).cast("B"))
    parts = [prefix + bytes(view) for prefix, view in cut(4, *frame_parts(message))]
    assert [len(part) for part in parts[:-1]] == [SLICE_BYTES + 37] * (len(parts) - 1)
    random.Random(0).shuffle(parts)
    (got,) = messages(connection(session(layout=layout)), b"".join(parts))
    assert np.array_equal(np.frombuffer(got.tensor, "<f4"), values)


def test_tensors_are_aligned() -> None:
    """What comes in CHUNKs can be used as f32 where it lies."""
    for role, head in ((Role.SYNCER, 61), (Role.SYNCER, 17), (Role.LEARNER, 25)):
        for total in (1000, MAPPED_FROM + 1000):
            piece = Reassembler(role, 10**6).begin(0, total, 0, 100)
            assert piece is not None
            view = piece.partial.view[head:]
            assert np.frombuffer(view, np.uint8).ctypes.data % 4 == 0


# -- ranges (W33) ------------------------------------------------------------------------------


@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 399), st.integers(1, 40))))
@settings(max_examples=100)
def test_ranges_against_a_bitmap(size: int, attempts: list[tuple[int, int]]) -> None:
    ranges = RangeSet()
    covered = np.zeros(size + 40, bool)
    for start, length in attempts:
        end = start + length
        if start >= size:
            continue
        assert ranges.overlaps(start, end) == bool(covered[start:end].any())
        if not covered[start:end].any():
            ranges.add(start, end)
            covered[start:end] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[0], covered.view(np.int8), [0]])))
    assert len(ranges) == len(edges) // 2
    assert ranges.prefix == (edges[1] if len(edges) and edges[0] == 0 else 0)
    assert ranges.touched == sum(
        (-(-end // PAGE) - start // PAGE) * PAGE + RANGE_COST
        for start, end in edges.reshape(-1, 2).tolist()
    )


def test_w33_many_ranges_stay_cheap() -> None:
    """A hostile sender of single bytes: buckets keep an insertion from moving everything."""
    ranges = RangeSet()
    order = list(range(0, 40_000, 2))
    random.Random(1).shuffle(order)
    for at in order:
        ranges.add(at, at + 1)
    assert len(ranges) == 20_000
    assert max(map(len, ranges._starts)) <= 512
    for at in range(1, 40_000, 2):
        assert not ranges.overlaps(at, at + 1)
        ranges.add(at, at + 1)
    assert len(ranges) == 1
    assert ranges.prefix == 40_000


# -- memory (W32) ------------------------------------------------------------------------------

BIG = 100 * 2**20


def begin(chunks: Reassembler, msg_id: int, offset: int, length: int) -> Slice | None:
    return chunks.begin(msg_id, BIG, offset, length)


def test_w32_zones() -> None:
    """A = 100 MiB: others may fill A + 64 MiB, the lowest id up to 3A + 64 MiB."""
    chunks = Reassembler(Role.SYNCER, BIG)
    step = 4 * 2**20
    taken = 0
    for msg_id in (5, 6):
        for at in range(0, BIG - step, step):
            if begin(chunks, msg_id, at, step) is None:
                break
            taken += step
    assert BIG + SLACK_BYTES - 4 * HUGE - step <= taken <= BIG + SLACK_BYTES
    assert begin(chunks, 6, BIG - step, step) is None
    assert begin(chunks, 9, 0, step) is None
    assert begin(chunks, 5, BIG - step, step) is not None
    piece = begin(chunks, 4, 0, step)  # a slice that opens the lowest id has the outer zone
    assert piece is not None
    assert begin(chunks, 6, BIG - step, step) is None
    assert chunks.held <= 3 * BIG + SLACK_BYTES


def test_w32_waiting_changes_nothing_and_completion_frees() -> None:
    chunks = Reassembler(Role.SYNCER, BIG)
    pieces = [begin(chunks, 0, 0, BIG), begin(chunks, 1, 0, 60 * 2**20)]
    assert all(pieces)
    assert begin(chunks, 2, 0, 10 * 2**20) is None
    assert len(chunks) == 2
    assert pieces[0] is not None
    assert chunks.finish(pieces[0]) is pieces[0].partial
    assert begin(chunks, 2, 0, 10 * 2**20) is not None


def test_w32_single_bytes_are_charged_by_the_page() -> None:
    """64 partial messages of 100 MiB, one byte each, are no reason to wait (W30 comes first)."""
    chunks = Reassembler(Role.SYNCER, BIG)
    assert all(begin(chunks, msg_id, 0, 1) for msg_id in range(64))
    assert chunks.held == 64 * (PAGE + RANGE_COST)
    with pytest.raises(ProtocolError, match="65th"):
        begin(chunks, 64, 0, 1)


def test_w2_memory_that_the_system_refuses_is_a_fault() -> None:
    chunks = Reassembler(Role.SYNCER, 2**62)
    with pytest.raises(ProtocolError) as caught:
        chunks.begin(0, 2**62, 0, 10)
    assert caught.value.code == "out-of-memory"


def test_memory_of_a_message_is_used_again_once_nobody_holds_it() -> None:
    pool = SlabPool()
    first = Landing(10 * HUGE, 3, pool, recycled=True)
    address = np.frombuffer(first.view, np.uint8).ctypes.data
    tensor = np.frombuffer(first.view[64:], np.uint8)
    del first
    other = Landing(10 * HUGE, 3, pool, recycled=True)
    assert np.frombuffer(other.view, np.uint8).ctypes.data != address
    del tensor
    gc.collect()
    again = Landing(10 * HUGE - 1000, 3, pool, recycled=True)
    assert np.frombuffer(again.view, np.uint8).ctypes.data == address
    assert again.reserved == 11 * HUGE
    assert Landing(10 * HUGE, 3, pool, recycled=False).reserved == 0


def test_idle_memory_is_given_up() -> None:
    pool = SlabPool()
    del Landing(HUGE, 0, pool, recycled=True).view
    gc.collect()
    pool.age(100.0)
    assert len(pool._idle) == 1
    pool.age(100.0 + IDLE_SECONDS)
    assert pool._idle == []


def test_only_so_much_memory_waits() -> None:
    pool = SlabPool(keep=1)
    for size in (HUGE, 3 * HUGE):
        del Landing(size, 0, pool, recycled=True).view
    gc.collect()
    pool.age(100.0)
    assert [slab.capacity for slab in pool._idle] == [3 * HUGE]


# -- any interleaving --------------------------------------------------------------------------


class Interleaving(RuleBasedStateMachine):
    """Slices of many messages over four sockets, in any order, against a simple model."""

    LIMIT = 400

    def __init__(self) -> None:
        super().__init__()
        self.chunks = Reassembler(Role.SYNCER, self.LIMIT)
        self.content: dict[int, bytes] = {}
        self.arrived: dict[int, set[int]] = {}
        self.sockets: list[Slice | None] = [None] * 4
        self.finished: list[int] = []

    @rule(
        socket=st.integers(0, 3),
        msg_id=st.integers(0, 90),
        total=st.integers(1, 420),
        start=st.integers(0, 400),
        length=st.integers(1, 200),
        stick=st.booleans(),
    )
    def slice_header(
        self, socket: int, msg_id: int, total: int, start: int, length: int, stick: bool
    ) -> None:
        if self.sockets[socket] is not None:
            return
        known = msg_id in self.arrived
        if known and stick:
            total = len(self.content[msg_id])
            start = min(start, total - 1)
            length = min(length, total - start)
        covered = self.arrived.get(msg_id, set())
        legal = (
            13 <= total <= self.LIMIT
            and start + length <= total
            and msg_id not in self.finished[-256:]
            and (not known or total == len(self.content[msg_id]))
            and not covered & set(range(start, start + length))
            and (known or len(self.arrived) < 64)
        )
        if not legal:
            with pytest.raises(ProtocolError):
                self.chunks.begin(msg_id, total, start, length)
            return
        piece = self.chunks.begin(msg_id, total, start, length)
        assert piece is not None
        if not known:
            self.content[msg_id] = random.Random(msg_id).randbytes(total)
            self.arrived[msg_id] = set()
        self.arrived[msg_id] |= set(range(start, start + length))
        self.sockets[socket] = piece

    @rule(socket=st.integers(0, 3), share=st.integers(1, 400))
    def bytes_land(self, socket: int, share: int) -> None:
        piece = self.sockets[socket]
        if piece is None:
            return
        msg_id = piece.partial.msg_id
        assert msg_id is not None
        count = min(share, len(piece.view) - piece.filled)
        at = piece.start + piece.filled
        piece.view[piece.filled : piece.filled + count] = self.content[msg_id][at : at + count]
        piece.filled += count
        if piece.filled < len(piece.view):
            return
        self.sockets[socket] = None
        whole = self.chunks.finish(piece)
        done = piece.partial.received == len(self.content[msg_id])
        assert (whole is not None) == done
        if whole is not None:
            assert bytes(whole.view) == self.content.pop(msg_id)
            assert len(self.arrived.pop(msg_id)) == whole.total
            self.finished.append(msg_id)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def rest_of_a_message(self, data: st.DataObject) -> None:
        """Fill the first gap of some message, so that messages do complete."""
        msg_id = data.draw(st.sampled_from(sorted(self.arrived)))
        if None not in self.sockets:
            return
        missing = sorted(set(range(len(self.content[msg_id]))) - self.arrived[msg_id])
        if not missing:
            return
        end = missing[0]
        while end + 1 in missing:
            end += 1
        socket = self.sockets.index(None)
        total, start = len(self.content[msg_id]), missing[0]
        self.slice_header(socket, msg_id, total, start, end + 1 - start, True)
        self.bytes_land(socket, 400)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.chunks) == len(self.arrived)
        partials: list[Partial] = list(self.chunks._partials.values())
        assert self.chunks.held == sum(partial.held for partial in partials)
        for partial in partials:
            assert partial.prefix <= partial.received + sum(p.filled for p in partial.open)


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
