"""The transport that a protocol above TLS holds; its work is done by `wire.tls_stream`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from wire.messages import Buffer

if TYPE_CHECKING:
    from wire.tls_stream import TlsEndpoint


class TlsTransport(asyncio.Transport):
    """What the protocol above holds: the usual transport methods, plaintext in and out.

    `get_extra_info` adds `ssl_object` and, on the syncer, `peer_certificate` (PeerCertificate or
    None). The size of the write buffer counts ciphertext.
    """

    def __init__(self, endpoint: TlsEndpoint) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._lower = endpoint.socket_transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As asyncio's, see the class."""
        if name == "ssl_object":
            return self._endpoint.ssl
        if name == "peer_certificate":
            return self._endpoint.peer
        return self._lower.get_extra_info(name, default)

    def write(self, data: Buffer) -> None:
        """Encrypt and send; data for a closing socket is dropped."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Encrypt and send several buffers in order."""
        if self._lower.is_closing():
            return
        for data in list_of_data:
            self._endpoint.encrypt(data)
        self._endpoint.flush()

    def write_eof(self) -> None:
        """Close our direction: close_notify, then the socket's write side. Reading goes on."""
        if not self._lower.is_closing():
            self._endpoint.say_goodbye()
            self._lower.write_eof()

    def can_write_eof(self) -> bool:
        """True, unlike asyncio's TLS."""
        return True

    def pause_reading(self) -> None:
        """As asyncio's."""
        self._endpoint.pause()

    def resume_reading(self) -> None:
        """As asyncio's."""
        self._endpoint.resume()

    def is_reading(self) -> bool:
        """As asyncio's."""
        return not self._endpoint.paused and not self._lower.is_closing()

    def is_closing(self) -> bool:
        """As asyncio's."""
        return self._lower.is_closing()

    def close(self) -> None:
        """As asyncio's."""
        self._endpoint.close()

    def abort(self) -> None:
        """As asyncio's."""
        self._endpoint.abort()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Another BufferedProtocol takes over from the next byte."""
        self._endpoint.app = cast(asyncio.BufferedProtocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The protocol above."""
        return self._endpoint.app

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As asyncio's, in bytes of ciphertext."""
        self._lower.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """As asyncio's."""
        return self._lower.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Bytes of ciphertext not yet in the kernel."""
        return self._lower.get_write_buffer_size()
