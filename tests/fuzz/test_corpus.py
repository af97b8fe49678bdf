"""The fuzz targets without atheris: the corpus replayed, and hypothesis on the same functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import seeds
from fuzz.targets import NAMES, load

CORPUS = {name: sorted((seeds.CORPUS / name).iterdir()) for name in NAMES}
FILES = [(name, path) for name in NAMES for path in CORPUS[name]]


@pytest.mark.parametrize(
    ("name", "path"), FILES, ids=[f"{name}-{path.name}" for name, path in FILES]
)
def test_replay(name: str, path: Path) -> None:
    """No target fails on a seed, or on an input that once failed."""
    load(name)(path.read_bytes())


def test_the_corpus_holds_the_seeds_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "CORPUS", tmp_path)
    seeds.main()
    for name in NAMES:
        kept = {p.name: p.read_bytes() for p in CORPUS[name] if p.name.startswith("seed-")}
        assert {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} == kept


def mutated(name: str) -> st.SearchStrategy[bytes]:
    """A seed with a stretch of it replaced, removed or repeated."""
    contents = st.sampled_from([path.read_bytes() for path in CORPUS[name]])

    def splice(parts: tuple[bytes, int, int, bytes]) -> bytes:
        content, start, length, new = parts
        at = start % (len(content) + 1)
        return content[:at] + new + content[at + length :]

    stretch = st.integers(0, 16)
    changes = st.tuples(contents, st.integers(0, 2**16), stretch, st.binary(max_size=16))
    return changes.map(splice) | st.binary(max_size=200)


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes(name: str) -> None:
    one_input = load(name)

    @settings(max_examples=150, deadline=None)
    @given(mutated(name))
    def check(data: bytes) -> None:
        one_input(data)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_bytes(name: str) -> None:
    one_input = load(name)

    @settings(max_examples=20_000, deadline=None)
    @given(mutated(name))
    def check(data: bytes) -> None:
        one_input(data)

    check()
