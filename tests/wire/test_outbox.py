"""What is sent next: order, coalescing, stripes, control ahead of bulk (W24 to W27, W45 to W50)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wire.messages import Broadcast, PullRequest, Shutdown, encode_frame
from wire.outbox import Outbox, Outgoing, SendCounters

ALL = (1, 2, 3, 4)
SLICE = 30


def outbox() -> Outbox:
    return Outbox(SendCounters(), slice_bytes=SLICE)


def bcast(fragment: int, version: int, size: int = 100) -> Broadcast:
    return Broadcast(fragment, version, bytes([version % 256]) * size)


def ids(chunk: Outgoing) -> tuple[int, int, int]:
    """msg_id, total and offset of a CHUNK."""
    fields = [int.from_bytes(chunk.head[at : at + 8], "little") for at in (13, 21, 29)]
    return fields[0], fields[1], fields[2]


def drain(box: Outbox, attached: Sequence[int] = ALL) -> list[Outgoing]:
    out = []
    while (chunk := box.next_bulk(attached, [0, *ALL])) is not None:
        out.append(chunk)
    return out


def versions(chunks: list[Outgoing]) -> list[int]:
    """Version of every message, from the head of its first slice."""
    first = [chunk for chunk in chunks if ids(chunk)[2] == 0]
    return [int.from_bytes(chunk.head[37 + 17 : 37 + 25], "little") for chunk in first]


def test_w24_w25_slices_go_round_and_the_counter_carries_on() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    box.put_bulk(1, bcast(1, 2, size=10))
    chunks = drain(box)
    assert [chunk.stream for chunk in chunks] == [1, 2, 3, 4, 1, 2, 3]
    assert [ids(chunk) for chunk in chunks] == [
        (0, 125, 0), (0, 125, 30), (0, 125, 60), (0, 125, 90), (0, 125, 120), (1, 35, 0), (1, 35, 30),
    ]  # fmt: skip


def test_w25_without_data_sockets_chunks_go_on_stream_0() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    assert {chunk.stream for chunk in drain(box, attached=())} == {0}


def test_w25_a_message_keeps_the_sockets_it_started_with() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    assert box.next_bulk((), [0]) is not None
    chunk = box.next_bulk(ALL, [0, *ALL])
    assert chunk is not None
    assert chunk.stream == 0


def test_w25_a_socket_over_its_mark_is_skipped() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    streams = []
    for free in ((1, 2, 3, 4), (3, 4), (1, 4), (1,)):
        chunk = box.next_bulk(ALL, free)
        assert chunk is not None
        streams.append(chunk.stream)
    assert streams == [1, 3, 4, 1]
    assert box.next_bulk(ALL, ()) is None


def test_w26_ids_count_up_and_run_on_with_the_counters() -> None:
    counters = SendCounters()
    for expected in range(3):
        box = Outbox(counters, SLICE)
        box.put_bulk(0, bcast(0, 1))
        chunks = drain(box)
        assert {ids(chunk)[0] for chunk in chunks} == {expected}
    assert counters.stripe == 3 * len(chunks)


def test_w45_control_comes_between_two_chunks_of_stream_0() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    assert box.next_bulk((), [0]) is not None
    box.put_control(PullRequest(0, 1, 1))
    assert box.next_bulk((), [0]) is None
    assert box.next_control() == encode_frame(PullRequest(0, 1, 1))
    assert box.next_bulk((), [0]) is not None


def test_w45_an_unsent_pull_can_be_withdrawn() -> None:
    box = outbox()
    for fragment in range(3):
        box.put_control(PullRequest(fragment, fragment, 1), key=(fragment, 1))
    box.put_control(Shutdown())
    assert box.withdraw_control((1, 1))
    assert not box.withdraw_control((1, 1))
    frames = []
    while (frame := box.next_control()) is not None:
        frames.append(frame)
    expected = [PullRequest(0, 0, 1), PullRequest(2, 2, 1), Shutdown()]
    assert frames == [encode_frame(message) for message in expected]
    assert box.queued == 0


def test_w46_a_newer_version_replaces_an_unsent_one_in_its_place() -> None:
    box = outbox()
    for version, fragment in enumerate((0, 1, 2)):
        box.put_bulk(fragment, bcast(fragment, version + 1))
    box.put_bulk(0, bcast(0, 10))
    box.put_bulk(0, bcast(0, 11))
    assert versions(drain(box)) == [11, 2, 3]


def test_w46_a_message_that_has_begun_is_finished() -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    first = box.next_bulk(ALL, [1])
    assert first is not None
    box.put_bulk(0, bcast(0, 2))
    assert not box.withdraw_bulk(9)
    rest = drain(box)
    assert versions([first, *rest]) == [1, 2]


def test_w46_nothing_begins_while_no_socket_is_free() -> None:
    """Otherwise a message would lose its chance to be replaced without a byte being sent."""
    box = outbox()
    box.put_bulk(0, bcast(0, 1))
    assert box.next_bulk(ALL, ()) is None
    box.put_bulk(0, bcast(0, 2))
    assert versions(drain(box)) == [2]
    box.put_bulk(0, bcast(0, 3))
    assert box.withdraw_bulk(0)
    assert box.empty


def test_on_sent_comes_with_the_last_slice() -> None:
    box = outbox()
    sent: list[int] = []
    box.put_bulk(0, bcast(0, 1), lambda: sent.append(1))
    chunks = drain(box)
    assert [chunk.on_sent is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_shared_payload_is_not_copied() -> None:
    """W46: one encoded buffer for all learners."""
    payload = memoryview(bytearray(200))
    boxes = [outbox() for _ in range(3)]
    for box in boxes:
        box.put_bulk(0, Broadcast(0, 1, payload))
    payload[100] = 7
    for box in boxes:
        assert b"".join(chunk.head[37:] + bytes(chunk.body) for chunk in drain(box))[25 + 100] == 7


class Sending(RuleBasedStateMachine):
    """Random queueing, replacing, withdrawing and sending against a list of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.box = outbox()
        self.slots: dict[int, int] = {}
        self.control: list[int] = []
        self.sent: list[Outgoing] = []
        self.expected: list[int] = []
        self.version = 0

    @rule(key=st.integers(0, 5), size=st.integers(0, 120))
    def queue(self, key: int, size: int) -> None:
        self.version += 1
        self.box.put_bulk(key, bcast(key, self.version, size))
        self.slots[key] = self.version

    @rule(key=st.integers(0, 5))
    def withdraw(self, key: int) -> None:
        assert self.box.withdraw_bulk(key) == (self.slots.pop(key, None) is not None)

    @rule(step=st.integers(0, 50))
    def pull(self, step: int) -> None:
        self.box.put_control(PullRequest(0, step, 1), key=step)
        self.control.append(step)

    @rule(step=st.integers(0, 50))
    def drop_pull(self, step: int) -> None:
        assert self.box.withdraw_control(step) == (step in self.control)
        self.control = [other for other in self.control if other != step]

    @rule()
    def send_control(self) -> None:
        frame = self.box.next_control()
        if not self.control:
            assert frame is None
            return
        assert frame == encode_frame(PullRequest(0, self.control.pop(0), 1))

    @rule(free=st.sets(st.sampled_from(ALL)))
    def send_bulk(self, free: set[int]) -> None:
        chunk = self.box.next_bulk(ALL, sorted(free))
        if chunk is None:
            busy = self.sent and not complete(self.sent)
            assert not free or not (self.slots or busy)
            return
        assert chunk.stream in free
        if not self.sent or complete(self.sent):
            assert ids(chunk)[2] == 0
            self.expected.append(self.slots.pop(next(iter(self.slots))))
        self.sent.append(chunk)

    @invariant()
    def order_is_kept(self) -> None:
        assert versions(self.sent) == self.expected
        positions = [(ids(chunk)[0], ids(chunk)[2]) for chunk in self.sent]
        assert positions == sorted(positions)  # W26, and at most one message partly sent (W27)
        assert self.box.queued >= 0
        done = not self.sent or complete(self.sent)
        assert self.box.empty == (not self.slots and not self.control and done)


def complete(sent: list[Outgoing]) -> bool:
    last = sent[-1]
    _, total, offset = ids(last)
    return offset + len(last.head) - 37 + len(last.body) == total


TestSending = Sending.TestCase
TestSending.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("size", [0, 4, 5, 6, 65])
def test_sizes_of_frames_add_up(size: int) -> None:
    box = outbox()
    box.put_bulk(0, bcast(0, 1, size))
    assert box.queued == 25 + size
    chunks = drain(box)
    assert sum(chunk.size for chunk in chunks) == 25 + size + 37 * len(chunks)
    assert box.queued == 0
