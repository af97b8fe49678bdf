"""Real TLS handshakes over loopback, with certificates of the key tool (S10-S14)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from syncer.keys import create_all, create_learner, load_authority, write_private
from wire.errors import ErrorCode, ProtocolError
from wire.frames import FRAME_HEADER, MAGIC, Role
from wire.security import SecurityRefused
from wire.tls import (
    LearnerTlsFiles,
    PeerCertificate,
    SyncerTls,
    SyncerTlsFiles,
    TlsProblem,
    allowed_learner_ids,
    certificate_digest,
    check_identity,
    check_same_peer,
    learner_context,
    learner_files,
    looks_like_tls,
    syncer_context,
    syncer_files,
)
from wire.tls_stream import TlsDoor, TlsEndpoint, TlsFailure, connect

NOW = datetime.now(UTC)
LIMIT = 20


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """keys/: as the tool makes them; old/: the same CA, expired leaves; stranger/: another CA."""
    root = tmp_path_factory.mktemp("pki")
    create_all(root / "keys", 3, ["localhost", "127.0.0.1"], NOW)
    create_all(root / "stranger", 1, ["localhost", "127.0.0.1"], NOW)
    past = NOW - timedelta(days=400)
    create_learner(root / "keys", 77, past)
    authority = load_authority(root / "keys")
    names = [x509.DNSName("localhost")]
    cert, key = authority.issue("old", names, ExtendedKeyUsageOID.SERVER_AUTH, past)
    (root / "old").mkdir()
    write_private(root / "old", {"server.pem": cert, "server-key.pem": key})
    return root


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], scope="module")
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


class App(asyncio.BufferedProtocol):
    """Collects what arrives; `room` is the size of the buffers it offers."""

    def __init__(self, room: int = 100_000, keep: bool = False) -> None:
        self.room = room
        self.keep = keep
        self.data = bytearray()
        self.made = asyncio.Event()
        self.ended = asyncio.Event()
        self.eof = asyncio.Event()
        self.lost: Exception | None = None
        self.changed: Callable[[], None] = lambda: None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.made.set()

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(self.room)
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        self.changed()

    def eof_received(self) -> bool:
        self.eof.set()
        return self.keep

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc
        self.ended.set()

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    async def until(self, count: int) -> bytes:
        """The first `count` bytes."""
        ready = asyncio.Event()
        self.changed = lambda: len(self.data) >= count and ready.set()
        self.changed()
        async with asyncio.timeout(LIMIT):
            await ready.wait()
        return bytes(self.data[:count])


class Server:
    """One listening syncer whose accepted protocols and handshake failures can be awaited."""

    def __init__(self, door: TlsDoor, app: Callable[[], App]) -> None:
        self.door = door
        self.app = app
        self.apps: asyncio.Queue[App] = asyncio.Queue()
        self.failures: asyncio.Queue[TlsProblem] = asyncio.Queue()
        self.endpoints: list[TlsEndpoint] = []
        self.port = 0

    def accept(self) -> TlsEndpoint:
        app = self.app()
        endpoint = self.door.wrap(app, self.failures.put_nowait)
        endpoint.on_ready = lambda transport: self.apps.put_nowait(app)
        self.endpoints.append(endpoint)
        return endpoint

    async def next_app(self) -> App:
        async with asyncio.timeout(LIMIT):
            return await self.apps.get()

    async def next_failure(self) -> TlsProblem:
        async with asyncio.timeout(LIMIT):
            return await self.failures.get()


@contextlib.asynccontextmanager
async def listening(tls: SyncerTls, app: Callable[[], App] = App) -> AsyncIterator[Server]:
    server = Server(TlsDoor(Role.SYNCER, lambda: tls.context), app)
    listener = await asyncio.get_running_loop().create_server(server.accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for endpoint in server.endpoints:
            endpoint.abort()


def syncer(directory: Path, ca: Path | None = None) -> SyncerTls:
    files = SyncerTlsFiles(directory / "server.pem", directory / "server-key.pem", ca)
    return SyncerTls(files)


def learner(ca: Path, pair: Path | None = None, name: str = "localhost") -> TlsDoor:
    cert, key = (pair, pair.with_name(f"{pair.stem}-key.pem")) if pair else (None, None)
    context = learner_context(LearnerTlsFiles(ca, cert, key))
    return TlsDoor(Role.LEARNER, lambda: context, name)


async def dial(server: Server, door: TlsDoor, app: App | None = None) -> App:
    app = app or App()
    async with asyncio.timeout(LIMIT):
        await connect(door, app, "127.0.0.1", server.port)
    return app


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_both_sides_prove_themselves(pki: Path, name: str) -> None:
    """S10, S11, S12: TLS 1.3, no compression, no ticket, the certificate's learner id."""
    keys = pki / "keys"
    async with listening(syncer(keys, keys / "ca.pem")) as server:
        mine = await dial(server, learner(keys / "ca.pem", keys / "learner-2.pem", name))
        theirs = await server.next_app()
        session = mine.transport.get_extra_info("ssl_object")
        assert session.version() == "TLSv1.3"
        assert session.compression() is None
        peer = theirs.transport.get_extra_info("peer_certificate")
        der = x509.load_pem_x509_certificate((keys / "learner-2.pem").read_bytes())
        assert peer == PeerCertificate(
            certificate_digest(der.public_bytes(Encoding.DER)), frozenset({2})
        )
        assert theirs.transport.get_extra_info("peername")[0] == "127.0.0.1"
        mine.transport.write(b"ping")
        assert await theirs.until(4) == b"ping"
        theirs.transport.writelines([b"po", memoryview(b"ng")])
        assert await mine.until(4) == b"pong"
        assert session.session is None or not session.session.has_ticket
        mine.transport.close()
        async with asyncio.timeout(LIMIT):
            await theirs.ended.wait()
            await mine.ended.wait()
        assert theirs.eof.is_set()
        assert theirs.lost is None
        assert mine.lost is None


