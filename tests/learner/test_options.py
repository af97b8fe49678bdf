"""The command line of `yeto-learner` (cli.md section 2)."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result

from learner.options import Options, learner_options, read_options


@click.command()
@learner_options
def program(**values: object) -> None:
    SEEN.append(read_options(values))


SEEN: list[Options] = []


@pytest.fixture(autouse=True)
def no_ids_from_outside(monkeypatch):
    for name in ("YETO_LEARNER_ID", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, arguments)


def options(*arguments: str, connect: str = "127.0.0.1:29400") -> Options:
    result = run("--connect", connect, *arguments)
    assert result.exit_code == 0, result.output
    return SEEN.pop()


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_defaults_are_those_of_the_table() -> None:
    got = options()
    config, settings = got.config, got.settings
    assert (config.learner_id, config.fragments, config.fragment_pattern) == (0, 8, "binpack")
    assert (config.matrix_merge, config.alpha, config.wire_dtype) == ("rda", 0.5, "bf16")
    assert (config.streams, config.error_feedback) == (4, True)
    assert (config.run_id, config.profile, config.max_local_steps) == (None, None, None)
    assert (config.learner_budget_steps, config.state_every_steps) == (None, 100)
    assert (config.output_dir, config.state_dir) == (None, None)
    assert config.connect_timeout_s == 900
    assert (settings.seed, settings.seq_len, settings.batch_size) == (0, 256, 8)
    assert settings.lr == 3e-4
    assert (got.task, settings.data) == ("bytes-lm", None)
    assert (got.log_level, got.log_format) == ("info", "text")


def test_every_value_arrives(tmp_path) -> None:
    got = options(
        "--learner-id=4294967295", "--fragments=3", "--fragment-pattern=strided",
        "--matrix-merge=iso", "--merge-alpha=0", "--wire-dtype=q4", "--streams=0",
        "--error-feedback=off", "--run-id=exp-7", f"--profile={'aB' * 32}",
        "--max-local-steps=9", "--seed=9223372036854775807", "--seq-len=16", "--batch-size=2",
        "--lr=1e-2", f"--data={tmp_path}", f"--output-dir={tmp_path}/o",
        f"--state-dir={tmp_path}/s", "--state-every-steps=7", "--connect-timeout-s=0.5",
    )  # fmt: skip
    config = got.config
    assert (config.learner_id, config.fragments, config.fragment_pattern) == (
        2**32 - 1, 3, "strided",
    )  # fmt: skip
    assert (config.matrix_merge, config.alpha, config.wire_dtype) == ("iso", 0.0, "q4")
    assert (config.streams, config.error_feedback, config.run_id) == (0, False, "exp-7")
    assert config.profile_hash == bytes.fromhex("ab" * 32)
    assert (config.max_local_steps, config.state_every_steps) == (9, 7)
    assert config.connect_timeout_s == 0.5
    assert got.settings.seed == 2**63 - 1
    assert got.settings.learner_id == 2**32 - 1
    assert (str(config.output_dir), str(config.state_dir)) == (f"{tmp_path}/o", f"{tmp_path}/s")


@pytest.mark.parametrize(
    ("flag", "value", "legal"),
    [
        ("--learner-id", "-1", "0 to 4294967295"),
        ("--learner-id", "4294967296", "0 to 4294967295"),
        ("--fragments", "0", ">= 1"),
        ("--fragment-pattern", "random", "'binpack', 'strided'"),
        ("--matrix-merge", "avg", "'rda', 'iso'"),
        ("--merge-alpha", "1", "< 1"),
        ("--merge-alpha", "-0.01", ">= 0"),
        ("--merge-alpha", "nan", "finite"),
        ("--wire-dtype", "fp8", "'f32', 'bf16', 'q4'"),
        ("--streams", "257", "0 to 256"),
        ("--streams", "-1", "0 to 256"),
        ("--error-feedback", "yes", "'on', 'off'"),
        ("--run-id", "", "1 to 1024 bytes"),
        ("--run-id", "é" * 513, "1 to 1024 bytes"),
        ("--profile", "ab" * 31, "64 hexadecimal"),
        ("--profile", "xy" * 32, "64 hexadecimal"),
        ("--max-local-steps", "0", ">= 1"),
        ("--learner-budget-steps", "0", "1 to 4294967295"),
        ("--learner-budget-steps", "4294967296", "1 to 4294967295"),
        ("--sync-every", "0", ">= 1"),
        ("--seed", "-1", "0 to 9223372036854775807"),
        ("--seed", "9223372036854775808", "0 to 9223372036854775807"),
        ("--seq-len", "0", ">= 1"),
        ("--batch-size", "0", ">= 1"),
        ("--lr", "0", "> 0"),
        ("--lr", "inf", "finite"),
        ("--task", "chess", "bytes-lm"),
        ("--state-every-steps", "0", ">= 1"),
        ("--connect-timeout-s", "0", "> 0"),
        ("--connect-timeout-s", "31536001", "<= 31536000"),
        ("--log-level", "loud", "'debug'"),
        ("--log-format", "xml", "'text', 'json'"),
    ],
)
def test_a_bad_value_names_flag_value_and_range(flag: str, value: str, legal: str) -> None:
    text = refusal("--connect=127.0.0.1:29400", f"{flag}={value}")
    assert flag in text
    assert value[:40] in text
    assert legal in text


def test_blocking_mode_goes_on_from_the_merged_values() -> None:
    """Classic DiLoCo unless a share is asked for; without it the default of the table."""
    assert (options().config.sync_every, options().config.alpha) == (None, 0.5)
    config = options("--sync-every=5").config
    assert (config.sync_every, config.alpha) == (5, 0.0)
    assert options("--sync-every=5", "--merge-alpha=0.25").config.alpha == 0.25
    text = refusal("--connect=h:1", "--sync-every=5", "--learner-budget-steps=5")
    assert "sync_every cannot be combined with learner_budget_steps" in text


@pytest.mark.parametrize(
    "address",
    ["localhost", "host:", ":29400", "host:0", "host:65536", "host:1x", "[::1]", "[::1:5", "None"],
)
def test_a_bad_address_is_refused(address: str) -> None:
    text = refusal("--connect", address)
    assert "--connect" in text
    assert address in text
    assert "HOST:PORT" in text


def test_addresses_split_at_the_last_colon() -> None:
    assert options(connect="[::1]:29400").config.address.host == "::1"
    assert options(connect="node-3:1").config.address.port == 1
    assert options(connect="none").config.address is None


def test_the_address_is_required() -> None:
    assert "--connect" in refusal()


def test_budget_and_safety_stop_must_agree() -> None:
    """L40: equality with --max-local-steps if that is given."""
    options("--learner-budget-steps=5", "--max-local-steps=5")
    text = refusal("--connect=h:1", "--learner-budget-steps=5", "--max-local-steps=6")
    assert "5" in text
    assert "6" in text
    refusal("--connect=none", "--learner-budget-steps=5")


def test_the_id_comes_from_the_first_variable_that_is_set(monkeypatch) -> None:
    assert options().config.learner_id == 0
    monkeypatch.setenv("SLURM_PROCID", "7")
    assert options().config.learner_id == 7
    monkeypatch.setenv("RANK", "5")
    assert options().config.learner_id == 5
    monkeypatch.setenv("YETO_LEARNER_ID", "3")
    assert options().config.learner_id == 3
    assert options("--learner-id=1").config.learner_id == 1
    assert options("--learner-id=0").settings.learner_id == 0


def test_a_bad_id_in_the_environment_is_named(monkeypatch) -> None:
    monkeypatch.setenv("YETO_LEARNER_ID", "two")
    text = refusal("--connect=h:1")
    assert "YETO_LEARNER_ID='two'" in text
    assert "0 to 4294967295" in text
    assert options("--learner-id=1").config.learner_id == 1


def test_a_config_file_gives_defaults_and_the_environment_comes_after_it(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'merge_alpha = 0.25\n[learner]\nconnect = "h:5"\nlearner-id = 6\nerror-feedback = "off"\n'
        "[syncer]\nquorum = 3\n"
    )
    monkeypatch.setenv("YETO_LEARNER_ID", "3")
    result = run("--config", str(file), "--merge-alpha=0.125")
    assert result.exit_code == 0, result.output
    config = SEEN.pop().config
    assert (config.connect, config.learner_id, config.alpha) == ("h:5", 6, 0.125)
    assert config.error_feedback is False


def test_help_names_every_option() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for flag in ("--connect", "--merge-alpha", "--state-dir", "--config", "--version"):
        assert flag in result.output
