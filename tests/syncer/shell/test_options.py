"""Options of yeto-syncer: ranges, cross checks, profile (cli.md section 1, W22, W23, C70)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from syncer.options import worker_timeouts

from .parsing import parse, program


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(program, arguments, obj=[])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_the_two_options_of_the_readme_suffice() -> None:
    options = parse("--quorum", "3", "--checkpoint-every", "1")
    assert (options.learners, options.port, options.host) == (256, 29400, "127.0.0.1")
    assert options.checkpoint_path == "yeto-state.ckpt"
    assert options.total_steps is None
    assert options.final_ack_timeout_s == 900
    assert options.warnings == ()


def test_profile_of_the_specified_command_line() -> None:
    """W22: the example of the specification."""
    digest = parse("--quorum", "3", "--checkpoint-every", "1").profile.digest()
    assert digest.hex() == "a6985851b16f2e28625eecd989ddcd37509fb630459aa6c4f1210961beb8aa0d"


def test_learners_default_grows_with_the_quorum() -> None:
    assert parse("--quorum", "300").learners == 300
    assert parse("--quorum", "300", "--learners", "1000").learners == 1000


PROFILE_OPTIONS = [
    ("--learners", "300"),
    ("--quorum", "3"),
    ("--grace-ms", "1001"),
    ("--grace-gamma", "0.5"),
    ("--grace-tau", "3"),
    ("--pipeline", "3"),
    ("--min-round-interval-ms", "1"),
    ("--sync-interval-steps", "0"),
    ("--delta-correction", "none"),
    ("--quorum-timeout-s", "901"),
    ("--final-ack-timeout-s", "901"),
    ("--total-steps", "5"),
    ("--outer-lr", "0.5"),
    ("--outer-momentum", "0"),
    ("--outer-lr-by-fragment", "0.7"),
    ("--learner-weight", "equal"),
    ("--max-base-lag", "0"),
    ("--iso-backend", "torch-svd"),
    ("--iso-rank-cutoff", "0"),
    ("--checkpoint-every", "0"),
    ("--resume",),
    ("--mark-final-checkpoint",),
    ("--require-profile-binding",),
]


def test_every_profile_option_changes_the_hash_and_no_other_does() -> None:
    """W22, W23: the options marked P in cli.md."""
    default = parse().profile.digest()
    digests = {parse(*option).profile.digest() for option in PROFILE_OPTIONS}
    assert len(digests) == len(PROFILE_OPTIONS)
    assert default not in digests
    same = parse(
        *("--host", "::1", "--port", "0", "--event-tape", "t", "--checkpoint-path", "x"),
        *("--stall-timeout-s", "1", "--heartbeat-timeout-s", "1", "--handshake-timeout-s", "1"),
        *("--max-connections", "9", "--ready-file", "r", "--final-state", "f"),
        *("--iso-worker-devices", "a,b", "--iso-worker-queue-capacity", "1"),
    )
    assert same.profile.digest() == default


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--port", ["-1", "65536", "1.5", "x", "nan"]),
        ("--learners", ["0", str(2**32), "-1"]),
        ("--quorum", ["0", str(2**32), "1e3"]),
        ("--grace-ms", ["-1", "31536000001", "0.5"]),
        ("--grace-gamma", ["-0.1", "1.1", "nan", "inf"]),
        ("--grace-tau", ["-1", "inf", "nan", "-inf"]),
        ("--pipeline", ["0", "-2", str(2**32)]),
        ("--min-round-interval-ms", ["-1"]),
        ("--sync-interval-steps", ["-1", "nan", "inf"]),
        ("--delta-correction", ["HELOCO", "x"]),
        ("--quorum-timeout-s", ["0", "31536001", "1.5"]),
        ("--final-ack-timeout-s", ["0", "31536001"]),
        ("--total-steps", ["0", str(2**63)]),
        ("--outer-lr", ["0", "-1", "nan", "inf", "1e+39", "1e-50"]),
        ("--outer-momentum", ["1", "-0.1", "nan", "0.99999999999"]),
        ("--outer-lr-by-fragment", ["", "0.7,0", "0.7,,0.7", "0.7,nan"]),
        ("--learner-weight", ["tokens"]),
        ("--max-base-lag", ["-1", str(2**64)]),
        ("--iso-backend", ["svd"]),
        ("--iso-rank-cutoff", ["1", "-0.1", "nan"]),
        ("--iso-worker-devices", ["", "cpu,cpu"]),
        ("--iso-worker-queue-capacity", ["0"]),
        ("--checkpoint-path", [""]),
        ("--checkpoint-every", ["-1", str(2**64)]),
        ("--learner-budget-steps", ["0", str(2**32)]),
        ("--handshake-timeout-s", ["0", "-1", "nan", "31536001"]),
        ("--heartbeat-timeout-s", ["0"]),
        ("--stall-timeout-s", ["0"]),
        ("--max-connections", ["0"]),
        ("--log-level", ["trace"]),
        ("--log-format", ["xml"]),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(flag: str, values: list[str]) -> None:
    for value in values:
        message = refusal(f"{flag}={value}")
        assert flag in message
        assert value.split(",")[-1][:40] in message


def test_quorum_above_learners_names_both() -> None:
    message = refusal("--learners", "2", "--quorum", "3")
    assert "--quorum" in message
    assert "from 1 to 2" in message


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ((), "--learners"),
        (("--learners", "2", "--resume"), "--resume"),
        (("--learners", "2", "--mark-final-checkpoint"), "--mark-final-checkpoint"),
    ],
)
def test_budget_mode_needs_ids_and_excludes_resume_and_marker(
    arguments: tuple[str, ...], culprit: str
) -> None:
    """C70."""
    message = refusal("--learner-budget-steps", "10", *arguments)
    assert "--learner-budget-steps" in message
    assert culprit in message


def test_budget_mode_accepts_learners_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("learners = 2\n[syncer]\nlearner-budget-steps = 8\n")
    assert parse("--config", str(file)).learner_budget_steps == 8


@pytest.mark.parametrize("flag", ["--final-state", "--event-tape", "--ready-file", "--config"])
@pytest.mark.parametrize(
    "suffix", ["", ".tmp", ".prev", ".sums", ".sums.tmp", ".final", ".final.tmp", ".lock"]
)
def test_no_file_may_have_a_name_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if flag == "--config":
        (tmp_path / f"state{suffix}").write_text("")
    message = refusal("--checkpoint-path", "state", flag, str(tmp_path / f"state{suffix}"))
    assert flag in message
    assert "--checkpoint-path" in message


def test_collisions_are_seen_through_links_and_among_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(tmp_path, tmp_path / "here")
    os.symlink("state.tmp", tmp_path / "innocent")
    base = ("--checkpoint-path", "state")
    assert "collides" in refusal(*base, "--event-tape", "here/state.sums")
    assert "collides" in refusal(*base, "--event-tape", "innocent")
    assert "collides" in refusal(*base, "--event-tape", "x", "--ready-file", "./x")
    assert "collides" in refusal(*base, "--event-tape", "x.tmp", "--final-state", "x")
    parse(*base, "--event-tape", "state.tape", "--ready-file", "ready", "--final-state", "final")


def test_options_without_effect_are_named() -> None:
    warnings = parse("--iso-worker-devices", "cpu", "--iso-worker-python", "/bin/py").warnings
    assert [text.split()[0] for text in warnings] == ["--iso-worker-python", "--iso-worker-devices"]
    assert parse("--iso-backend", "torch-svd", "--iso-worker-devices", "cpu").warnings == ()
    (text,) = parse("--outer-lr", "1", "--outer-lr-by-fragment", "1").warnings
    assert text.startswith("--outer-lr ")


def test_every_option_can_be_set_in_the_file(tmp_path: Path) -> None:
    """cli.md, Common: keys are the long names; a flag wins."""
    file = tmp_path / "run.toml"
    file.write_text(
        'quorum = 2\n[syncer]\nhost = "::1"\nouter-lr-by-fragment = [0.5, 1]\nresume = true\n'
        'grace_tau = 3\niso-worker-devices = ["cpu", "cuda:0"]\nlog-level = "debug"\n'
    )
    options = parse("--config", str(file), "--quorum", "4")
    assert options.quorum == 4
    assert options.outer_lr_by_fragment == (0.5, 1.0)
    assert options.resume
    assert options.grace_tau == 3.0
    assert options.iso_worker_devices == ("cpu", "cuda:0")
    assert options.log_level == "debug"


def test_worker_timeouts_come_from_the_environment() -> None:
    """N31."""
    assert dataclasses.astuple(worker_timeouts({})) == (300, 3540, 3600)
    set_one = worker_timeouts({"YETO_ISO_WORKER_DRAIN_TIMEOUT_S": "7"})
    assert dataclasses.astuple(set_one) == (300, 3540, 7)
    for text in ("0", "-1", "1.5", "", "x", "9" * 30, "٣"):
        with pytest.raises(click.UsageError, match="YETO_ISO_WORKER_REQUEST_TIMEOUT_S"):
            worker_timeouts({"YETO_ISO_WORKER_REQUEST_TIMEOUT_S": text})


def test_parsing_options_does_not_load_torch() -> None:
    code = "import sys, syncer.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