async def test_without_client_ca_no_certificate_is_asked_for(pki: Path) -> None:
    """S11."""
    keys = pki / "keys"
    async with listening(syncer(keys)) as server:
        await dial(server, learner(keys / "ca.pem", keys / "learner-2.pem"))
        theirs = await server.next_app()
        assert theirs.transport.get_extra_info("peer_certificate") is None


@pytest.mark.parametrize("room", [1, 7, 16_384, 5_000_000])
async def test_megabytes_both_ways_whatever_the_buffers(pki: Path, room: int) -> None:
    keys = pki / "keys"
    size = 3_000_001 if room > 7 else 60_001
    payload = bytes(range(251)) * (size // 251 + 1)
    async with listening(syncer(keys), lambda: App(room)) as server:
        mine = await dial(server, learner(keys / "ca.pem"), App(room))
        theirs = await server.next_app()
        mine.transport.writelines([b"head", memoryview(payload)[:size]])
        theirs.transport.write(payload[:size])
        assert await theirs.until(size + 4) == b"head" + payload[:size]
        assert await mine.until(size) == payload[:size]


async def test_paused_reading_holds_everything_back(pki: Path) -> None:
    """W48: a paused socket delivers nothing, and everything after resuming, in order."""
    keys = pki / "keys"
    payload = bytes(range(256)) * 8_000
    async with listening(syncer(keys), lambda: App(1000)) as server:
        mine = await dial(server, learner(keys / "ca.pem"))
        theirs = await server.next_app()

        def stop_once() -> None:
            theirs.transport.pause_reading()
            stopped.set()

        stopped = asyncio.Event()
        theirs.changed = stop_once
        mine.transport.write(payload)
        async with asyncio.timeout(LIMIT):
            await stopped.wait()
        assert len(theirs.data) == 1000
        assert not theirs.transport.is_reading()
        theirs.changed = lambda: None
        # A round trip on another connection: whatever was to be delivered would be there by then.
        other = await dial(server, learner(keys / "ca.pem"))
        other.transport.write(b"x")
        await (await server.next_app()).until(1)
        assert len(theirs.data) == 1000
        theirs.transport.resume_reading()
        assert await theirs.until(len(payload)) == payload


async def test_half_close_delivers_the_last_words(pki: Path) -> None:
    """W38: write_eof, then the other direction still works until its EOF."""
    keys = pki / "keys"
    async with listening(syncer(keys), lambda: App(keep=True)) as server:
        mine = await dial(server, learner(keys / "ca.pem"), App(keep=True))
        theirs = await server.next_app()
        assert theirs.transport.can_write_eof()
        theirs.transport.write(b"last words")
        theirs.transport.write_eof()
        async with asyncio.timeout(LIMIT):
            await mine.eof.wait()
        assert mine.data == b"last words"
        mine.transport.write(b"and the answer")
        assert await theirs.until(14) == b"and the answer"
        mine.transport.close()
        async with asyncio.timeout(LIMIT):
            await theirs.eof.wait()
        theirs.transport.close()
        async with asyncio.timeout(LIMIT):
            await theirs.ended.wait()


async def test_a_dropped_connection_is_no_fatal_failure(pki: Path) -> None:
    """W40: EOF and I/O errors let the learner redial."""
    keys = pki / "keys"
    async with listening(syncer(keys)) as server:
        mine = await dial(server, learner(keys / "ca.pem"))
        theirs = await server.next_app()
        theirs.transport.abort()
        async with asyncio.timeout(LIMIT):
            await mine.ended.wait()
        assert not isinstance(mine.lost, TlsFailure)


# Learners that refuse the syncer: known at once, fatal (S13).


@pytest.mark.parametrize(
    ("ca", "server_dir", "name", "words", "server_words"),
    [
        (
            "stranger",
            "keys",
            "localhost",
            "the syncer's certificate is signed by an unknown CA",
            "unknown CA",
        ),
        (
            "keys",
            "old",
            "localhost",
            "the syncer's certificate has expired",
            "our certificate has expired",
        ),
        ("keys", "keys", "other.example", "name mismatch", "does not accept our certificate"),
        ("keys", "keys", "10.9.8.7", "name mismatch", "does not accept our certificate"),
    ],
    ids=["unknown CA", "expired", "other name", "other address"],
)
async def test_learner_names_what_is_wrong_with_the_syncer(
    pki: Path, ca: str, server_dir: str, name: str, words: str, server_words: str
) -> None:
    async with listening(syncer(pki / server_dir)) as server:
        with pytest.raises(TlsFailure) as caught:
            await dial(server, learner(pki / ca / "ca.pem", name=name))
        assert words in caught.value.problem.reason
        assert caught.value.problem.fatal
        assert server_words in (await server.next_failure()).reason
        assert server.apps.empty()


# Syncers that refuse the learner: its side learns the reason by an alert (S11, S13).


@pytest.mark.parametrize(
    ("pair", "words", "server_words"),
    [
        (None, "the syncer requires a certificate; give --tls-cert", "showed no certificate"),
        (
            "stranger/learner-0.pem",
            "signed by an unknown CA",
            "the learner's certificate is signed by an unknown CA",
        ),
        (
            "keys/learner-77.pem",
            "our certificate has expired",
            "the learner's certificate has expired",
        ),
        ("keys/server.pem", "does not accept our certificate", "made for another purpose"),
    ],
    ids=["none", "unknown CA", "expired", "a server's"],
)
async def test_syncer_refuses_a_learner_that_learns_why(
    pki: Path, pair: str | None, words: str, server_words: str
) -> None:
    keys = pki / "keys"
    async with listening(syncer(keys, keys / "ca.pem")) as server:
        app = App()
        # Our side is done before the syncer has judged; a HELLO is on its way by then.
        await connect(learner(keys / "ca.pem", pair and pki / pair), app, "127.0.0.1", server.port)
        app.transport.write(b"HELLO" * 100_000)
        async with asyncio.timeout(LIMIT):
            await app.ended.wait()
        assert isinstance(app.lost, TlsFailure)
        assert words in app.lost.problem.reason
        assert app.lost.problem.fatal
        assert server_words in (await server.next_failure()).reason
        assert server.apps.empty()
        assert app.data == b""


async def test_older_tls_is_refused(pki: Path) -> None:
    """S10: 1.3 only."""
    keys = pki / "keys"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "ca.pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(syncer(keys)) as server:
        with pytest.raises(TlsFailure, match=r"does not speak TLS 1\.3"):
            await dial(server, TlsDoor(Role.LEARNER, lambda: context, "localhost"))
        assert "does not speak TLS 1.3" in (await server.next_failure()).reason


async def test_a_stock_client_is_served(pki: Path) -> None:
    """Interoperability: the other side may be Python's own TLS, strict, without a ticket."""
    keys = pki / "keys"
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(keys / "learner-1.pem", keys / "learner-1-key.pem")
    async with listening(syncer(keys, keys / "ca.pem")) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
        )
        theirs = await server.next_app()
        writer.write(b"ping")
        assert await theirs.until(4) == b"ping"
        theirs.transport.write(b"pong")
        assert await reader.readexactly(4) == b"pong"
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        theirs.transport.close()
        async with asyncio.timeout(LIMIT):
            assert await reader.read() == b""
        writer.close()


