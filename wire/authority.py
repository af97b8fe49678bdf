"""A small private certificate authority for one run: P-256, made with `cryptography` (S12, S30).

Nothing here touches a file or a clock: times are arguments, certificates and keys are PEM bytes.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wire.security import SecurityRefused
from wire.tls import LEARNER_URI

CA_LIFETIME = timedelta(days=3652)
LEAF_LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(minutes=10)
"""Certificates begin so long before now, for machines whose clocks are behind."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Authority:
    """The CA that signs all other certificates; `key` must not leave its owner."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, now: datetime) -> Authority:
        """A new P-256 CA that may sign leaves only."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"yeto CA {secrets.token_hex(4)}")
        builder = _builder(name, name, key, now, now + CA_LIFETIME)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs=True), True)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        builder = builder.add_extension(identifier, False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate_pem: bytes, key_pem: bytes) -> Authority:
        """An authority that `certificate_pem` and `key_pem` brought to files before.

        Raises:
            SecurityRefused: one is malformed, or they do not belong together.
        """
        certificate = _parse(certificate_pem, "the CA certificate")
        try:
            key = serialization.load_pem_private_key(key_pem, None)
        except (ValueError, TypeError):
            raise SecurityRefused("the CA key is no plain PEM key") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SecurityRefused("the CA key is no elliptic curve key")
        if certificate.public_key() != key.public_key():
            raise SecurityRefused("the CA key does not belong to the CA certificate")
        return cls(certificate, key)

    def certificate_pem(self) -> bytes:
        """The certificate that everyone may see."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """The key that nobody else may see."""
        return _key_pem(self.key)

    def issue_server(self, hosts: Sequence[str], now: datetime) -> tuple[bytes, bytes]:
        """A certificate for the names and addresses in `hosts`, and its key, both PEM.

        Raises:
            SecurityRefused: one of them is no name, or the CA has expired.
        """
        names = [server_name(host) for host in dict.fromkeys(hosts)]
        return self.issue(hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, now)

    def issue_learner(self, learner_id: int, now: datetime) -> tuple[bytes, bytes]:
        """A certificate bound to one learner id (S12), and its key, both PEM.

        Raises:
            SecurityRefused: the CA has expired.
        """
        uri = x509.UniformResourceIdentifier(f"{LEARNER_URI}{learner_id}")
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        return self.issue(f"yeto learner {learner_id}", [uri], usage, now)

    def issue(
        self,
        common_name: str,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        now: datetime,
    ) -> tuple[bytes, bytes]:
        """A certificate with the SANs `names` for one purpose, and its key, both PEM.

        Raises:
            SecurityRefused: the CA itself has expired.
        """
        end = min(now + LEAF_LIFETIME, self.certificate.not_valid_after_utc)
        if end <= now:
            raise SecurityRefused("the CA certificate has expired; make a new key directory")
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject
        builder = _builder(_name(common_name), issuer, key, now, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs=False), True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(identifier, False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    public = key.public_key()
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _parse(pem: bytes, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise SecurityRefused(f"{what} is no PEM certificate") from None


def server_name(text: str) -> x509.GeneralName:
    """One `--host` as a SAN: an address, or a DNS name that may begin with `*.`.

    Raises:
        SecurityRefused: neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        name = text.removesuffix(".")
    labels = name.removeprefix("*.").split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise SecurityRefused(
            f"--host {text!r} is neither an address nor a DNS name (letters, digits, '-' and '.')"
        )
    return x509.DNSName(name)


def describe(pem: bytes, what: str, now: datetime) -> str:
    """One line: subject, SANs and expiry.

    Raises:
        SecurityRefused: no certificate; `what` names it.
    """
    certificate = _parse(pem, what)
    expiry = certificate.not_valid_after_utc
    state = "EXPIRED" if expiry <= now else "expires"
    alternatives = ", ".join(_alternatives(certificate)) or "-"
    subject = certificate.subject.rfc4514_string()
    return f"{subject}  SAN {alternatives}  {state} {expiry:%Y-%m-%d %H:%M} UTC"


def _alternatives(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    kinds: dict[type[x509.GeneralName], str] = {
        x509.DNSName: "DNS",
        x509.IPAddress: "IP",
        x509.UniformResourceIdentifier: "URI",
    }
    return [f"{kinds.get(type(item), 'other')}:{item.value}" for item in extension.value]
