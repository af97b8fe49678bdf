"""Who may enter, from the command line: keys, certificates, and what a foreign address needs.

Rules S5, S11 and S20. Reads small files; nothing here touches the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncer.options import SyncerOptions
from wire.frames import Role
from wire.security import (
    AuthKey,
    SecurityRefused,
    is_loopback,
    key_paths,
    read_key_file,
    require_protection,
)
from wire.tls import SyncerTls, syncer_files


@dataclass(frozen=True, slots=True)
class Protection:
    """What stands between the port and strangers.

    Attributes:
        keys: any of them opens a sealed HELLO; none: HELLOs are not sealed (S2).
        tls: the certificates in use; None: plain TCP.
        warnings: what to say at start.
        exposed: what to say at start and every hour, None when the port is protected (S20).
    """

    keys: tuple[AuthKey, ...] = ()
    tls: SyncerTls | None = None
    warnings: tuple[str, ...] = ()
    exposed: str | None = None

    @property
    def closed(self) -> bool:
        """Whether strangers cannot enter, so that a repeated HELLO is a replay (S4)."""
        return bool(self.keys) or (self.tls is not None and self.tls.files.client_ca is not None)


def protect(options: SyncerOptions, environ: Mapping[str, str]) -> Protection:
    """Read the keys and certificates that the options name, and judge the address.

    Raises:
        SecurityRefused: a file cannot be used, or the address needs more than there is.
    """
    given = [Path(path) for path in options.auth_key_file]
    keys = tuple(read_key_file(path) for path in key_paths(given, environ))
    files = syncer_files(
        _path(options.tls_cert), _path(options.tls_key), _path(options.tls_client_ca)
    )
    tls = None if files is None else SyncerTls(files)
    found = Protection(keys, tls)
    refusal = require_protection(
        Role.SYNCER,
        options.host,
        key=bool(keys),
        tls=files is not None and files.client_ca is not None,
        insecure=options.insecure,
    )
    if refusal is not None:
        raise SecurityRefused(refusal)
    if not options.insecure:
        return found
    if found.closed or is_loopback(options.host):
        reason = "strangers are kept out" if found.closed else f"--host {options.host} is local"
        return Protection(keys, tls, (f"--insecure has no effect: {reason}",))
    return Protection(
        keys,
        tls,
        exposed=f"--host {options.host} with --insecure: whoever reaches this port may join, "
        "read the model and change it",
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