# Plain and TLS mixed up (S13).


async def test_plain_hello_to_a_tls_port(pki: Path) -> None:
    """The syncer says so in one line, and tells the learner in a plain ERROR frame."""
    async with listening(syncer(pki / "keys")) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(FRAME_HEADER.pack(MAGIC, 1, 4000) + bytes(4000))
        async with asyncio.timeout(LIMIT):
            answer = await reader.read()
        _, kind, length = FRAME_HEADER.unpack(answer[:13])
        assert kind == 10
        assert length == len(answer) - 13
        assert answer[13:].startswith(b"auth: this port speaks TLS")
        writer.close()
        assert "plain bytes" in (await server.next_failure()).reason


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.0\r\n\r\n", b"\0", bytes(70_000)])
async def test_garbage_to_a_tls_port_is_answered_with_eof(pki: Path, garbage: bytes) -> None:
    async with listening(syncer(pki / "keys")) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(garbage)
        async with asyncio.timeout(LIMIT):
            assert await reader.read() == b""
        writer.close()
        assert "plain bytes" in (await server.next_failure()).reason


async def test_an_endless_stranger_is_cut_off_after_the_linger_time(pki: Path) -> None:
    """The socket of a refused stranger is held for a second at most."""
    async with listening(syncer(pki / "keys")) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        begin = asyncio.get_running_loop().time()
        writer.write(b"x")
        assert await reader.read() == b""
        await server.next_failure()
        assert asyncio.get_running_loop().time() - begin < 5
        writer.close()


