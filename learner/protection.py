"""How a learner's sockets are protected, from its settings (rules S5, S11, S21)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from learner.client import Transport
from learner.config import Address, LearnerConfig
from learner.errors import ConfigError
from wire.frames import Role
from wire.security import (
    SecurityRefused,
    is_loopback,
    key_paths,
    read_key_file,
    require_protection,
    seal,
)
from wire.tls import learner_context, learner_files
from wire.tls_stream import TlsDoor

log = logging.getLogger(__name__)


def open_transport(config: LearnerConfig, environ: Mapping[str, str]) -> Transport:
    """Read the key and the certificates that the settings name, and judge the address.

    Args:
        config: the settings; in a baseline nothing is read.
        environ: may name the key file (S5).

    Raises:
        ConfigError: a file cannot be used, or the address needs more than there is.
    """
    address = config.address
    if address is None:
        return Transport()
    try:
        return _open(config, address, environ)
    except SecurityRefused as error:
        raise ConfigError(str(error)) from error


def _open(config: LearnerConfig, address: Address, environ: Mapping[str, str]) -> Transport:
    sealed = _seal(config, environ)
    files = learner_files(
        _path(config.tls_ca), _path(config.tls_cert), _path(config.tls_key), config.tls_server_name
    )
    refusal = require_protection(
        Role.LEARNER,
        address.host,
        key=sealed is not None,
        tls=files is not None,
        insecure=config.insecure,
    )
    if refusal is not None:
        raise SecurityRefused(refusal)
    if files is None:
        if sealed is None and not is_loopback(address.host):
            log.warning("--insecure: the model goes to %s without key and encryption", address)
        return Transport(seal=sealed)
    context = learner_context(files)
    name = config.tls_server_name or address.host
    TlsDoor(Role.LEARNER, lambda: context, name)  # refuses an impossible name now, not at the dial
    return Transport(ssl=context, server_name=name, seal=sealed)


def _seal(config: LearnerConfig, environ: Mapping[str, str]) -> Callable[[bytes], bytes] | None:
    given = _path(config.auth_key_file)
    paths = key_paths(() if given is None else (given,), environ)
    return partial(seal, read_key_file(paths[0])) if paths else None


def _path(value: Path | str | None) -> Path | None:
    return None if value is None else Path(value)
