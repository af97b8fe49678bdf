"""Shared command-line helpers (cli.md, Common)."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from wire import cli_support as cs


@click.command()
@click.option("--quorum", type=cs.Whole(1, 2**32 - 1), default=1)
@click.option("--gamma", type=cs.Real(0, 1, open_high=True), default=0.5)
@click.option("--wait-s", type=cs.seconds(), default=10.0)
@click.option("--rates", type=cs.Commas(cs.Real(0, open_low=True)))
@click.option("--devices", type=cs.Commas(click.STRING, distinct=True))
@click.option("--resume", is_flag=True)
@click.option("--name")
@cs.config_option("syncer")
@cs.logging_options
@cs.version_option()
def program(**values: object) -> None:
    click.echo(json.dumps(values))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, arguments)


def values(*arguments: str) -> dict[str, object]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("flag", "value", "legal"),
    [
        ("--quorum", "0", "an integer from 1 to 4294967295"),
        ("--quorum", "4294967296", "an integer from 1 to 4294967295"),
        ("--quorum", "1_0", "an integer"),
        ("--quorum", "1.0", "an integer"),
        ("--quorum", "٣", "an integer"),
        ("--quorum", "9" * 5000, "an integer"),
        ("--gamma", "1", ">= 0 and < 1"),
        ("--gamma", "-0.1", ">= 0 and < 1"),
        ("--gamma", "nan", "a finite number"),
        ("--gamma", "inf", "a finite number"),
        ("--gamma", "-Infinity", "a finite number"),
        ("--gamma", "1e999", "a finite number"),
        ("--wait-s", "0", "> 0 and <= 31536000"),
        ("--wait-s", "31536000.1", "> 0 and <= 31536000"),
        ("--rates", "0", "> 0"),
        ("--rates", "0.5,,1", "comma separated"),
        ("--rates", "", "comma separated"),
        ("--devices", "cpu,cpu", "twice"),
    ],
)
def test_a_bad_value_names_flag_value_and_range(flag: str, value: str, legal: str) -> None:
    result = run(f"{flag}={value}")
    assert result.exit_code == 2
    assert flag in result.stderr
    assert value[:40] in result.stderr
    assert legal in result.stderr


def test_good_values_in_both_spellings() -> None:
    assert values("--quorum", "3", "--gamma=0.25")["quorum"] == 3
    assert values("--rates", "1, 2e-1,.5")["rates"] == [1.0, 0.2, 0.5]
    assert values("--wait-s=31536000")["wait_s"] == 31_536_000
    assert run("--version").stdout.split()[1].count(".") == 2


def test_config_file_sets_defaults_and_flags_win(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "quorum = 5\nwait_s = 3\n[syncer]\nwait-s = 4\nrates = [1, 0.5]\nresume = true\n"
        '[learner]\nanything = "belongs to the other program"\n'
    )
    got = values("--config", str(file), "--quorum", "7")
    assert got["quorum"] == 7
    assert got["wait_s"] == 4.0
    assert got["rates"] == [1.0, 0.5]
    assert got["resume"] is True


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("quorom = 5", "unknown key 'quorom'"),
        ("config = 'x'", "unknown key 'config'"),
        ("quorum = '5'", "'quorum' must be an integer"),
        ("quorum = true", "'quorum' must be an integer"),
        ("quorum = 0", "--quorum must be an integer from 1"),
        ("gamma = nan", "--gamma must be a finite number"),
        ("gamma = '0.5'", "'gamma' must be a number"),
        ("resume = 1", "'resume' must be true or false"),
        ("rates = 0.5", "'rates' must be an array"),
        ("rates = []", "comma separated"),
        ("rates = ['a']", "each element a number"),
        ("name = 3", "'name' must be a string"),
        ("log-level = 'loud'", "--log-level"),
        ("wait-s = 1\nwait_s = 1", "given twice"),
        ("syncer = 3", "must be a table"),
        ("quorum =", "cannot read"),
    ],
)
def test_a_bad_config_file_is_a_usage_error(tmp_path, text: str, complaint: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    result = run("--config", str(file))
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(("text", "flag"), [("quorum = 0", "--quorum"), ("gamma = 2", "--gamma")])
def test_a_value_that_a_flag_replaces_is_range_checked_too(tmp_path, text: str, flag: str) -> None:
    """cli.md, Common: every number is, before anything else."""
    file = tmp_path / "run.toml"
    file.write_text(text)
    result = run("--config", str(file), "--quorum", "3", "--gamma", "0.1")
    assert result.exit_code == 2
    assert flag in result.stderr


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("yeto-syncer", ["--port", "x"]),
        ("yeto-syncer", ["--learner-budget-steps", "4"]),
        ("yeto-syncer", ["--final-state", "yeto-state.ckpt"]),
        ("yeto-learner", []),
        ("yeto-learner", ["--connect", "[::1:5"]),
        ("yeto-checkpoint", ["inspect"]),
        ("yeto-checkpoint", ["nope"]),
    ],
)
def test_a_usage_error_is_one_line(tmp_path, program: str, arguments: list[str]) -> None:
    """cli.md: the end of section 1; exit 2, and nothing on disk."""
    command = [Path(sys.executable).with_name(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--help" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a full device")
def test_an_output_that_cannot_be_written_is_told_in_one_line() -> None:
    command = [Path(sys.executable).with_name("yeto-syncer"), "--print-profile"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_config_file_is_a_usage_error(tmp_path) -> None:
    result = run("--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = before[0], before[1]


def test_json_log_lines_carry_event_and_fields(root_logger, capsys) -> None:
    cs.setup_logging("info", "json")
    logger = logging.getLogger("yeto.test")
    cs.log_event(logger, logging.INFO, "round", "round 3 done", t=3, ids=[0, 2])
    logger.debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["event"] == "round"
    assert entry["t"] == 3
    assert entry["ids"] == [0, 2]
    assert entry["message"] == "round 3 done"
    assert entry["level"] == "info"


def test_text_log_lines_name_the_level_of_a_warning(root_logger, capsys) -> None:
    cs.setup_logging("warning", "text")
    logging.getLogger("yeto.test").warning("mind %s", "this")
    logging.getLogger("yeto.test").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning: mind this")
