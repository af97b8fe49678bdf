"""Who may enter: the sealed HELLO, key files, and what a non-loopback address needs.

Rules S1 to S3, S5, S20 and S21. TLS lives in `wire.tls`, replays in `wire.replay`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wire.errors import ErrorCode, LocalError, ProtocolError
from wire.frames import Role
from wire.layout import LayoutReader, parse_layout
from wire.messages import Buffer, Hello, decode_hello

MAC_BYTES = 32
MIN_KEY_BYTES = 32
AUTH_KEY_ENV = "YETO_AUTH_KEY_FILE"
INSECURE_WARNING_EVERY_S = 3600.0
"""A syncer started with `--insecure` repeats its warning after so many seconds (S20)."""

_MAC_PREFIX = b"yeto-hello-mac-v1\0"
_KEY_FILE_LIMIT = 16_384
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2})+")
_NO_KEY = "; this syncer has no key, so a sealed HELLO cannot be opened here"


class SecurityRefused(LocalError):
    """A key, certificate or address that this program refuses to start with (exit 2).

    The text is one line that says what to do, and never holds key material (S5).
    """


@dataclass(frozen=True, slots=True)
class AuthKey:
    """A shared key of at least 32 bytes; its representation does not show it (S5)."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_KEY_BYTES:
            raise SecurityRefused(
                f"a key has {len(self.secret)} bytes, at least {MIN_KEY_BYTES} are needed"
            )

    def mac(self, body: Buffer) -> bytes:
        """HMAC-SHA256 over the fixed prefix and a HELLO body, 32 bytes (S1)."""
        digest = hmac.new(self.secret, _MAC_PREFIX, hashlib.sha256)
        digest.update(body)
        return digest.digest()


def seal(key: AuthKey, body: Buffer) -> bytes:
    """The HELLO payload `body | mac` (S1)."""
    return bytes(body) + key.mac(body)


def open_sealed(keys: Sequence[AuthKey], payload: Buffer) -> memoryview:
    """Verify the mac at the end of a HELLO payload and return the body (S2, step 0 of W12).

    Every key is tried, whichever fits, and compared in constant time: the duration tells nothing
    about the key that opens. Hashes the payload once per key; releases the GIL meanwhile.

    Args:
        keys: the syncer's keys, at least one.
        payload: the whole HELLO payload; the result is a view of it.

    Raises:
        ProtocolError: `auth` when no key opens it or it is too short to hold a mac.
    """
    view = memoryview(payload)
    if len(view) < MAC_BYTES:
        raise ProtocolError(ErrorCode.AUTH, "HELLO is not sealed, this syncer requires a key")
    body, mac = view[:-MAC_BYTES], view[-MAC_BYTES:]
    opened = 0
    for key in keys:
        opened |= hmac.compare_digest(key.mac(body), mac)
    if not opened:
        raise ProtocolError(
            ErrorCode.AUTH, "HELLO is not sealed with a key of this syncer; check --auth-key-file"
        )
    return body


def open_hello(
    keys: Sequence[AuthKey],
    payload: memoryview,
    learners: int,
    layouts: LayoutReader = parse_layout,
) -> Hello:
    """Steps 0 to 8 of W12: open the seal when there are keys, then read the body.

    A sealed HELLO without profile has the length of a plain one with profile, so that its mac is
    taken for a profile and the stream count; both refusals name the missing key then (S2).

    Raises:
        ProtocolError: with the code of the first failing step.
    """
    if keys:
        return decode_hello(open_sealed(keys, payload), learners, layouts)
    try:
        return decode_hello(payload, learners, layouts)
    except ProtocolError as error:
        if error.code in (ErrorCode.HELLO_TAIL, ErrorCode.NUM_STREAMS):
            raise ProtocolError(error.code, error.sentence + _NO_KEY) from None
        raise


def key_paths(given: Sequence[Path], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files of `--auth-key-file`, or else the one the environment names (S5)."""
    if given:
        return tuple(given)
    named = environ.get(AUTH_KEY_ENV)
    return (Path(named),) if named else ()


def read_key_file(path: Path) -> AuthKey:
    """Read one key file: a line of hex, at least 32 bytes, private to its owner (S5).

    Raises:
        SecurityRefused: missing, not private, too short, not hex; never quotes the content.
    """
    raw = read_private(path, "key file", _KEY_FILE_LIMIT).strip()
    name = shown(path)
    if not _HEX.fullmatch(raw):
        raise SecurityRefused(f"key file {name} is not one line of hex digits in pairs")
    secret = bytes.fromhex(raw.decode("ascii"))
    if len(secret) < MIN_KEY_BYTES:
        raise SecurityRefused(
            f"key file {name} holds {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed"
        )
    return AuthKey(secret)


def read_private(path: Path, what: str, limit: int) -> bytes:
    """Read a small file that only its owner may touch.

    Raises:
        SecurityRefused: it cannot be read, is not a regular file, is longer than `limit` bytes, or
            group or others have any permission on it.
    """
    try:
        # Without O_NONBLOCK a named pipe would hold the start for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a usable path"
        raise SecurityRefused(f"{what} {shown(path)} cannot be read: {reason}") from None
    try:
        _check_private(os.fstat(descriptor), f"{what} {shown(path)}")
        raw = os.read(descriptor, limit + 1)
    except OSError as error:
        message = f"{what} {shown(path)} cannot be read: {error.strerror}"
        raise SecurityRefused(message) from None
    finally:
        os.close(descriptor)
    if len(raw) > limit:
        raise SecurityRefused(f"{what} {shown(path)} is longer than {limit} bytes")
    return raw


def _check_private(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SecurityRefused(f"{name} is not a regular file")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SecurityRefused(
            f"{name} is open to group or others (mode {mode:04o}); make it private with chmod 600"
        )


def shown(path: Path) -> str:
    """A path for a message; hidden when someone typed a key where its file belongs (S5)."""
    text = str(path)
    return "(a long hex text)" if re.search("[0-9a-fA-F]{48}", text) else text


def is_loopback(host: str) -> bool:
    """Whether an address or name surely stays on this machine: localhost, 127/8, ::1.

    Nothing is resolved; every other name counts as foreign.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def require_protection(
    role: Role, host: str, *, key: bool, tls: bool, insecure: bool
) -> str | None:
    """What is missing before `role` may bind (S20) or dial (S21) `host`; None when nothing is.

    Args:
        role: SYNCER binds, LEARNER dials.
        host: the address as the user gave it.
        key: an authentication key is configured.
        tls: for the syncer `--tls-client-ca` is given, for the learner `--tls-ca`.
        insecure: `--insecure` is given; the syncer then warns at start and every hour.
    """
    if key or tls or insecure or is_loopback(host):
        return None
    if role is Role.SYNCER:
        return (
            f"--host {host} lets strangers in: give --auth-key-file (a shared key), or "
            "--tls-client-ca with --tls-cert and --tls-key (certificates), "
            "or --insecure when the network itself is trusted"
        )
    return (
        f"--connect {host} would send the model unprotected: give --auth-key-file (a shared key), "
        "or --tls-ca (encryption), or --insecure when the network itself is trusted"
    )
