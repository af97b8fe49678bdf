"""K1 to K6: bytes of all revisions, and a reader that trusts nothing."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.codec import (
    FileSource,
    Structure,
    check_versions,
    read_header,
    read_structure,
    scan_fragment,
)
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.files import open_shared
from checkpoint.format import TrailerForm, ledger_mapping, parse_header, parse_trailer, version_at
from checkpoint.loading import load_all
from checkpoint.marker import encode_marker, parse_marker
from checkpoint.snapshot import FragmentState, LedgerEntry, Snapshot
from checkpoint.store import CheckpointStore
from tests.checkpoint.builders import MemorySource, cut, encode, same_bits, started

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["vectors"]


def golden(kind: str) -> list[Any]:
    found = [vector for vector in GOLDEN if vector["kind"] == kind]
    assert found
    return [pytest.param(vector, id=vector["id"]) for vector in found]


def read(data: bytes) -> Structure:
    source = MemorySource(data)
    structure = read_structure(source, read_header(source))
    load_all(source, structure)
    for head in structure.fragments:
        scan_fragment(source, head)
    return structure


def written(tmp_path: Path, snapshot: Snapshot) -> bytes:
    path = tmp_path / "state.ckpt"
    store = started(path)
    store.save(snapshot, patch=False, last=True)
    store.release()
    return path.read_bytes()


@pytest.mark.parametrize("vector", golden("checkpoint_v3"))
def test_golden_file_is_written_and_read(vector: dict[str, Any], tmp_path: Path) -> None:
    given_, expected = vector["input"], bytes.fromhex(vector["expected"])
    snapshot = Snapshot(
        given_["backend"],
        bytes.fromhex(given_["fingerprint"]),
        bytes.fromhex(given_["contract"]),
        given_["step"],
        tuple(
            FragmentState(
                item["version"], torch.tensor(item["params"]), torch.tensor(item["momentum"])
            )
            for item in given_["fragments"]
        ),
        {key: LedgerEntry(*rest) for key, *rest in given_["ledger"]},
    )
    assert written(tmp_path, snapshot) == expected
    structure = read(expected)
    assert structure.header.global_step == given_["step"]
    assert structure.trailer.contract == snapshot.contract
    assert ledger_mapping(structure.ledger) == snapshot.ledger


@pytest.mark.parametrize("vector", golden("ckpt_prefix"))
def test_golden_prefix(vector: dict[str, Any], tmp_path: Path) -> None:
    step = vector["input"]["step"]
    fingerprint = bytes([vector["input"]["fingerprint_byte"]]) * 32
    data = written(tmp_path, cut(step, fingerprint=fingerprint))
    for where, expected in vector["expected"].items():
        start, _, end = where.partition(":")
        if isinstance(expected, int):
            assert data[int(start)] == expected
        else:
            assert data[int(start) : int(end)].hex() == expected
    assert int.from_bytes(data[37:45], "little") == step


@pytest.mark.parametrize("vector", golden("ckpt_contract_trailer"))
def test_golden_contract_trailer(vector: dict[str, Any], tmp_path: Path) -> None:
    contract = bytes([vector["input"]["contract_byte"]]) * 32
    snapshot = cut(vector["input"]["step"], (2, 3), contract=contract)
    assert [item.version for item in snapshot.fragments] == vector["input"]["versions"]
    data = written(tmp_path, snapshot)
    short = encode(snapshot, trailer="fingerprint")
    extra = vector["expected"]["extra_bytes_after_layout_only_form"]
    assert data[: len(short)] == short
    assert len(data) == len(short) + extra
    assert data[len(short) :].hex() == vector["expected"]["tag_hex"] + contract.hex()


@pytest.mark.parametrize("vector", golden("ckpt_sweep_trailer"))
def test_golden_sweep_trailer_is_readable(vector: dict[str, Any]) -> None:
    expected = vector["expected"]
    count = struct.pack("<I", vector["input"]["sweep"])
    contract = bytes([vector["input"]["contract_byte"]]) * 32
    extra = bytes.fromhex(expected["tag_hex"]) + count + contract
    assert len(extra) == expected["extra_bytes_after_layout_only_form"]
    trailer = read(encode(cut(3), trailer="fingerprint") + extra).trailer
    assert trailer.form is TrailerForm.SWEEP
    assert (trailer.sweep, trailer.contract) == (vector["input"]["sweep"], contract)


@pytest.mark.parametrize("vector", golden("ckpt_versions"))
def test_golden_versions(vector: dict[str, Any]) -> None:
    step, count = vector["input"]["step"], vector["input"]["fragments"]
    assert [version_at(step, p, count) for p in range(count)] == vector["expected"]


@pytest.mark.parametrize("vector", golden("ckpt_header_error"))
def test_golden_header_errors(vector: dict[str, Any]) -> None:
    with pytest.raises(CheckpointRefused) as refusal:
        read(bytes.fromhex(vector["input"]))
    assert f"refused:{refusal.value.word}" == vector["expected"]


@pytest.mark.parametrize("vector", golden("marker"))
def test_golden_marker(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["expected"])
    assert encode_marker(vector["input"]) == data
    assert parse_marker(data) == vector["input"]


@pytest.mark.parametrize("vector", golden("marker_error"))
def test_golden_marker_errors(vector: dict[str, Any]) -> None:
    assert parse_marker(bytes.fromhex(vector["input"])) is None


@pytest.mark.parametrize(
    ("digits", "step"),
    [("0017", 17), (str(2**64 - 1), 2**64 - 1), (str(2**64), None), ("-1", None), ("１", None)],
)
def test_k21_marker_digits(digits: str, step: int | None) -> None:
    assert parse_marker(f"YETO_FINAL_V1\nglobal_step={digits}\n".encode()) == step


def test_k15_example_file(tmp_path: Path) -> None:
    snapshot = Snapshot(
        0,
        b"\xaa" * 32,
        b"\xbb" * 32,
        2,
        (
            FragmentState(1, torch.tensor([0.5, -0.25]), torch.tensor([0.125, 0.0])),
            FragmentState(2, torch.tensor([3.0]), torch.tensor([-1.5])),
        ),
        {0: LedgerEntry(2, 20, 640)},
    )
    data = written(tmp_path, snapshot)
    assert (
        hashlib.sha256(data).hexdigest()
        == "1e4856a48b8b340f7efa403ed72ecd0b109088f649fded1a5c6d6352097e5096"
    )
    text = (tmp_path / "state.ckpt.sums").read_bytes()
    assert text.endswith(b"}\n")
    assert text.count(b"\n") == 1
    assert json.loads(text) == {
        "format": "yeto-checkpoint-sums-v1",
        "algorithm": "blake2b-128",
        "entries": [
            {
                "global_step": 2,
                "bytes": 205,
                "header": "c7ec8468a706e96fab84240ec560b94d",
                "fragments": [
                    {"version": 1, "numel": 2, "digest": "d37ac9d728a5e157e12e1007eef3b849"},
                    {"version": 2, "numel": 1, "digest": "0163c32b3088aeda17f8897ec8459221"},
                ],
                "tail": "a897a6acb6b9914be68a726b3dfcc5c0",
            }
        ],
    }


@pytest.mark.parametrize("revision", [1, 2, 3])
@pytest.mark.parametrize("trailer", ["none", "fingerprint", "contract", "sweep", "sweep-only"])
def test_k3_k4_every_revision_and_trailer_is_read(revision: int, trailer: str) -> None:
    snapshot = cut(5, backend=1)
    structure = read(encode(snapshot, revision, trailer))
    header = structure.header
    assert (header.revision, header.global_step, header.num_fragments) == (revision, 5, 3)
    assert header.backend == (None if revision == 1 else 1)
    assert header.fingerprint == (snapshot.fingerprint if revision == 3 else None)
    assert structure.trailer.form.label == trailer
    assert structure.trailer.fingerprint == (None if trailer == "none" else snapshot.fingerprint)
    stated = trailer in ("contract", "sweep")
    assert structure.trailer.contract == (snapshot.contract if stated else None)
    assert ledger_mapping(structure.ledger) == snapshot.ledger
    check_versions(structure)


@pytest.mark.parametrize("length", [1, 31, 33, 36, 39, 41, 67, 69, 71, 73, 100])
def test_k4_other_trailer_lengths_are_malformed(length: int) -> None:
    data = encode(cut(4), trailer="none")
    with pytest.raises(CheckpointRefused) as refusal:
        read(data + bytes(length))
    assert refusal.value.word is Reason.TRAILER


@pytest.mark.parametrize(
    "trailer",
    [
        bytes(32) + b"PWSP" + bytes(32),
        bytes(32) + b"SCTR" + bytes(36),
        bytes(32) + b"SCTR" + bytes(4),
        bytes(32) + b"PWSP" + bytes(36),  # counts 0
        bytes(32) + b"PWSP" + bytes(4),
    ],
)
def test_k4_wrong_tags_are_malformed(trailer: bytes) -> None:
    with pytest.raises(CheckpointRefused, match="trailer"):
        parse_trailer(trailer)


def test_k6_every_cut_is_refused_or_another_legal_trailer() -> None:
    data = encode(cut(4))
    for length in range(len(data)):
        legal = len(data) - length in (36, 68)  # the trailers of 32 and 0 bytes
        if legal:
            read(data[:length])
            continue
        with pytest.raises(CheckpointRefused) as refusal:
            read(data[:length])
        assert refusal.value.word in (Reason.TRUNCATED, Reason.TRAILER)


def test_k6_duplicate_ledger_ids_are_refused() -> None:
    rows = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2)]
    with pytest.raises(CheckpointRefused, match="learner 1 twice") as refusal:
        read(encode(cut(4), ledger=rows))
    assert refusal.value.word is Reason.LEDGER


def test_k6_ledger_of_peers_may_be_unsorted() -> None:
    rows = [(9, 1, 2, 3), (2, 4, 5, 6)]
    assert list(ledger_mapping(read(encode(cut(4), ledger=rows)).ledger)) == [9, 2]


@pytest.mark.parametrize("backend", [2, 99, 255])
@pytest.mark.parametrize("revision", [2, 3])
def test_k6_unknown_backends_are_refused(backend: int, revision: int) -> None:
    data = bytearray(encode(cut(4), revision))
    data[4] = backend
    with pytest.raises(CheckpointRefused) as refusal:
        read(bytes(data))
    assert refusal.value.word is Reason.BACKEND_ID


def test_unknown_magic() -> None:
    with pytest.raises(CheckpointRefused) as refusal:
        parse_header(b"x" * 64)
    assert refusal.value.word is Reason.MAGIC


@pytest.mark.parametrize("field", ["numel", "count", "ledger"])
def test_k6_stated_sizes_allocate_nothing(field: str) -> None:
    data = bytearray(encode(cut(4)))
    tail = len(data) - 68 - 4 * 28 - 4
    where, width = {"numel": (49 + 8, 8), "count": (45, 4), "ledger": (tail, 4)}[field]
    for value in (2**31, 2 ** (8 * width) - 1, 2 ** (8 * width - 3)):
        data[where : where + width] = value.to_bytes(width, "little")
        tracemalloc.start()
        with pytest.raises(CheckpointRefused) as refusal:
            read(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
        tracemalloc.stop()
        assert refusal.value.word is Reason.TRUNCATED


def test_k6_reads_are_small_and_end_exactly(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(encode(cut(1, (5,))))
    with open_shared(path) as fd:
        source = FileSource(fd)
        with pytest.raises(CheckpointRefused, match="ends at byte"):
            source.read_into(source.size - 4, memoryview(bytearray(5)))
    numel = 3_000_000
    memory = MemorySource(
        struct.pack("<IQI", 0xD1705A7E, 0, 1) + struct.pack("<QQ", 0, numel) + bytes(8 * numel + 4)
    )
    structure = read_structure(memory, read_header(memory))
    scan_fragment(memory, structure.fragments[0])
    assert memory.longest <= 8 << 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("half", "name"), [(0, "params"), (1, "momentum")])
def test_k6_non_finite_values_are_found(bad: float, half: int, name: str) -> None:
    snapshot = cut(4)
    values = [snapshot.fragments[1].params.clone(), snapshot.fragments[1].momentum.clone()]
    values[half][3] = bad
    fragments = list(snapshot.fragments)
    fragments[1] = FragmentState(fragments[1].version, *values)
    data = encode(Snapshot(0, b"f" * 32, b"c" * 32, 4, tuple(fragments), {}))
    source = MemorySource(data)
    structure = read_structure(source, read_header(source))
    assert [item.non_finite for item in load_all(source, structure)] == [None, name, None]
    scan = scan_fragment(source, structure.fragments[1])
    assert (scan.params.non_finite, scan.momentum.non_finite) == (1 - half, half)


def test_scan_norms_are_f64() -> None:
    values = torch.full((3,), 3e38)
    snapshot = Snapshot(0, b"f" * 32, b"c" * 32, 1, (FragmentState(1, values, -values),), {})
    source = MemorySource(encode(snapshot))
    scan = scan_fragment(source, read_structure(source, read_header(source)).fragments[0])
    assert scan.params.norm == pytest.approx(float(np.float32(3e38)) * 3**0.5, rel=1e-12)
    assert scan.params.norm == scan.momentum.norm


def refused_or_read(data: bytes) -> None:
    """The only two outcomes; no read beyond the file (MemorySource asserts that)."""
    try:
        structure = read(data)
    except CheckpointRefused:
        return
    total = structure.header.size + sum(head.size for head in structure.fragments)
    tail = 4 + 28 * len(structure.ledger) + structure.trailer.form
    assert total + tail == len(data)


@given(st.binary(max_size=400))
@settings(max_examples=150)
def test_k6_arbitrary_bytes(data: bytes) -> None:
    refused_or_read(data)


@given(
    st.integers(1, 3),
    st.sampled_from(["none", "fingerprint", "contract", "sweep", "sweep-only"]),
    st.data(),
)
@settings(max_examples=200)
def test_k6_mutated_files(revision: int, trailer: str, data: st.DataObject) -> None:
    raw = bytearray(encode(cut(data.draw(st.integers(0, 7))), revision, trailer))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "grow", "word"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "word":
            raw[at : at + 8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        if not raw:
            break
    refused_or_read(bytes(raw))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    step = draw(st.integers(0, 40))
    numels = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    fragments = tuple(
        FragmentState(
            version_at(step, p, len(numels)),
            *(
                torch.tensor(draw(st.lists(floats, min_size=numel, max_size=numel)))
                for _ in range(2)
            ),
        )
        for p, numel in enumerate(numels)
    )
    counts = st.integers(0, 2**64 - 1)
    ledger = draw(
        st.dictionaries(
            st.integers(0, 2**32 - 1), st.builds(LedgerEntry, counts, counts, counts), max_size=4
        )
    )
    hashes = st.binary(min_size=32, max_size=32)
    backend = draw(st.integers(0, 1))
    return Snapshot(backend, draw(hashes), draw(hashes), step, fragments, ledger)


@given(snapshots())
@settings(max_examples=60, deadline=None)
def test_k1_round_trip(tmp_path_factory: pytest.TempPathFactory, snapshot: Snapshot) -> None:
    path = tmp_path_factory.mktemp("round") / "state"
    store = started(path)
    store.save(snapshot, patch=False, last=True)
    assert path.read_bytes() == encode(snapshot)
    resumed = store.load(snapshot.backend, None)
    store.release()
    back = Snapshot(
        snapshot.backend,
        resumed.structure.header.fingerprint or b"",
        resumed.structure.trailer.contract or b"",
        resumed.global_step,
        resumed.fragments,
        resumed.ledger,
    )
    assert resumed.verified
    assert same_bits(back, snapshot)


def test_k5_a_cut_that_could_not_be_resumed_is_not_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "state")
    good = cut(4)
    with pytest.raises(ValueError, match="fragment 1 has version 2"):
        store.save(
            Snapshot(0, good.fingerprint, good.contract, 5, good.fragments, {}),
            patch=False,
            last=False,
        )
    assert list(tmp_path.iterdir()) == []
