"""The checkpoint reader, all revisions (K1 to K6). Input: a whole file."""

from __future__ import annotations

import math

from checkpoint.codec import (
    Source,
    Structure,
    check_versions,
    fragment_buffers,
    read_header,
    read_structure,
    scan_fragment,
)
from checkpoint.errors import CheckpointRefused, Reason
from checkpoint.format import TrailerForm, encode_header, encode_tail, ledger_mapping
from checkpoint.loading import LoadedFragment, load_group
from checkpoint.resume import check_finite, check_trailer
from checkpoint.snapshot import Snapshot
from checkpoint.sums import damaged_sections, encode_sums, entry_of, parse_sums


class MemorySource:
    """A file in memory; refuses to be read past its end like a real one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`."""
        if offset < 0 or offset + len(out) > self.size:
            raise CheckpointRefused(Reason.TRUNCATED, f"the file ends at byte {self.size}")
        out[:] = self._data[offset : offset + len(out)]


def one_input(data: bytes) -> None:
    """Read it as a resume and as the tools do; what is accepted must be written back the same."""
    source = MemorySource(data)
    try:
        structure = read_structure(source, read_header(source))
        loaded = _load(source, structure)
        _written_back(data, structure, loaded)
        check_versions(structure)
        check_trailer(structure)
        check_finite(loaded)
    except CheckpointRefused as error:
        assert error.word in Reason
        assert error.message


def _load(source: Source, structure: Structure) -> list[LoadedFragment]:
    loaded: list[LoadedFragment] = []
    for head in structure.fragments:
        # One at a time: several are hashed by a compiled loop, which cannot be instrumented.
        (fragment,) = load_group(source, [head])
        loaded.append(fragment)
        scan = scan_fragment(source, head)
        assert fragment.digest == scan.digest
        halves = (scan.params, scan.momentum)
        assert (fragment.non_finite is None) == (not any(half.non_finite for half in halves))
        assert all(math.isfinite(half.norm) for half in halves)
    entry = entry_of(source, structure, loaded)
    assert parse_sums(encode_sums([entry])) == (entry,)
    assert not list(damaged_sections(entry, entry))
    return loaded


def _written_back(data: bytes, structure: Structure, loaded: list[LoadedFragment]) -> None:
    """A V3 file of the form that we write is reproduced to the bit (K2)."""
    header, trailer = structure.header, structure.trailer
    ids = structure.ledger["id"].tolist()
    if header.revision != 3 or trailer.form is not TrailerForm.CONTRACT or ids != sorted(ids):
        return
    if header.fingerprint != trailer.fingerprint:
        return
    assert header.backend is not None
    assert header.fingerprint is not None
    assert trailer.contract is not None
    snapshot = Snapshot(
        header.backend,
        header.fingerprint,
        trailer.contract,
        header.global_step,
        tuple(fragment.state for fragment in loaded),
        ledger_mapping(structure.ledger),
    )
    parts = [encode_header(snapshot)]
    for fragment in snapshot.fragments:
        parts += map(bytes, fragment_buffers(fragment))
    assert b"".join([*parts, encode_tail(snapshot)]) == data
