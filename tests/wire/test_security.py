"""The sealed HELLO, replays, key files and binding rules (S1-S5, S20, S21)."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wire.dtypes import DType
from wire.errors import ErrorCode, ProtocolError
from wire.frames import Role
from wire.layout import parse_layout
from wire.messages import Hello, encode_hello
from wire.replay import ReplayGuard
from wire.security import (
    AuthKey,
    SecurityRefused,
    is_loopback,
    key_paths,
    open_hello,
    open_sealed,
    read_key_file,
    require_protection,
    seal,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["vectors"]
MACS = [vector for vector in GOLDEN if vector["kind"] == "hello_mac"]
KEY = AuthKey(bytes(range(32)))
OTHER = AuthKey(b"o" * 40)
LAYOUT = parse_layout(memoryview(bytes.fromhex("00010000000400000000000000")), 1)[0]


def hello(profile: bytes | None = None) -> bytes:
    return encode_hello(
        Hello(
            learner_id=2,
            generation=77,
            dtype=DType.BF16,
            layout=LAYOUT,
            fingerprint=b"f" * 32,
            contract=b"c" * 32,
            profile=profile,
            num_streams=4,
        )
    )


@pytest.mark.parametrize("vector", MACS, ids=[vector["id"] for vector in MACS])
def test_golden_hello_mac(vector: dict) -> None:
    """S6."""
    key = AuthKey(bytes.fromhex(vector["input"]["key"]))
    body = bytes.fromhex(vector["input"]["body"])
    sealed = seal(key, body)
    assert sealed.hex() == vector["expected"]
    assert bytes(open_sealed([OTHER, key], sealed)) == body


def test_any_of_several_keys_opens() -> None:
    """S5: rotation."""
    for key in (KEY, OTHER):
        assert open_hello([KEY, OTHER], memoryview(seal(key, hello())), 3).learner_id == 2


@pytest.mark.parametrize(
    "payload",
    [hello(), seal(OTHER, hello()), b"", seal(KEY, hello())[:-1], b"\xff" + seal(KEY, hello())[1:]],
    ids=["unsealed", "other key", "empty", "cut", "body changed"],
)
def test_wrong_or_missing_mac_is_refused_before_the_body_is_read(payload: bytes) -> None:
    """S2: code auth, whatever the body says."""
    with pytest.raises(ProtocolError) as caught:
        open_hello([KEY], memoryview(payload), 3)
    assert caught.value.code is ErrorCode.AUTH
    assert KEY.secret.hex() not in caught.value.text


def test_mac_is_step_0_of_the_acceptance_order() -> None:
    """W12: a good mac over a body of another version gives `version`, a bad one `auth`."""
    body = b"\x03" + hello()[1:]
    with pytest.raises(ProtocolError, match=r"^version:"):
        open_hello([KEY], memoryview(seal(KEY, body)), 3)
    with pytest.raises(ProtocolError, match=r"^auth:"):
        open_hello([KEY], memoryview(seal(OTHER, body)), 3)


def test_an_empty_hello_is_not_sealed() -> None:
    """S2, W12 step 0: the mac comes before anything else, the length included."""
    with pytest.raises(ProtocolError, match=r"^auth:"):
        open_hello([KEY], memoryview(b""), 3)
    with pytest.raises(ProtocolError, match=r"^bad-length:"):
        open_hello([], memoryview(b""), 3)


@pytest.mark.parametrize("profile", [None, b"p" * 32], ids=["no profile", "profile"])
def test_syncer_without_key_says_so(profile: bytes | None) -> None:
    """S2: answered as a malformed tail, and the text names the missing key."""
    with pytest.raises(ProtocolError, match="this syncer has no key") as caught:
        open_hello([], memoryview(seal(KEY, hello(profile))), 3)
    assert caught.value.code in (ErrorCode.HELLO_TAIL, ErrorCode.NUM_STREAMS)


def test_malformed_tail_inside_a_good_seal_does_not_blame_the_key() -> None:
    with pytest.raises(ProtocolError, match=r"^hello-tail:") as caught:
        open_hello([KEY], memoryview(seal(KEY, hello() + b"x")), 3)
    assert "no key" not in caught.value.text


@given(payload=st.binary(max_size=300), keys=st.lists(st.sampled_from([KEY, OTHER]), min_size=1))
def test_nothing_unsealed_ever_opens(payload: bytes, keys: list[AuthKey]) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_sealed(keys, payload)
    assert caught.value.code is ErrorCode.AUTH


@given(body=st.binary(max_size=300), flip=st.integers(min_value=0))
def test_every_bit_is_sealed(body: bytes, flip: int) -> None:
    """S1: whatever bit changes, body or mac, the seal breaks."""
    sealed = bytearray(seal(KEY, body))
    assert bytes(open_sealed([KEY], sealed)) == body
    bit = flip % (8 * len(sealed))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        open_sealed([KEY], sealed)


def test_key_is_in_no_representation() -> None:
    """S5."""
    for text in (repr(KEY), str(KEY), f"{[KEY]}"):
        assert KEY.secret.hex() not in text
        assert repr(KEY.secret)[2:-1] not in text


class ReplayModel(RuleBasedStateMachine):
    """S4 against a plain list: the last `CAPACITY` accepted pairs are refused, others are not."""

    CAPACITY = 5

    def __init__(self) -> None:
        super().__init__()
        self.guard = ReplayGuard(self.CAPACITY)
        self.accepted: list[tuple[int, int]] = []

    @rule(learner=st.integers(0, 2), generation=st.integers(1, 4))
    def hello(self, learner: int, generation: int) -> None:
        if (learner, generation) in self.accepted[-self.CAPACITY :]:
            with pytest.raises(ProtocolError) as caught:
                self.guard.check(learner, generation)
            assert caught.value.code is ErrorCode.DUPLICATE_GENERATION
        else:
            self.guard.check(learner, generation)
            self.guard.remember(learner, generation)
            self.accepted.append((learner, generation))

    @invariant()
    def bounded(self) -> None:
        assert len(self.guard) == min(len(self.accepted), self.CAPACITY)


TestReplayModel = ReplayModel.TestCase


def test_replay_memory_holds_65536_pairs() -> None:
    """S4."""
    guard = ReplayGuard()
    for generation in range(1, 65_538):
        guard.remember(0, generation)
    assert len(guard) == 65_536
    guard.check(0, 1)
    with pytest.raises(ProtocolError):
        guard.check(0, 2)


def key_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [b"ab" * 32, b"  " + b"AB" * 32 + b"\r\n\n", b"\n\t" + b"ab" * 32, b"ab" * 100],
)
def test_key_file_is_read(tmp_path: Path, content: bytes) -> None:
    """S5: surrounding white space is ignored, either case, 32 bytes or more."""
    key = read_key_file(key_file(tmp_path / "k", content))
    assert key.secret == b"\xab" * (len(content.strip()) // 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not one line of hex"),
        (b"ab" * 31, "31 bytes, at least 32"),
        (b"ab" * 32 + b"a", "not one line of hex"),
        (b"zz" * 32, "not one line of hex"),
        (b"0x" + b"ab" * 32, "not one line of hex"),
        (b"ab" * 16 + b"\n" + b"ab" * 16, "not one line of hex"),
        (b"ab " * 32, "not one line of hex"),
        (b"ab" * 9000, "longer than"),
        ("ａb".encode() * 32, "not one line of hex"),
    ],
)
def test_bad_key_file_is_refused_without_quoting_it(
    tmp_path: Path, content: bytes, words: str
) -> None:
    """S5: exit 2 with a text that names the file, not its content; the traceback neither."""
    path = key_file(tmp_path / "k", content)
    with pytest.raises(SecurityRefused, match=words) as caught:
        read_key_file(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert str(path) in shown
    assert "abababab" not in shown
    assert "zzzz" not in shown


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620])
def test_key_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """S5."""
    with pytest.raises(SecurityRefused, match=r"open to group or others \(mode 0\d+\).*chmod 600"):
        read_key_file(key_file(tmp_path / "k", b"ab" * 32, mode))


def test_missing_and_odd_key_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, words in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
    ]:
        with pytest.raises(SecurityRefused, match=words):
            read_key_file(path)


def test_a_key_given_as_path_is_not_shown() -> None:
    """S5: the key never appears in an error, not even when typed in the wrong place."""
    with pytest.raises(SecurityRefused) as caught:
        read_key_file(Path("ab" * 32))
    assert "abab" not in str(caught.value)


def test_environment_names_a_key_file_unless_the_option_does() -> None:
    """S5."""
    environ = {"YETO_AUTH_KEY_FILE": "/e:v"}
    assert key_paths([], environ) == (Path("/e:v"),)
    assert key_paths([Path("a"), Path("b")], environ) == (Path("a"), Path("b"))
    assert key_paths([], {"YETO_AUTH_KEY_FILE": ""}) == ()


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost.", "127.0.0.1", "127.9.8.7", "::1", "[::1]", "::ffff:127.0.0.1"],
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    for role in Role:
        assert require_protection(role, host, key=False, tls=False, insecure=False) is None


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
        "::ffff:10.0.0.1",
        "example.com",
        "localhost.evil",
        "fe80::1",
    ],
)
def test_foreign_hosts_need_one_of_three_ways(host: str) -> None:
    """S20, S21: the message names all three."""
    assert not is_loopback(host)
    ways = {
        Role.SYNCER: ("--auth-key-file", "--tls-client-ca", "--insecure"),
        Role.LEARNER: ("--auth-key-file", "--tls-ca", "--insecure"),
    }
    for role, names in ways.items():
        text = require_protection(role, host, key=False, tls=False, insecure=False)
        assert text is not None
        assert all(name in text for name in names)
        assert "\n" not in text
        for way in ("key", "tls", "insecure"):
            given = {"key": False, "tls": False, "insecure": False, way: True}
            assert require_protection(role, host, **given) is None