async def test_broken_handshakes_end_as_failures(pki: Path) -> None:
    """Silence and EOF, a record that lies, and an abort by the handshake timeout."""
    async with listening(syncer(pki / "keys")) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.close()
        assert "ended during the TLS handshake" in (await server.next_failure()).reason
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01" + struct.pack(">H", 40) + bytes(40))
        assert "TLS error" in (await server.next_failure()).reason
        writer.close()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        # The syncer is waiting for a ClientHello once this later connection has been accepted.
        await dial(server, learner(pki / "keys" / "ca.pem"))
        server.endpoints[2].abort()
        assert "ended during the TLS handshake" in (await server.next_failure()).reason
        writer.close()


async def test_tls_to_a_plain_port(pki: Path) -> None:
    """The learner says so, at once and for good; the syncer can tell from the first byte."""
    first = asyncio.get_running_loop().create_future()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first.set_result(await reader.read(100))
        writer.write(FRAME_HEADER.pack(MAGIC, 10, 3) + b"bad")
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(TlsFailure, match="does not speak TLS on this port") as caught:
        await connect(learner(pki / "keys" / "ca.pem"), App(), "127.0.0.1", port)
    assert caught.value.problem.fatal
    assert looks_like_tls(await first)
    assert not looks_like_tls(FRAME_HEADER.pack(MAGIC, 1, 1))
    assert not looks_like_tls(b"")
    listener.close()


