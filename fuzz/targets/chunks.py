"""Reassembly against a plain model that keeps every byte in a dict (W28 to W36).

Input: pairs of operations. Begin a slice: bytes (id, total, offset, length), all small. Between
them, slices land in an order that the low bits of the id byte choose.
"""

from __future__ import annotations

from fuzz.targets import Reader
from wire.chunks import FINISHED_IDS, MAX_PARTIALS, Reassembler, Slice
from wire.errors import ErrorCode, ProtocolError
from wire.frames import FRAME_BYTES, Role

LIMIT = 200


class Model:
    """What W29, W30 and W36 say, in the plainest way."""

    def __init__(self) -> None:
        self.totals: dict[int, int] = {}
        self.promised: dict[int, set[int]] = {}
        self.landed: dict[int, dict[int, int]] = {}
        self.finished: list[int] = []

    def begin(self, msg_id: int, total: int, offset: int, length: int) -> ErrorCode | None:
        """The code of the fault, None when the slice is accepted."""
        if not FRAME_BYTES <= total <= LIMIT or offset + length > total:
            return ErrorCode.CHUNK
        if msg_id not in self.totals:
            if msg_id in self.finished[-FINISHED_IDS:]:
                return ErrorCode.CHUNK
            if len(self.totals) >= MAX_PARTIALS:
                return ErrorCode.PARTIAL_LIMIT
            self.totals[msg_id] = total
            self.promised[msg_id] = set()
            self.landed[msg_id] = {}
        span = set(range(offset, offset + length))
        if self.totals[msg_id] != total or span & self.promised[msg_id]:
            return ErrorCode.CHUNK
        self.promised[msg_id] |= span
        return None

    def land(self, msg_id: int, offset: int, length: int, value: int) -> bytes | None:
        """The whole message, when this was its last byte."""
        self.landed[msg_id].update(dict.fromkeys(range(offset, offset + length), value))
        if len(self.landed[msg_id]) < self.totals[msg_id]:
            return None
        whole = self.landed.pop(msg_id)
        del self.totals[msg_id], self.promised[msg_id]
        self.finished.append(msg_id)
        return bytes(whole[at] for at in range(len(whole)))


def one_input(data: bytes) -> None:
    """Run the operations on both until one refuses; both must, with the same code."""
    reader = Reader(data)
    chunks = Reassembler(Role.SYNCER, LIMIT)
    model = Model()
    pending: list[tuple[Slice, int, int]] = []
    stamp = 0
    while reader:
        choice = reader.byte()
        total, offset, length = reader.byte(), reader.byte(), 1 + reader.byte()
        expected = model.begin(choice, total, offset, length)
        try:
            piece = chunks.begin(choice, total, offset, length)
        except ProtocolError as error:
            assert error.code is expected, (error.text, expected)
            return
        assert expected is None, f"{expected} was accepted"
        assert piece is not None
        assert len(piece.view) == length
        stamp = (stamp + 1) % 256
        piece.view[:] = bytes([stamp]) * length
        piece.filled = length
        pending.append((piece, offset, stamp))
        while len(pending) > choice % 4:
            _land(chunks, model, pending.pop(choice % len(pending)))
        assert len(chunks) == len(model.totals)
        assert chunks.held <= sum(model.totals.values())
    while pending:
        _land(chunks, model, pending.pop())
    assert len(chunks) == len(model.totals)
    if not model.totals:
        assert chunks.held == 0


def _land(chunks: Reassembler, model: Model, entry: tuple[Slice, int, int]) -> None:
    piece, offset, stamp = entry
    msg_id = piece.partial.msg_id
    assert msg_id is not None
    whole = model.land(msg_id, offset, len(piece.view), stamp)
    done = chunks.finish(piece)
    assert (done is None) == (whole is None)
    if done is not None:
        assert bytes(done.view) == whole
