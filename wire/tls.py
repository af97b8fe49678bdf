"""TLS 1.3 contexts, certificate identities, and what a TLS error means (rules S10 to S14).

The sockets are in `wire.tls_stream`; this module reads files and judges certificates.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from wire.errors import ErrorCode, ProtocolError
from wire.frames import Role
from wire.messages import Buffer
from wire.security import SecurityRefused, read_private, shown

LEARNER_URI = "urn:yeto:learner:"
"""SAN URIs with this prefix and a learner id bind a client certificate (S12)."""

TLS_RECORD_TYPES = frozenset({21, 22})
"""First byte of the first TLS record of a connection: an alert or a handshake message."""

_PEM_LIMIT = 1_048_576
_MAX_LEARNER_ID = 2**32 - 1
_ID = re.compile("[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SyncerTlsFiles:
    """`--tls-cert`, `--tls-key` and `--tls-client-ca` of the syncer (S11)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class LearnerTlsFiles:
    """`--tls-ca`, `--tls-cert` and `--tls-key` of the learner (S11)."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


def syncer_files(
    cert: Path | None, key: Path | None, client_ca: Path | None
) -> SyncerTlsFiles | None:
    """Check that the syncer's options make sense together; None without TLS.

    Raises:
        SecurityRefused: one of them lacks its companion.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise SecurityRefused("TLS needs both --tls-cert and --tls-key")
    return SyncerTlsFiles(cert, key, client_ca)


def learner_files(
    ca: Path | None, cert: Path | None, key: Path | None, server_name: str | None = None
) -> LearnerTlsFiles | None:
    """Check that the learner's options make sense together; None without TLS.

    Raises:
        SecurityRefused: one of them lacks its companion.
    """
    if ca is None:
        if cert is None and key is None and server_name is None:
            return None
        raise SecurityRefused("TLS needs --tls-ca, the certificate authority of the syncer")
    if (cert is None) != (key is None):
        raise SecurityRefused("--tls-cert and --tls-key go together")
    return LearnerTlsFiles(ca, cert, key)


def syncer_context(files: SyncerTlsFiles) -> ssl.SSLContext:
    """A server context: TLS 1.3 only, no tickets; with a client CA, certificates are required.

    Raises:
        SecurityRefused: a file is missing, malformed, or a private key is not private.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    _load_pair(context, files.cert, files.key)
    if files.client_ca is not None:
        _load_authority(context, files.client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def learner_context(files: LearnerTlsFiles) -> ssl.SSLContext:
    """A client context that trusts `files.ca` alone and checks the server's name.

    Raises:
        SecurityRefused: a file is missing, malformed, or a private key is not private.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False
    _load_authority(context, files.ca, "--tls-ca")
    if files.cert is not None and files.key is not None:
        _load_pair(context, files.cert, files.key)
    return context


class SyncerTls:
    """The syncer's current context; `reload` replaces it for connections to come (S14)."""

    def __init__(self, files: SyncerTlsFiles) -> None:
        self.files = files
        self.context = syncer_context(files)

    def reload(self) -> None:
        """Read all files again, all or nothing; live connections stay as they are.

        Raises:
            SecurityRefused: the context in use goes on unchanged.
        """
        self.context = syncer_context(self.files)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    return context


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    read_private(key, "--tls-key", _PEM_LIMIT)

    def no_password() -> str:
        raise SecurityRefused(f"--tls-key {shown(key)} is encrypted; give a plain PEM key file")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        reason = "the key does not belong to the certificate"
        if error.reason != "KEY_VALUES_MISMATCH":
            reason = "not a certificate and its private key in PEM"
        raise SecurityRefused(
            f"--tls-cert {shown(cert)} with --tls-key {shown(key)}: {reason}"
        ) from None
    except OSError as error:
        raise SecurityRefused(
            f"--tls-cert {shown(cert)} cannot be read: {error.strerror}"
        ) from None