# Reload (S14).


async def test_reload_serves_new_files_and_keeps_live_connections(
    pki: Path, tmp_path: Path
) -> None:
    create_all(tmp_path / "a", 1, ["localhost"], NOW)
    create_all(tmp_path / "b", 1, ["localhost"], NOW)
    live = tmp_path / "live"
    live.mkdir()

    def install(source: Path) -> None:
        for name in ("server.pem", "server-key.pem", "ca.pem"):
            target = live / name
            target.write_bytes((source / name).read_bytes())
            target.chmod(0o600)

    install(tmp_path / "a")
    tls = syncer(live, live / "ca.pem")
    doors = {n: learner(tmp_path / n / "ca.pem", tmp_path / n / "learner-0.pem") for n in "ab"}
    async with listening(tls) as server:
        old = await dial(server, doors["a"])
        old_peer = await server.next_app()
        install(tmp_path / "b")
        tls.reload()
        await dial(server, doors["b"])
        await server.next_app()
        with pytest.raises(TlsFailure, match="unknown CA"):
            await dial(server, doors["a"])
        old.transport.write(b"still here")
        assert await old_peer.until(10) == b"still here"
        (live / "server-key.pem").write_bytes(b"broken")
        with pytest.raises(SecurityRefused):
            tls.reload()
        await dial(server, doors["b"])


# Files and options.


def test_private_keys_must_be_private(pki: Path, tmp_path: Path) -> None:
    """S11."""
    keys = pki / "keys"
    for mode in (0o640, 0o604):
        exposed = tmp_path / f"{mode:o}.pem"
        exposed.write_bytes((keys / "server-key.pem").read_bytes())
        exposed.chmod(mode)
        with pytest.raises(SecurityRefused, match="open to group or others"):
            syncer_context(SyncerTlsFiles(keys / "server.pem", exposed))
        with pytest.raises(SecurityRefused, match="open to group or others"):
            learner_context(LearnerTlsFiles(keys / "ca.pem", keys / "server.pem", exposed))


def test_unusable_files_are_refused_in_one_line(pki: Path, tmp_path: Path) -> None:
    keys = pki / "keys"
    empty = tmp_path / "empty.pem"
    empty.touch(0o600)
    locked = tmp_path / "locked.pem"
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((keys / "server-key.pem").read_bytes(), None)
    locked.touch(0o600)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    cert, good, none = keys / "server.pem", keys / "server-key.pem", tmp_path / "none"
    for files, words in [
        (SyncerTlsFiles(none, good), "--tls-cert .* cannot be read: No such file"),
        (SyncerTlsFiles(cert, none), "--tls-key .* cannot be read: No such file"),
        (SyncerTlsFiles(empty, good), "not a certificate and its private key"),
        (SyncerTlsFiles(cert, empty), "not a certificate and its private key"),
        (SyncerTlsFiles(cert, keys / "learner-0-key.pem"), "key does not belong"),
        (SyncerTlsFiles(cert, locked), "encrypted"),
        (SyncerTlsFiles(cert, good, none), "--tls-client-ca .* cannot be read: No such file"),
        (SyncerTlsFiles(cert, good, empty), "--tls-client-ca .* holds no certificate"),
    ]:
        with pytest.raises(SecurityRefused, match=words) as caught:
            syncer_context(files)
        assert "\n" not in str(caught.value)
    with pytest.raises(SecurityRefused, match=r"--tls-ca .* holds no certificate"):
        learner_context(LearnerTlsFiles(empty))


