"""Write the seed corpora under fuzz/corpus: golden vectors, a captured session, hand-made cases.

Seeds are named `seed-<what>`; inputs that once failed are kept beside them as `found-<what>`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz.targets import NAMES
from wire.chunks import cut
from wire.frames import MessageType, frame_header
from wire.messages import (
    Broadcast,
    BudgetDone,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragment,
    FinalManifest,
    Heartbeat,
    InitParams,
    Message,
    PullRequest,
    PushFragment,
    Shutdown,
    encode_frame,
    frame_parts,
)

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "fuzz" / "corpus"
DATA = ROOT / "tests" / "data"
Seeds = Iterator[tuple[str, bytes]]


def _vectors(*kinds: str) -> list[dict[str, Any]]:
    vectors = json.loads((DATA / "golden.json").read_text())["vectors"]
    return [vector for vector in vectors if vector["kind"] in kinds]


def hello() -> Seeds:
    """Plain, sealed and wrongly sealed HELLOs, DATA_HELLO, and broken frames."""
    body = bytes.fromhex(_vectors("hello")[0]["expected"])
    profile = body[:-2] + bytes(range(32)) + body[-2:]
    sealed = bytes.fromhex(_vectors("hello_mac")[0]["expected"])
    plain = _frame(MessageType.HELLO, body)
    data_hello = encode_frame(DataHello(1, 7, 3))
    yield "plain", b"\0" + plain
    yield "profile", b"\x10" + _frame(MessageType.HELLO, profile)
    yield "sealed", b"\xfd" + _frame(MessageType.HELLO, sealed)
    yield "seal-it", b"\x07" + plain
    yield "seal-it-with-profile", b"\xf3" + _frame(MessageType.HELLO, profile)
    yield "no-key-here", b"\0" + _frame(MessageType.HELLO, sealed)
    yield "data", b"\x08" + data_hello
    yield "two-frames", b"\xf0" + data_hello + plain
    yield "bad-type", b"\0" + _frame(MessageType.HEARTBEAT, bytes(12))
    yield "huge", b"\0" + frame_header(MessageType.HELLO, 2**64 - 1)


def _frame(kind: MessageType, payload: bytes) -> bytes:
    return frame_header(kind, len(payload)) + payload


def _pieces(data: bytes, socket: int = 0, step: int = 505) -> bytes:
    """Bytes in the piece format of the connection target; `step` is 8 n + 1, at most 505."""
    out = bytearray()
    while data:
        count = min(step, 8 * ((len(data) - 1) // 8) + 1)
        out += bytes([(count - 1) // 8 << 2 | socket]) + data[:count]
        data = data[count:]
    return bytes(out)


def _chunked(message: Message, msg_id: int, slice_bytes: int) -> list[bytes]:
    head, body = frame_parts(message)
    return [prefix + bytes(data) for prefix, data in cut(msg_id, head, body, slice_bytes)]


def connection() -> Seeds:
    """Every message for both readers, whole and striped, and the frames of a captured client."""
    tensor = struct.pack("<5f", 1, -2, 0.5, 0, 3)
    push = PushFragment(1, 0, 3, 1, 2, 40, 4, 4096, tensor)
    syncer: list[Message] = [
        InitParams(0, tensor),
        push,
        Heartbeat(1, 9),
        FinalAck(17),
        BudgetDone(5),
    ]
    learner: list[Message] = [
        PullRequest(1, 4, 1),
        Broadcast(0, 2, tensor),
        FinalFragment(0, 2, tensor),
        FinalManifest(6, (5, 6)),
        ErrorMessage("stopped: à bientôt"),
        Shutdown(),
    ]
    for role, mode, messages in (("syncer", 0, syncer), ("learner", 1, learner)):
        for message in messages:
            name = type(message).__name__.lower()
            owner = 16 if isinstance(message, InitParams) else 0
            start = bytes([mode | owner])
            yield f"{role}-{name}", start + _pieces(encode_frame(message), step=505)
            slices = _chunked(message, 7, 64)
            parts = [_pieces(piece, n % 3, 33) for n, piece in enumerate(reversed(slices))]
            yield f"{role}-{name}-striped", start + b"".join(parts)
        stream = b"".join(encode_frame(one) for one in messages if not isinstance(one, InitParams))
        yield f"{role}-all", bytes([mode]) + _pieces(stream, step=9)
    yield "bad-budget", b"\x08" + _pieces(_frame(MessageType.BUDGET_DONE, bytes(7)))
    half = _chunked(push, 9, 64)[0]
    yield "twice-the-same-slice", b"\0" + _pieces(half) + _pieces(half, 1)
    bf16 = _chunked(PushFragment(1, 1, 3, 1, 2, 40, 4, 4096, bytes(20)), 0, 64)
    yield (
        "bf16-interleaved",
        b"\2" + b"".join(_pieces(piece, n % 3) for n, piece in enumerate(bf16)),
    )
    q4 = PushFragment(1, 1, 3, 1, 2, 40, 4, 4096, bytes(132))
    yield "q4", b"\4" + _pieces(encode_frame(q4))


def chunks() -> Seeds:
    """Slices in order, backwards, overlapping, of many messages, and after the end."""
    yield "one", bytes([0, 40, 0, 39])
    yield "in-order", bytes([0, 40, 0, 19, 0, 40, 20, 19])
    yield "backwards", bytes([3, 60, 40, 19, 3, 60, 20, 19, 3, 60, 0, 19])
    yield "overlap", bytes([1, 60, 40, 19, 1, 60, 39, 9])
    yield "again", bytes([0, 13, 0, 12, 0, 13, 0, 12])
    yield "other-total", bytes([2, 60, 0, 9, 2, 61, 20, 9])
    yield "too-long", bytes([2, 60, 50, 10])
    yield "many", b"".join(bytes([n, 20, 0, 9]) for n in range(66))
    yield "many-finish", b"".join(bytes([n % 256, 20, at, 9]) for n in range(80) for at in (0, 10))


def checkpoint() -> Seeds:
    """The golden V3 file, its trailers and older revisions, and broken headers."""
    whole = bytes.fromhex(_vectors("checkpoint_v3")[0]["expected"])
    header, tail = whole[:49], whole[49:]
    body, trailer = tail[:-68], tail[-68:]
    v2 = bytes.fromhex("7f5a70d1") + header[4:5] + header[37:]
    v1 = bytes.fromhex("7e5a70d1") + header[37:]
    sweep = trailer[:32] + bytes.fromhex("50535750") + struct.pack("<I", 2) + trailer[36:]
    yield from {
        "v3": whole,
        "v3-bare": header + body,
        "v3-fingerprint": header + body + trailer[:32],
        "v3-sweep": header + body + sweep,
        "v3-sweep-short": header + body + sweep[:40],
        "v3-cut": whole[:-1],
        "v3-long": whole + b"x",
        "v2": v2 + body + trailer,
        "v1": v1 + body,
        "not-finite": whole.replace(bytes.fromhex("0000c03f"), bytes.fromhex("0000c07f")),
        "huge": header[:45] + bytes.fromhex("01000000") + struct.pack("<QQ", 1, 2**61),
        "huge-count": header[:45] + bytes.fromhex("ffffffff"),
        "no-fragments": header[:45] + bytes(4) + bytes(4),
    }.items()
    for number, vector in enumerate(_vectors("ckpt_header_error")):
        yield f"header-{number}", bytes.fromhex(vector["input"])


def sums() -> Seeds:
    """The example of K15, markers, and JSON that is something else."""
    fragment = '{"version":1,"numel":2,"digest":"d37ac9d728a5e157e12e1007eef3b849"}'
    entry = (
        '{"global_step":2,"bytes":205,"header":"c7ec8468a706e96fab84240ec560b94d",'
        f'"fragments":[{fragment}],"tail":"a897a6acb6b9914be68a726b3dfcc5c0"}}'
    )
    form = '{"format":"yeto-checkpoint-sums-v1","algorithm":"blake2b-128","entries":[%s]}\n'
    yield "example", (form % entry).encode()
    yield "empty", (form % "").encode()
    yield "twice", (form % f"{entry},{entry}").encode()
    yield "deep", b"[" * 2000
    yield "big-number", (form % entry.replace("205", "2" * 400)).encode()
    yield "marker", bytes.fromhex(_vectors("marker")[0]["expected"])
    for number, vector in enumerate(_vectors("marker_error")):
        yield f"marker-{number}", bytes.fromhex(vector["input"])


def svd() -> Seeds:
    """The golden request, and requests that are wrong in one field."""
    golden = bytes.fromhex(_vectors("iso_header")[0]["expected"])
    yield "request", golden
    yield "two-requests", golden + golden
    for name, at, value in [
        ("magic", 0, b"X"),
        ("version", 8, b"\2"),
        ("code", 12, b"\5"),
        ("rows", 24, b"\xff" * 8),
        ("payload", 40, b"\xff" * 8),
        ("short-payload", 40, b"\3"),
        ("nan", 48, bytes.fromhex("0000c07f")),
    ]:
        yield f"bad-{name}", golden[:at] + value + golden[at + len(value) :]
    yield "cut", golden[:-1]
    yield "no-payload", golden[:48]
    error = b"could not"
    head = golden[:12] + struct.pack("<IQQQQ", 5, 9, 1, 1, len(error))
    yield "diagnostic", head + error


def main() -> None:
    """Write all seeds; other files in the corpus stay."""
    makers = {
        "checkpoint": checkpoint,
        "chunks": chunks,
        "connection": connection,
        "hello": hello,
        "sums": sums,
        "svd": svd,
    }
    for name in NAMES:
        directory = CORPUS / name
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("seed-*"):
            old.unlink()
        for what, content in makers[name]():
            (directory / f"seed-{what}").write_bytes(content)


if __name__ == "__main__":
    main()