def _load_authority(context: ssl.SSLContext, path: Path, option: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise SecurityRefused(f"{option} {shown(path)} holds no certificate in PEM") from None
    except OSError as error:
        raise SecurityRefused(f"{option} {shown(path)} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What a client certificate proves (S12).

    Attributes:
        digest: SHA-256 of its DER, 32 bytes.
        learner_ids: the only ids it may use, None when it may use any.
    """

    digest: bytes
    learner_ids: frozenset[int] | None

    @classmethod
    def of(cls, der: bytes) -> PeerCertificate:
        """Read a verified certificate.

        Raises:
            ProtocolError: `auth` when its extensions cannot be read.
        """
        return cls(certificate_digest(der), allowed_learner_ids(der))


def certificate_digest(der: bytes) -> bytes:
    """SHA-256 over the DER of a certificate, 32 bytes (S12)."""
    return hashlib.sha256(der).digest()


def allowed_learner_ids(der: bytes) -> frozenset[int] | None:
    """The learner ids in the SAN URIs `urn:yeto:learner:<id>`; None when there is no such URI.

    A URI with that prefix but no legal id after it allows nothing: a typing error in a certificate
    must not turn it into one that may use any id.

    Raises:
        ProtocolError: `auth` when the certificate cannot be read.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        return None
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ProtocolError(ErrorCode.AUTH, "the client certificate cannot be read") from error
    named = [uri for uri in uris if uri.lower().startswith(LEARNER_URI)]
    if not named:
        return None
    texts = (uri[len(LEARNER_URI) :] for uri in named)
    ids = (int(text) for text in texts if _ID.fullmatch(text))
    return frozenset(number for number in ids if number <= _MAX_LEARNER_ID)


def check_identity(peer: PeerCertificate | None, learner_id: int) -> None:
    """HELLO and DATA_HELLO: the certificate, if one was shown, may use this id (S12).

    Raises:
        ProtocolError: `auth`.
    """
    if peer is None or peer.learner_ids is None or learner_id in peer.learner_ids:
        return
    ids = ", ".join(map(str, sorted(peer.learner_ids)[:8])) or "none"
    raise ProtocolError(
        ErrorCode.AUTH, f"this certificate may not use learner id {learner_id}, only: {ids}"
    )


def check_same_peer(peer: PeerCertificate | None, group: PeerCertificate | None) -> None:
    """DATA_HELLO: the same certificate as its group's HELLO, or none as there (S12).

    Raises:
        ProtocolError: `auth`.
    """
    if (peer and peer.digest) != (group and group.digest):
        raise ProtocolError(ErrorCode.AUTH, "the data socket shows another certificate than HELLO")


@dataclass(frozen=True, slots=True)
class TlsProblem:
    """A TLS error in one line.

    Attributes:
        reason: for the log and for the user.
        fatal: a redial cannot help, a person has to change something (S13).
    """

    reason: str
    fatal: bool


NOT_TLS = TlsProblem("the syncer does not speak TLS on this port; leave out --tls-ca", fatal=True)
PLAIN_BYTES = TlsProblem("plain bytes on a port that speaks TLS", fatal=False)
CUT_OFF = TlsProblem("the connection ended during the TLS handshake", fatal=False)

_UNKNOWN_CA = "{whose} certificate is signed by an unknown CA"
_VERIFY = {
    2: _UNKNOWN_CA,
    9: "{whose} certificate is not valid yet; check the clocks",
    10: "{whose} certificate has expired",
    18: _UNKNOWN_CA,
    19: _UNKNOWN_CA,
    20: _UNKNOWN_CA,
    21: _UNKNOWN_CA,
    23: "{whose} certificate is revoked",
    26: "{whose} certificate is made for another purpose",
    62: "name mismatch: {whose} certificate is for another name; see --tls-server-name",
    63: "name mismatch: {whose} certificate is for another name; see --tls-server-name",
    64: "name mismatch: {whose} certificate is for another address; see --tls-server-name",
}
"""Reasons by X509_V_ERR number."""

_ALERTS = {
    "CERTIFICATE_REQUIRED": "{peer} requires a certificate; give --tls-cert and --tls-key",
    "CERTIFICATE_EXPIRED": "{peer} says that our certificate has expired",
    "CERTIFICATE_REVOKED": "{peer} says that our certificate is revoked",
    "CERTIFICATE_UNKNOWN": "{peer} does not accept our certificate",
    "BAD_CERTIFICATE": "{peer} does not accept our certificate",
    "UNSUPPORTED_CERTIFICATE": "{peer} does not accept our certificate",
    "UNKNOWN_CA": "{peer} says that our certificate is signed by an unknown CA",
    "ACCESS_DENIED": "{peer} denies access",
    "DECRYPT_ERROR": "{peer} could not verify our signature",
    "PROTOCOL_VERSION": "{peer} does not speak TLS 1.3",
}
"""Reasons by the end of the name of an alert that the other side sent."""

_ERRORS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": ("{peer} showed no certificate", True),
    "UNSUPPORTED_PROTOCOL": ("{peer} does not speak TLS 1.3", True),
    "NO_PROTOCOLS_AVAILABLE": ("{peer} does not speak TLS 1.3", True),
    "UNSUPPORTED_PROTOCOL_VERSION": ("{peer} does not speak TLS 1.3", True),
}


def explain(error: ssl.SSLError, reader: Role) -> TlsProblem:
    """What went wrong, seen from `reader` (S13)."""
    peer = "the learner" if reader is Role.SYNCER else "the syncer"
    if isinstance(error, ssl.SSLCertVerificationError):
        default = "{whose} certificate is refused: " + error.verify_message.replace("{", "")
        text = _VERIFY.get(error.verify_code, default)
        return TlsProblem(text.format(whose=f"{peer}'s"), fatal=True)
    name = (error.reason or "").upper().replace(" ", "_")
    if "ALERT" in name:
        for ending, text in _ALERTS.items():
            if name.endswith(ending):
                return TlsProblem(text.format(peer=peer), fatal=True)
    if name in _ERRORS:
        text, fatal = _ERRORS[name]
        return TlsProblem(text.format(peer=peer), fatal)
    detail = name.lower().replace("_", " ") or type(error).__name__
    return TlsProblem(f"TLS error: {detail}", fatal=False)


def looks_like_tls(first: Buffer) -> bool:
    """Whether the first bytes on a plain socket are a TLS record (S13).

    A plain frame begins with another byte, so one byte is enough to tell.
    """
    return len(first) > 0 and first[0] in TLS_RECORD_TYPES
