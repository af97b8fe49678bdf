"""K9, K15 to K19: which files are resumed, by whom, and what a refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.resume import ResumeFile
from checkpoint.snapshot import FragmentState, Snapshot
from checkpoint.store import CheckpointStore
from tests.checkpoint.builders import (
    CONTRACT,
    LAYOUT,
    NUMELS,
    OTHER,
    cut,
    encode,
    flat_layout,
    hello,
    same_bits,
    started,
)
from tests.checkpoint.test_codec import golden
from wire.errors import ErrorCode, ProtocolError
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec


def load(tmp_path: Path, data: bytes, *, backend: int = 0, total: int | None = None) -> ResumeFile:
    (tmp_path / "P").write_bytes(data)
    return CheckpointStore(tmp_path / "P").load(backend, total)


def word_of(tmp_path: Path, data: bytes, **options: Any) -> Reason:
    with pytest.raises(CheckpointRefused) as refusal:
        load(tmp_path, data, **options)
    assert str(tmp_path / "P") in refusal.value.message
    return refusal.value.word


def grouped(tensors: list[int]) -> NamedLayout:
    """Fragments of that many tensors of 3 elements."""
    return NamedLayout(
        tuple(
            NamedFragment(MergeMode.AVG, tuple(TensorSpec(f"{p}.{i}", (3,)) for i in range(count)))
            for p, count in enumerate(tensors)
        )
    )


def outcome(tmp_path: Path, file: dict[str, Any], given: dict[str, Any]) -> str:
    """Run a golden `ckpt_resume` vector."""
    layout = grouped(file.get("tensors_per_fragment", [1, 2]))
    numels = [fragment.numel for fragment in layout.fragments]
    contract = {"other": OTHER}.get(given.get("contract", ""), layout.fingerprint)
    snapshot = cut(
        4,
        numels,
        backend=file.get("backend", 0),
        fingerprint=layout.fingerprint,
        contract=layout.fingerprint,
    )
    data = encode(snapshot, file["revision"], file.get("trailer", "contract"))
    try:
        resumed = load(tmp_path, data, backend=given.get("configured_backend", 0))
        resumed.snapshot_for(hello(layout, contract=contract))
    except CheckpointRefused as refusal:
        return f"refused:{refusal.word}"
    except ProtocolError as refusal:
        return f"refused:{refusal.sentence.partition(':')[0]}"
    return "accepted"


@pytest.mark.parametrize("vector", golden("ckpt_resume"))
def test_golden_resume(vector: dict[str, Any], tmp_path: Path) -> None:
    assert (
        outcome(tmp_path, vector["input"]["file"], vector["input"]["hello"]) == vector["expected"]
    )


@pytest.mark.parametrize(
    ("revision", "trailer", "tensors", "contract", "expected"),
    [
        (3, "contract", [1, 2], "fingerprint", "accepted"),
        (3, "contract", [1, 2], "other", "refused:contract-mismatch"),
        (3, "fingerprint", [1, 2], "fingerprint", "accepted"),
        (3, "none", [1, 2], "fingerprint", "accepted"),
        (3, "none", [1, 2], "other", "refused:contract-missing"),
        (2, "contract", [1, 1], "fingerprint", "accepted"),
        (2, "contract", [1, 1], "other", "refused:contract-mismatch"),
        (2, "fingerprint", [1, 1], "fingerprint", "accepted"),
        (2, "none", [1, 1], "other", "refused:contract-missing"),
        (2, "none", [1, 2], "fingerprint", "refused:legacy-grouped"),
        (2, "contract", [1, 2], "fingerprint", "refused:legacy-grouped"),
        (1, "contract", [1, 1], "fingerprint", "refused:legacy-v1"),
        (3, "sweep", [1, 1], "fingerprint", "refused:trailer"),
        (2, "sweep-only", [1, 1], "fingerprint", "refused:trailer"),
    ],
)
def test_k18_table(
    tmp_path: Path, revision: int, trailer: str, tensors: list[int], contract: str, expected: str
) -> None:
    file = {"revision": revision, "trailer": trailer, "tensors_per_fragment": tensors}
    assert outcome(tmp_path, file, {"contract": contract}) == expected


@pytest.mark.parametrize("revision", [2, 3])
def test_k18_the_whole_state_is_taken_over(tmp_path: Path, revision: int) -> None:
    layout = flat_layout((3, 5))
    snapshot = cut(7, (3, 5), fingerprint=layout.fingerprint, contract=CONTRACT, backend=1)
    resumed = load(tmp_path, encode(snapshot, revision), backend=1)
    assert (resumed.revision, resumed.global_step, resumed.verified) == (revision, 7, False)
    assert resumed.ledger_ids == frozenset(snapshot.ledger)
    assert same_bits(resumed.snapshot_for(hello(layout)), snapshot)


@pytest.mark.parametrize(
    ("layout", "options", "word"),
    [
        (LAYOUT, {"fingerprint": OTHER}, "fingerprint-mismatch"),
        (flat_layout(NUMELS), {}, "fingerprint-mismatch"),
        (flat_layout(NUMELS[:2]), {"fingerprint": LAYOUT.fingerprint}, "fragment-mismatch"),
        (flat_layout((7, 5, 5)), {"fingerprint": LAYOUT.fingerprint}, "fragment-mismatch"),
        (LAYOUT, {"contract": OTHER}, "contract-mismatch"),
    ],
)
def test_k18_a_wrong_hello_changes_nothing(
    tmp_path: Path, layout: NamedLayout, options: dict[str, bytes], word: str
) -> None:
    resumed = load(tmp_path, encode(cut(4)))
    with pytest.raises(ProtocolError) as refusal:
        resumed.snapshot_for(hello(layout, **options))
    assert refusal.value.code is ErrorCode.CHECKPOINT_MISMATCH
    assert refusal.value.sentence.startswith(f"{word}: ")
    with pytest.raises(ProtocolError, match=word):
        resumed.gate.check(hello(layout, **options))
    assert same_bits(resumed.snapshot_for(hello()), cut(4))


def test_w41_a_mismatch_shows_both_values(tmp_path: Path) -> None:
    resumed = load(tmp_path, encode(cut(4)))
    with pytest.raises(ProtocolError) as refusal:
        resumed.snapshot_for(hello(fingerprint=OTHER))
    assert OTHER.hex()[:16] in refusal.value.text
    assert LAYOUT.fingerprint.hex()[:16] in refusal.value.text


def test_k18_v2_trailer_fingerprint_is_compared(tmp_path: Path) -> None:
    layout = flat_layout((3, 5))
    resumed = load(tmp_path, encode(cut(4, (3, 5), fingerprint=OTHER), 2))
    with pytest.raises(ProtocolError, match="fingerprint-mismatch"):
        resumed.snapshot_for(hello(layout))


# -- K16 -------------------------------------------------------------------------------------------


def test_k16_order_of_the_checks(tmp_path: Path) -> None:
    """A file with every defect is refused for the first; each repair shows the next."""
    good = cut(9)
    fragments = list(good.fragments)
    values = fragments[0].params.clone()
    values[0] = float("nan")
    fragments[0] = FragmentState(8, values, fragments[0].momentum)
    bad_version = Snapshot(1, good.fingerprint, good.contract, 9, tuple(fragments), {})
    data = bytearray(encode(bad_version))
    data[4] = 7
    data += b"x"
    assert word_of(tmp_path, b"\0" + bytes(data), total=8) is Reason.MAGIC
    assert word_of(tmp_path, bytes(data), total=8) is Reason.BACKEND_ID
    data[4] = 1
    assert word_of(tmp_path, bytes(data), total=8) is Reason.BACKEND_MISMATCH
    data[4] = 0
    assert word_of(tmp_path, bytes(data), total=8) is Reason.TRAILER
    del data[-1]
    assert word_of(tmp_path, bytes(data), total=8) is Reason.VERSIONS
    store = started(tmp_path / "elsewhere")
    store.save(cut(9), patch=False, last=True)
    store.release()
    (tmp_path / "elsewhere.sums").rename(tmp_path / "P.sums")
    data[49:57] = (7).to_bytes(8, "little")
    assert word_of(tmp_path, bytes(data), total=8) is Reason.INTEGRITY
    (tmp_path / "P.sums").unlink()
    assert word_of(tmp_path, bytes(data), total=8) is Reason.NON_FINITE
    assert word_of(tmp_path, encode(cut(9)), total=8) is Reason.STEP_AFTER_TOTAL
    assert load(tmp_path, encode(cut(9)), total=9).global_step == 9


def test_k16_trailer_that_contradicts_the_header(tmp_path: Path) -> None:
    data = bytearray(encode(cut(4)))
    data[-68] ^= 1
    assert word_of(tmp_path, bytes(data)) is Reason.TRAILER


@pytest.mark.parametrize("data", [b"", b"short"])
def test_k16_nothing_there(tmp_path: Path, data: bytes) -> None:
    assert word_of(tmp_path, data) is Reason.TRUNCATED


# -- K15 and damage --------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """P of step 6 with sums, and its spare of step 5."""
    store = started(tmp_path / "P")
    for step in range(3, 7):
        store.save(cut(step), patch=True, last=False)
    store.release()
    return tmp_path / "P"


def test_a_file_without_fragments_waits_for_a_hello_like_any_other(tmp_path: Path) -> None:
    """K16, K18: nothing is wrong with it until a HELLO has fragments."""
    path = tmp_path / "P"
    path.write_bytes(encode(Snapshot(0, b"f" * 32, b"c" * 32, 0, (), {})))
    loaded = CheckpointStore(path).load(0, None)
    assert loaded.fragments == ()
    with pytest.raises(ProtocolError, match="fragment"):
        loaded.gate.check(hello(fingerprint=b"f" * 32, contract=b"c" * 32))


def refusal_of(path: Path) -> CheckpointRefused:
    before = {item.name: item.read_bytes() for item in path.parent.iterdir()}
    with pytest.raises(CheckpointRefused) as refusal:
        CheckpointStore(path).load(0, None)
    assert {item.name: item.read_bytes() for item in path.parent.iterdir()} == before
    return refusal.value


@pytest.mark.parametrize(
    ("offset", "section"),
    [(6, "header"), (49 + 16, "fragment 0"), (-200, "fragment 2"), (-1, "tail"), (-100, "tail")],
)
def test_k15_a_flipped_bit_is_found_and_named(saved: Path, offset: int, section: str) -> None:
    data = bytearray(saved.read_bytes())
    data[offset] ^= 1
    if offset == 6:
        data[-68 + 1] ^= 1  # the fingerprint is there twice
    saved.write_bytes(data)
    refusal = refusal_of(saved)
    assert refusal.word is Reason.INTEGRITY
    assert section in refusal.message
    assert f"delete {saved}.sums" in refusal.message


def test_k15_every_byte_counts(saved: Path) -> None:
    data = saved.read_bytes()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x10
        saved.write_bytes(broken)
        with pytest.raises(CheckpointRefused):
            CheckpointStore(saved).load(0, None)


def test_k15_truncation_with_sums_says_so_too(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    refusal = refusal_of(saved)
    assert refusal.word is Reason.TRUNCATED
    assert "integrity: " in refusal.message


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_k15_without_readable_sums_it_loads_unverified(saved: Path, content: bytes | None) -> None:
    sums = saved.with_name("P.sums")
    if content is None:
        sums.unlink()
    else:
        sums.write_bytes(content)
    assert not CheckpointStore(saved).load(0, None).verified


def test_k9_a_whole_spare_is_named_and_left_alone(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:100])
    refusal = refusal_of(saved)
    assert refusal.word is Reason.TRUNCATED
    spare = saved.with_name("P.tmp")
    assert f"{spare} is a whole checkpoint of step 5" in refusal.message
    assert f"mv -- {spare} {saved}" in refusal.message
    # Doing what it says works.
    saved.rename(saved.with_name("P.damaged"))
    spare.rename(saved)
    resumed = CheckpointStore(saved).load(0, None)
    assert (resumed.global_step, resumed.verified) == (5, True)


@pytest.mark.parametrize("damage", ["torn", "cut", "nan", "missing"])
def test_k9_a_damaged_spare_is_not_named(saved: Path, damage: str) -> None:
    spare = saved.with_name("P.tmp")
    data = bytearray(spare.read_bytes())
    if damage == "torn":
        data[70] ^= 1
    elif damage == "nan":
        saved.with_name("P.sums").unlink()
        data[65:69] = b"\xff\xff\xff\xff"
    spare.write_bytes(data[:-80] if damage == "cut" else data)
    if damage == "missing":
        spare.unlink()
    saved.write_bytes(b"")
    assert "P.tmp" not in refusal_of(saved).message


def test_k9_no_spare_is_offered_where_the_file_may_be_whole(saved: Path) -> None:
    with pytest.raises(CheckpointRefused) as refusal:
        CheckpointStore(saved).load(1, None)
    assert refusal.value.word is Reason.BACKEND_MISMATCH
    assert "P.tmp" not in refusal.value.message