def test_options_that_need_each_other(tmp_path: Path) -> None:
    """S11."""
    a, b, c = (tmp_path / name for name in "abc")
    assert syncer_files(None, None, None) is None
    assert syncer_files(a, b, None) == SyncerTlsFiles(a, b)
    assert learner_files(None, None, None) is None
    assert learner_files(a, b, c, "name") == LearnerTlsFiles(a, b, c)
    for args in [(a, None, None), (None, b, None), (None, None, c), (a, None, c)]:
        with pytest.raises(SecurityRefused):
            syncer_files(*args)
    for args in [(None, b, c), (a, b, None), (a, None, c), (None, None, None, "name")]:
        with pytest.raises(SecurityRefused):
            learner_files(*args)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(SecurityRefused, match="no name"):
        TlsDoor(Role.LEARNER, lambda: context, ".example")


# Who a certificate is (S12).


def issued(pki: Path, *names: x509.GeneralName) -> bytes:
    authority = load_authority(pki / "keys")
    pem, _ = authority.issue("x", names, ExtendedKeyUsageOID.CLIENT_AUTH, NOW)
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


URI = x509.UniformResourceIdentifier


@pytest.mark.parametrize(
    ("uris", "allowed"),
    [
        (["urn:yeto:learner:7"], {7}),
        (["urn:yeto:learner:0", "urn:yeto:learner:4294967295"], {0, 2**32 - 1}),
        (["https://example.com/urn:yeto:learner:7"], None),
        (["urn:yeto:learner:7", "https://example.com"], {7}),
        (["URN:Yeto:learner:7"], {7}),
        (["urn:yeto:learner:"], set()),
        (["urn:yeto:learner:seven"], set()),
        (["urn:yeto:learner:-7"], set()),
        (["urn:yeto:learner:+7"], set()),
        (["urn:yeto:learner:4294967296"], set()),
        (["urn:yeto:learner:" + "1" * 5000], set()),
        (["urn:yeto:learner:7 "], set()),
    ],
)
def test_learner_ids_of_a_certificate(pki: Path, uris: list[str], allowed: set[int] | None) -> None:
    """S12: no such URI means any id; a mistyped one means none."""
    assert allowed_learner_ids(issued(pki, *map(URI, uris))) == allowed


def test_a_certificate_without_san_may_use_any_id(pki: Path) -> None:
    ca = x509.load_pem_x509_certificate((pki / "keys" / "ca.pem").read_bytes())
    assert allowed_learner_ids(ca.public_bytes(Encoding.DER)) is None


def test_unreadable_certificate_is_an_auth_error() -> None:
    with pytest.raises(ProtocolError) as caught:
        allowed_learner_ids(b"\x30\x00")
    assert caught.value.code is ErrorCode.AUTH


def test_identity_rules() -> None:
    """S12, both frames."""
    bound = PeerCertificate(b"a" * 32, frozenset({1, 2}))
    free = PeerCertificate(b"b" * 32, None)
    for peer, learner_id in [(None, 9), (free, 9), (bound, 1), (bound, 2)]:
        check_identity(peer, learner_id)
    for peer in (bound, PeerCertificate(b"c" * 32, frozenset())):
        with pytest.raises(ProtocolError, match=r"^auth: .*learner id 3"):
            check_identity(peer, 3)
    for peer in (None, free, bound):
        check_same_peer(peer, peer)
    for one, other in [(None, free), (free, None), (free, bound)]:
        with pytest.raises(ProtocolError, match=r"^auth: "):
            check_same_peer(one, other)
