"""Keys, certificates and addresses of real processes (security.md)."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.system.client import Client, Syncer, drive, frame
from tests.system.security import (
    Certificates,
    SafeClient,
    key_file,
    key_of,
    private,
    refusal_of,
)
from tests.system.zygote import zygote
from wire.messages import Broadcast, DataHello, ErrorMessage, encode_frame
from wire.security import AuthKey

Start = Callable[..., Syncer]
INIT = [np.arange(6, dtype=np.float32), np.full(4, -1.0, np.float32)]
WAIT = 60.0
TINY = (
    *("--layers=1", "--width=16", "--heads=2", "--seq-len=16", "--batch-size=1"),
    *("--fragments=2", "--eval-every-steps=1000000", "--log-format=text"),
)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "keys")


class Learner:
    """A real `yeto-learner` process."""

    def __init__(
        self, directory: Path, connect: str, *flags: str, environment: dict[str, str] | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        text = directory / "text.txt"
        text.write_text("some text to train on, again and again. " * 200)
        self._stderr = directory / "learner-stderr.txt"
        self.pid = zygote().start(
            [f"--connect={connect}", f"--data={text}", *TINY, *flags],
            directory,
            directory / "learner-stdout.txt",
            self._stderr,
            program="yeto-learner",
            environment=environment,
        )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait(self) -> int:
        """The exit code."""
        end = time.monotonic() + WAIT
        while (code := zygote().poll(self.pid)) is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                pytest.fail(f"the learner still runs: {self.stderr}")
            time.sleep(0.01)
        return code


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str


def command(directory: Path, *arguments: str) -> Ended:
    """`yeto-syncer` to its end."""
    outputs = directory / "out.txt", directory / "err.txt"
    pid = zygote().start(arguments, directory, *outputs)
    end = time.monotonic() + WAIT
    while (code := zygote().poll(pid)) is None:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    result = Ended(code, *(path.read_text() for path in outputs))
    for path in outputs:
        path.unlink()
    return result


def served(client: Client) -> None:
    """The run goes on for this learner: the next round is merged (W13, W37)."""
    version = client.versions[0]
    drive([client], until=lambda: client.versions[0] > version)


def first(syncer: Syncer, **options: object) -> SafeClient:
    """Learner 0, with a model."""
    client = SafeClient(syncer.port, 0, **options)  # type: ignore[arg-type]
    client.init(INIT)
    client.expect(Broadcast)
    return client


# -- the shared key ------------------------------------------------------------------------------


def test_only_the_right_key_opens(syncer: Start, tmp_path: Path) -> None:
    """S2: `auth` on the socket of a wrong or missing seal; nobody else is disturbed."""
    path = key_file(tmp_path)
    running = syncer("--auth-key-file", str(path))
    honest = first(running, key=key_of(path), streams=1)
    for key in (AuthKey(b"\x5b" * 32), None):
        text = refusal_of(lambda key=key: SafeClient(running.port, 1, key=key))
        assert text.split(":")[0] == "auth", text
        served(honest)
    assert path.read_text().strip() not in running.stderr
    honest.close()


def test_the_seal_is_verified_before_anything_else(syncer: Start, tmp_path: Path) -> None:
    """W12 step 0: a HELLO of another version, too short or garbled is `auth` without its seal."""
    running = syncer("--auth-key-file", str(key_file(tmp_path)))
    for payload in (b"\x03\x00" + bytes(100), b"\x01", os.urandom(40)):
        with socket.create_connection(("127.0.0.1", running.port), timeout=5) as sock:
            sock.sendall(frame(1, payload))
            assert sock.recv(4096)[13:].startswith(b"auth: ")


def test_a_syncer_without_key_says_so(syncer: Start, tmp_path: Path) -> None:
    """S2."""
    running = syncer()
    text = refusal_of(lambda: SafeClient(running.port, 1, key=AuthKey(b"k" * 32)))
    assert text.split(":")[0] in ("hello-tail", "num-streams", "profile-mismatch")
    if text.split(":")[0] != "profile-mismatch":  # a mac that ends in a small number
        assert "no key" in text


def test_any_of_several_keys_opens_and_the_environment_names_one(tmp_path: Path) -> None:
    """S5: for rotation."""
    old, new = key_file(tmp_path, "old", 1), key_file(tmp_path, "new", 2)
    with Syncer(tmp_path, "--auth-key-file", str(new), f"--auth-key-file={old}") as running:
        clients = [SafeClient(running.port, i, key=key_of(p)) for i, p in enumerate((old, new))]
        clients[0].init(INIT)
        for client in clients:
            client.expect(Broadcast)
            client.close()
    config = private(tmp_path / "syncer.toml", f'auth-key-file = "{new}"'.encode())
    with Syncer(tmp_path, "--config", str(config), "--checkpoint-path=other") as running:
        first(running, key=key_of(new)).close()
        assert refusal_of(lambda: SafeClient(running.port, 1, key=key_of(old)))[:5] == "auth:"


@pytest.mark.parametrize("closed", [True, False])
def test_a_repeated_hello_of_a_dead_group(syncer: Start, tmp_path: Path, closed: bool) -> None:
    """S4: a replay where strangers cannot enter; a legal redial where they can (W12 step 14)."""
    path = key_file(tmp_path)
    running = syncer(*(("--auth-key-file", str(path)) if closed else ()))
    key = key_of(path) if closed else None
    honest = first(running, key=key)
    gone = SafeClient(running.port, 1, key=key)
    gone.expect(Broadcast)
    recorded = gone.hello_frame
    current = SafeClient(running.port, 1, key=key)
    current.expect(Broadcast)
    gone.close()
    served_both = lambda: drive(  # noqa: E731
        [honest, current], until=lambda v=honest.versions[0]: honest.versions[0] > v
    )
    served_both()
    again = Client(running.port, 1, hello=False)
    again.send_raw(recorded)
    if closed:
        assert again.until_end().split(":")[0] == "duplicate-generation"
        served_both()
        assert current.ended is None
    else:
        again.expect(Broadcast)
    for client in (again, current, honest):
        client.close()


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0o600, "cannot be read"),
        (b"5a" * 31, 0o600, "31 bytes"),
        (b"no hex digits at all, but a long line of text, as anyone can see", 0o600, "hex"),
        (b"5a" * 32, 0o640, "chmod 600"),
    ],
)
def test_a_bad_key_file_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, reason: str
) -> None:
    """S5: exit 2, one line, and the key is not in it."""
    path = tmp_path / "auth.key"
    if content is not None:
        private(path, content).chmod(mode)
    ended = command(tmp_path, "--port=0", f"--auth-key-file={path}")
    assert ended.code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert reason in ended.stderr
    assert content is None or content.decode() not in ended.stderr
    assert not (tmp_path / "yeto-state.ckpt.lock").exists()


# -- TLS -----------------------------------------------------------------------------------------


def test_certificates_let_in_and_keep_out(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """S11 to S13: every refusal, and the honest learner trains on."""
    running = syncer(*certificates.syncer_flags())
    mine = certificates.context(certificates.learner(0))
    honest = first(running, tls=mine, streams=2)
    foreign = Certificates(tmp_path / "foreign")
    long_ago = datetime.now(UTC) - timedelta(days=800)

    def tls(files: tuple[Path, Path] | None) -> str:
        context = certificates.context(files)
        return refusal_of(lambda: SafeClient(running.port, 1, tls=context))

    assert "CERTIFICATE_REQUIRED" in tls(None)
    assert "UNKNOWN_CA" in tls(foreign.learner(1))
    assert "EXPIRED" in tls(certificates.learner(1, long_ago, "expired"))
    assert tls(certificates.learner(2)).startswith("auth: this certificate may not use")
    assert refusal_of(lambda: Client(running.port, 1)).startswith("auth: this port speaks TLS")
    served(honest)

    said = running.stderr
    for reason in ("no certificate", "unknown CA", "expired", "plain bytes"):
        assert reason in said, reason
    honest.close()


def test_a_data_socket_shows_the_certificate_of_its_group(
    syncer: Start, certificates: Certificates
) -> None:
    """S12: a known generation is not enough to take a data socket."""
    running = syncer(*certificates.syncer_flags())
    honest = first(running, tls=certificates.context(certificates.learner(0)))
    for shown, problem in (
        (certificates.learner(1), "this certificate may not use learner id 0"),
        (certificates.learner(0, name="another-0"), "the data socket shows another certificate"),
    ):
        thief = SafeClient(running.port, 0, tls=certificates.context(shown), hello=False)
        thief.send(DataHello(0, honest.generation, 0))
        assert thief.until_end().startswith(f"auth: {problem}")
        thief.close()
    served(honest)
    honest.close()


def test_a_key_closes_a_tls_port_without_client_ca(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """Both means together: the seal inside TLS."""
    cert, private_key = certificates.server()
    path = key_file(tmp_path)
    running = syncer(
        *("--tls-cert", str(cert), "--tls-key", str(private_key), "--auth-key-file", str(path))
    )
    context = certificates.context(None)
    honest = first(running, key=key_of(path), tls=context)
    assert refusal_of(lambda: SafeClient(running.port, 1, tls=context))[:5] == "auth:"
    served(honest)
    honest.close()


def test_sighup_reads_certificates_again(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """S14: for connections to come; a broken file changes nothing; live groups stay."""
    running = syncer(*certificates.syncer_flags())
    honest = first(running, tls=certificates.context(certificates.learner(0)))
    private(tmp_path / "keys" / "server.pem", b"not a certificate")
    running.signal(signal.SIGHUP)
    until(lambda: "certificates stay as they were" in running.stderr)
    third = certificates.context(certificates.learner(3))
    SafeClient(running.port, 3, tls=third).expect(Broadcast)

    other = Certificates(tmp_path / "other")
    for made, name in zip(other.server(), ("server.pem", "server-key.pem"), strict=True):
        private(tmp_path / "keys" / name, made.read_bytes())
    running.signal(signal.SIGHUP)
    until(lambda: "certificates were read again" in running.stderr)
    with pytest.raises(ssl.SSLCertVerificationError):
        SafeClient(running.port, 1, tls=honest.tls)
    mixed = other.context(certificates.learner(1))
    newcomer = SafeClient(running.port, 1, tls=mixed)
    newcomer.expect(Broadcast)
    newcomer.close()
    served(honest)
    honest.close()


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_tls_to_a_plain_port_is_told_from_the_first_byte(syncer: Start) -> None:
    """S13: one clear line on the side that can tell."""
    running = syncer()
    context = ssl.create_default_context()
    with (
        socket.create_connection(("127.0.0.1", running.port), timeout=5) as sock,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(sock, server_hostname="127.0.0.1")
    until(lambda: "which is plain" in running.stderr)
    assert running.stderr.count("which is plain") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tls-cert=server.pem"], "--tls-key"),
        (["--tls-client-ca=ca.pem"], "--tls-cert"),
        (["--tls-cert=missing.pem", "--tls-key=server-key.pem"], "missing.pem"),
        (["--tls-cert=ca.pem", "--tls-key=server-key.pem"], "does not belong"),
        (["--tls-cert=server.pem", "--tls-key=open.pem"], "chmod 600"),
        (
            ["--tls-cert=server.pem", "--tls-key=server-key.pem", "--tls-client-ca=auth.key"],
            "holds no certificate",
        ),
    ],
)
def test_bad_tls_files_are_refused(
    certificates: Certificates, flags: list[str], reason: str
) -> None:
    """S11: exit 2 and one line."""
    folder = certificates.directory
    certificates.server()
    key_file(folder)
    private(folder / "open.pem", (folder / "server-key.pem").read_bytes()).chmod(0o644)
    ended = command(folder, "--port=0", *flags)
    assert ended.code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert reason in ended.stderr


# -- addresses -----------------------------------------------------------------------------------


def test_a_foreign_address_needs_protection(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """S20: the message names the three ways out, and each of them is one."""
    cert, private_key = certificates.server()
    tls = ("--tls-cert", str(cert), "--tls-key", str(private_key))
    for flags in ((), tls):  # TLS without client CA keeps nobody out
        ended = command(tmp_path, "--port=0", "--host=0.0.0.0", *flags)
        assert ended.code == 2
        assert len(ended.stderr.splitlines()) == 1
        for way in ("--auth-key-file", "--tls-client-ca", "--insecure"):
            assert way in ended.stderr
    for flags in (
        ("--auth-key-file", str(key_file(tmp_path))),
        (*tls, "--tls-client-ca", str(certificates.ca)),
        ("--insecure",),
    ):
        running = syncer("--host=0.0.0.0", *flags)
        assert ("may join" in running.stderr) == (flags == ("--insecure",))
        running.signal()
        assert running.wait() == 0


def test_the_learner_keeps_its_model_from_strangers(tmp_path: Path) -> None:
    """S21: exit 2 before anything is built, and the ways out."""
    learner = Learner(tmp_path, "192.0.2.1:29400", "--output-dir=out")
    assert learner.wait() == 2
    for way in ("--auth-key-file", "--tls-ca", "--insecure"):
        assert way in learner.stderr
    assert not (tmp_path / "out").exists()


# -- learners ------------------------------------------------------------------------------------


def test_a_run_with_the_files_of_keys_init(tmp_path: Path) -> None:
    """S30, S12, S2: `keys init`, then real learners over TLS with a seal, to the final cut."""
    ended = command(tmp_path, "keys", "init", "keys", "--learners=2", "--host=127.0.0.1")
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    keys = tmp_path / "keys"
    assert "urn:yeto:learner:1" in command(tmp_path, "keys", "show", "keys").stdout
    with Syncer(
        tmp_path,
        *("--quorum=2", "--total-steps=4", "--checkpoint-every=0", "--tls-cert=keys/server.pem"),
        *("--tls-key=keys/server-key.pem", "--tls-client-ca=keys/ca.pem"),
        "--auth-key-file=keys/auth.key",
    ) as running:
        learners = []
        for number in range(2):
            config = tmp_path / f"{number}.toml"
            config.write_text(
                f'[learner]\ntls_ca = "{keys}/ca.pem"\ntls-key = "{keys}/learner-{number}-key.pem"\n'
                f'tls-cert = "{keys}/learner-{number}.pem"\nlearner-id = {number}\n'
            )
            learners.append(
                Learner(
                    tmp_path / str(number),
                    f"127.0.0.1:{running.port}",
                    *(f"--config={config}", "--output-dir=out"),
                    environment={"YETO_AUTH_KEY_FILE": str(keys / "auth.key")},
                )
            )
        assert [learner.wait() for learner in learners] == [0, 0], learners[0].stderr
        assert running.wait(WAIT) == 0
    models = [load_file(tmp_path / str(n) / "out" / "model.safetensors") for n in range(2)]
    assert all((models[0][name] == models[1][name]).all() for name in models[0])


def test_a_learner_that_is_not_let_in_ends_at_once(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """S2, S13: exit 1 with the reason, no redial."""
    wrong = key_file(tmp_path, "wrong", 7)
    sealed = syncer("--auth-key-file", str(key_file(tmp_path)))
    host = f"127.0.0.1:{sealed.port}"
    learners = {
        "no key": (Learner(tmp_path / "a", host), "auth: "),
        "wrong key": (Learner(tmp_path / "b", host, f"--auth-key-file={wrong}"), "auth: "),
        "TLS to a plain port": (
            Learner(tmp_path / "c", host, f"--tls-ca={certificates.ca}"),
            "does not speak TLS",
        ),
    }
    for case, (learner, reason) in learners.items():
        assert learner.wait() == 1, case
        assert reason in learner.stderr, case
        assert "lost" not in learner.stderr, case


def test_certificate_errors_end_the_learner_with_their_reason(
    syncer: Start, certificates: Certificates, tmp_path: Path
) -> None:
    """S13: on either side's certificate; never a redial."""
    running = syncer(*certificates.syncer_flags())
    host = f"127.0.0.1:{running.port}"
    foreign = Certificates(tmp_path / "foreign")
    long_ago = datetime.now(UTC) - timedelta(days=800)

    def flags(ca: Certificates, files: tuple[Path, Path] | None, *more: str) -> tuple[str, ...]:
        own = () if files is None else (f"--tls-cert={files[0]}", f"--tls-key={files[1]}")
        return f"--tls-ca={ca.ca}", *own, *more

    mine = certificates.learner(0)
    cases = [
        ("unknown CA", flags(foreign, mine)),
        ("requires a certificate", flags(certificates, None)),
        ("expired", flags(certificates, certificates.learner(0, long_ago, "expired"))),
        ("name mismatch", flags(certificates, mine, "--tls-server-name=elsewhere.example")),
        ("may not use learner id 0", flags(certificates, certificates.learner(5))),
        ("speaks TLS", ()),
    ]
    learners = [
        (reason, Learner(tmp_path / str(number), host, *given))
        for number, (reason, given) in enumerate(cases)
    ]
    for reason, learner in learners:
        assert learner.wait() == 1, reason
        assert reason in learner.stderr
        assert "lost" not in learner.stderr


class Hostile:
    """A server that answers every connection with an ERROR of its choice."""

    def __init__(self, text: str) -> None:
        self._answer = encode_frame(ErrorMessage(text))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sockets: list[socket.socket] = []  # open, or a reset would swallow the text
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.sockets.append(sock)
            sock.sendall(self._answer)
            sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self.sockets):
            sock.close()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    server = Hostile("auth: \x1b[2J\x07owned\r\n12:00:00 \u202egnp.\x9b31m\x00" + "x" * 60_000)
    yield server
    server.close()


def test_what_a_hostile_syncer_says_is_never_raw(hostile: Hostile, tmp_path: Path) -> None:
    """W41: control characters of an ERROR reach neither terminal nor log."""
    learner = Learner(tmp_path, f"127.0.0.1:{hostile.port}", "--streams=0")
    assert learner.wait() == 1
    said = learner.stderr
    assert r"\x1b[2J\x07owned\r\n12:00:00 \u202egnp." in said
    assert re.search("[^ -~\n]", said) is None
    assert len(said) < 4096
    assert len(hostile.sockets) == 1
