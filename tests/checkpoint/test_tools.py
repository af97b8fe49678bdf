"""K24 to K28: yeto-checkpoint, run as a command."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open

from checkpoint.cli import main
from checkpoint.comparison import compare_files
from checkpoint.export import ExportOptions, export_file
from checkpoint.inspection import inspect_file
from checkpoint.snapshot import FragmentState, Snapshot
from tests.checkpoint.builders import LAYOUT, NUMELS, OTHER, cut, encode, flat_layout, started
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(item) for item in arguments], catch_exceptions=False)


def run_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(LAYOUT.to_json())
    return path


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A verified checkpoint of step 6, marked final."""
    store = started(tmp_path / "P")
    store.save(cut(5), patch=False, last=False)
    store.save(cut(6), patch=False, last=True)
    store.write_marker(6)
    store.release()
    return tmp_path / "P"


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """No command ever writes to a checkpoint."""
    if "final" not in request.fixturenames:
        yield
        return
    path = request.getfixturevalue("final")
    before = path.read_bytes()
    yield
    if request.node.get_closest_marker("parametrize") is None:
        assert path.read_bytes() == before


# -- inspect ---------------------------------------------------------------------------------------


def test_k24_inspect(final: Path) -> None:
    code, found = run_json("inspect", final)
    assert code == 0
    assert found["revision"] == 3
    assert found["backend"] == "scalar"
    assert (found["global_step"], found["num_fragments"]) == (6, 3)
    snapshot = cut(6)
    for fragment, expected in zip(found["fragments"], snapshot.fragments, strict=True):
        assert fragment["version"] == expected.version
        assert fragment["numel"] == expected.params.numel()
        assert fragment["params_norm"] == pytest.approx(float(expected.params.double().norm()))
        assert fragment["momentum_norm"] == pytest.approx(float(expected.momentum.double().norm()))
    assert found["ledger"][1] == {"id": 7, "merges": 6, "steps": 144, "tokens": 24576}
    assert found["trailer"] == "contract"
    assert found["fingerprint"] == LAYOUT.fingerprint.hex()
    assert found["contract"] == snapshot.contract.hex()
    assert (found["marker_step"], found["marked_final"]) == (6, True)
    assert (found["integrity"], found["problems"]) == ("verified", [])


def test_k24_inspect_for_people(final: Path) -> None:
    result = run("inspect", final)
    assert result.exit_code == 0
    for part in ("V3", "scalar", "marked final", "verified", LAYOUT.fingerprint.hex(), "24,576"):
        assert part in result.stdout


def test_k24_inspect_reports_damage_instead_of_refusing(final: Path) -> None:
    data = bytearray(final.read_bytes())
    data[49 + 16 : 49 + 20] = struct.pack("<f", float("nan"))
    damaged = final.with_name("Q")
    damaged.write_bytes(data)
    final.with_name("P.sums").rename(final.with_name("Q.sums"))
    code, found = run_json("inspect", damaged)
    assert code == 0
    assert found["integrity"] == "mismatch"
    assert found["bad_sections"] == ["fragment 0"]
    assert found["fragments"][0]["params_norm"] is None
    assert found["fragments"][0]["params_non_finite"] == 1
    assert [problem["reason"] for problem in found["problems"]] == ["integrity", "non-finite"]
    assert "problem: non-finite" in run("inspect", damaged).stdout


@pytest.mark.parametrize("revision", [1, 2, 3])
@pytest.mark.parametrize("trailer", ["none", "fingerprint", "contract", "sweep", "sweep-only"])
def test_k24_every_revision_is_inspected(tmp_path: Path, revision: int, trailer: str) -> None:
    (tmp_path / "P").write_bytes(encode(cut(4), revision, trailer))
    code, found = run_json("inspect", tmp_path / "P")
    assert code == 0
    assert (found["revision"], found["trailer"]) == (revision, trailer)
    assert found["backend"] == ("unknown" if revision == 1 else "scalar")
    assert found["integrity"] == "unverified"
    assert found["sweep"] == (2 if trailer.startswith("sweep") else None)
    assert run("inspect", tmp_path / "P").exit_code == 0


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"", "truncated"), (b"x" * 99, "magic"), (encode(cut(4))[:-1], "trailer")],
)
def test_inspect_of_an_unreadable_file(tmp_path: Path, data: bytes, word: str) -> None:
    (tmp_path / "P").write_bytes(data)
    result = run("inspect", tmp_path / "P")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"refused:{word} ")
    code, found = run_json("inspect", tmp_path / "P")
    assert (code, found["status"], found["reason"]) == (1, "refused", word)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for command in (("inspect",), ("verify",), ("diff", tmp_path)):
        result = run(*command, tmp_path / "nothing")
        assert result.exit_code == 1
        assert result.stderr.startswith("refused:unreadable ")


# -- verify ----------------------------------------------------------------------------------------


def test_k24_verify(final: Path, layout: Path) -> None:
    result = run("verify", final, "--layout", layout, "--require-final")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "verified" in result.stdout
    final.with_name("P.sums").unlink()
    assert run("verify", final).exit_code == 3
    code, found = run_json("verify", final)
    assert (code, found["status"]) == (3, "unverified")


@pytest.mark.parametrize(
    ("marker", "good"),
    [("6", True), ("006", True), ("7", False), ("6 ", False), (None, False)],
)
def test_k21_require_final(final: Path, marker: str | None, good: bool) -> None:
    path = final.with_name("P.final")
    path.unlink()
    if marker is not None:
        path.write_text(f"YETO_FINAL_V1\nglobal_step={marker}\n")
    result = run("verify", final, "--require-final")
    assert result.exit_code == (0 if good else 1)
    assert result.stderr.startswith("" if good else "refused:unmarked ")
    assert run("verify", final).exit_code == 0


def test_k24_verify_names_the_bad_section_and_the_spare(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    for step in range(3):
        store.save(cut(step), patch=True, last=False)
    store.release()
    data = bytearray((tmp_path / "P").read_bytes())
    data[70] ^= 1
    (tmp_path / "P").write_bytes(data)
    result = run("verify", tmp_path / "P")
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:integrity ")
    assert "fragment 0" in result.stderr
    assert "P.tmp is a whole checkpoint of step 1" in result.stderr


@pytest.mark.parametrize(
    ("revision", "trailer", "code"),
    [(1, "none", 3), (2, "contract", 3), (3, "none", 3), (3, "sweep", 1), (2, "sweep-only", 1)],
)
def test_verify_of_other_forms(tmp_path: Path, revision: int, trailer: str, code: int) -> None:
    (tmp_path / "P").write_bytes(encode(cut(4), revision, trailer))
    assert run("verify", tmp_path / "P").exit_code == code


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (encode(cut(4, fingerprint=OTHER)), "fingerprint-mismatch"),
        (encode(cut(4, NUMELS[:2])), "fragment-mismatch"),
        (encode(cut(4, (7, 5, 5))), "fragment-mismatch"),
        (encode(cut(4), 2), "legacy-grouped"),
        (encode(cut(4, fingerprint=OTHER), 2), "fingerprint-mismatch"),
    ],
)
def test_k18_verify_against_a_layout(tmp_path: Path, layout: Path, data: bytes, word: str) -> None:
    (tmp_path / "P").write_bytes(data)
    result = run("verify", tmp_path / "P", "--layout", layout)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"refused:{word} ")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda document: document | {"fingerprint": "00" * 32}, "fingerprint-mismatch"),
        (lambda document: document | {"format": "other"}, "layout"),
        (lambda document: document | {"fragments": []}, "layout"),
        (lambda document: [document], "layout"),
        (lambda document: document | {"fragments": [{"mode": "avg", "tensors": 3}]}, "layout"),
    ],
)
def test_k26_layout_documents_are_checked(
    final: Path, layout: Path, change: Any, word: str
) -> None:
    layout.write_text(json.dumps(change(json.loads(layout.read_text()))))
    result = run("verify", final, "--layout", layout)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"refused:{word} ")


# -- diff ------------------------------------------------------------------------------------------


def test_diff_of_equal_files(final: Path) -> None:
    copy = final.with_name("copy")
    copy.write_bytes(final.read_bytes())
    code, found = run_json("diff", final, copy)
    assert (code, found["equal"]) == (0, True)
    assert "equal" in run("diff", final, copy).stdout


def test_diff_tells_which_fragments_and_how_much(tmp_path: Path) -> None:
    first = cut(6)
    changed = first.fragments[1].params.clone()
    changed[2] += 2.0
    fragments = list(first.fragments)
    fragments[1] = FragmentState(fragments[1].version, changed, fragments[1].momentum)
    second = Snapshot(0, first.fingerprint, first.contract, 6, tuple(fragments), {})
    (tmp_path / "a").write_bytes(encode(first))
    (tmp_path / "b").write_bytes(encode(second))
    code, found = run_json("diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert [item["differs"] for item in found["fragments"]] == [False, True, False]
    params = found["fragments"][1]["params"]
    delta = float(changed[2].double() - first.fragments[1].params[2].double())
    norm = float(first.fragments[1].params.double().norm())
    assert params["unequal"] == 1
    assert params["max_abs"] == params["l2"] == pytest.approx(delta)
    assert params["relative"] == pytest.approx(delta / norm)
    assert found["fragments"][1]["momentum"]["unequal"] == 0
    assert set(found["facts"]) == {"ledger"}
    assert "1 of 3 fragments differ" in run("diff", tmp_path / "a", tmp_path / "b").stdout


def test_diff_of_other_shapes_and_revisions(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encode(cut(4, (7, 5, 4))))
    (tmp_path / "b").write_bytes(encode(cut(4, (7, 6)), 1, "none"))
    found = compare_files(tmp_path / "a", tmp_path / "b")
    assert [item["differs"] for item in found["fragments"]] == [True, True]
    assert {"revision", "backend", "num_fragments", "trailer"} <= set(found["facts"])
    assert "params" not in found["fragments"][1]
    assert run("diff", tmp_path / "a", tmp_path / "b").exit_code == 0


# -- export ----------------------------------------------------------------------------------------


def tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def expected_tensors(snapshot: Snapshot, layout: NamedLayout) -> dict[str, torch.Tensor]:
    found = {}
    for state, fragment in zip(snapshot.fragments, layout.fragments, strict=True):
        for prefix, values in (("", state.params), ("momentum.", state.momentum)):
            pieces = values.split([tensor.numel for tensor in fragment.tensors])
            for tensor, piece in zip(fragment.tensors, pieces, strict=True):
                found[prefix + tensor.name] = piece.reshape(tensor.shape)
    return found


@pytest.mark.parametrize("momentum", [False, True])
def test_k25_k28_export(final: Path, layout: Path, momentum: bool) -> None:
    out = final.with_name("model.safetensors")
    arguments = ["export", final, out, "--layout", layout, *(["--momentum"] if momentum else [])]
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    found, metadata = tensors(out)
    expected = expected_tensors(cut(6), LAYOUT)
    if not momentum:
        expected = {name: value for name, value in expected.items() if "momentum." not in name}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value)
    assert metadata == {
        "yeto_revision": "3",
        "yeto_iso_backend": "scalar",
        "yeto_layout_fingerprint": LAYOUT.fingerprint.hex(),
        "yeto_session_contract": cut(6).contract.hex(),
        "yeto_global_step": "6",
        "yeto_checkpoint_sha256": hashlib.sha256(final.read_bytes()).hexdigest(),
        "yeto_marked_final": "true",
        "yeto_integrity": "verified",
    }
    assert [item.name for item in final.parent.iterdir() if item.name.endswith(".tmp")] == []


def test_k25_export_in_bf16(final: Path, layout: Path) -> None:
    out = final.with_name("model.safetensors")
    assert run("export", final, out, "--layout", layout, "--dtype=bf16").exit_code == 0
    found, _ = tensors(out)
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected_tensors(cut(6), LAYOUT)[name].to(torch.bfloat16))


def test_k25_values_that_bf16_cannot_hold(tmp_path: Path) -> None:
    layout = flat_layout((2,))
    (tmp_path / "layout.json").write_text(layout.to_json())
    values = torch.tensor([1.0, 3.4e38])
    snapshot = Snapshot(
        0, layout.fingerprint, OTHER, 1, (FragmentState(1, values, torch.zeros(2)),), {}
    )
    (tmp_path / "P").write_bytes(encode(snapshot))
    arguments = ("export", tmp_path / "P", tmp_path / "out", "--layout", tmp_path / "layout.json")
    result = run(*arguments, "--dtype", "bf16")
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:non-finite ")
    assert {item.name for item in tmp_path.iterdir()} == {"P", "layout.json"}
    assert run(*arguments).exit_code == 0


def test_k26_export_refuses_another_layout(final: Path, tmp_path: Path) -> None:
    renamed = NamedLayout(
        tuple(
            NamedFragment(item.mode, tuple(TensorSpec(t.name + "x", t.shape) for t in item.tensors))
            for item in LAYOUT.fragments
        )
    )
    (tmp_path / "other.json").write_text(renamed.to_json())
    result = run("export", final, tmp_path / "out", "--layout", tmp_path / "other.json")
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:fingerprint-mismatch ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("revision", [1, 2])
def test_k27_grouped_legacy_files_need_an_audit(
    tmp_path: Path, layout: Path, revision: int
) -> None:
    (tmp_path / "P").write_bytes(encode(cut(4), revision, "none"))
    arguments = ("export", tmp_path / "P", tmp_path / "out", "--layout", layout)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:legacy-grouped ")
    assert "--legacy-fingerprint" in result.stderr
    result = run(*arguments, "--legacy-fingerprint", OTHER.hex())
    assert result.stderr.startswith("refused:fingerprint-mismatch ")
    result = run(*arguments, "--legacy-fingerprint", LAYOUT.fingerprint.hex().upper())
    assert result.exit_code == 0
    assert "no proof of its layout" in result.stderr
    _, metadata = tensors(tmp_path / "out")
    assert metadata["yeto_revision"] == str(revision)
    assert metadata["yeto_iso_backend"] == ("unknown" if revision == 1 else "scalar")
    assert metadata["yeto_session_contract"] == "none"
    assert (metadata["yeto_marked_final"], metadata["yeto_integrity"]) == ("false", "unverified")


@pytest.mark.parametrize("revision", [1, 2])
def test_k27_single_tensor_legacy_files_are_exported(tmp_path: Path, revision: int) -> None:
    layout = flat_layout((3, 4))
    (tmp_path / "layout.json").write_text(layout.to_json())
    snapshot = cut(4, (3, 4), fingerprint=layout.fingerprint)
    (tmp_path / "P").write_bytes(encode(snapshot, revision, "none"))
    result = run("export", tmp_path / "P", tmp_path / "out", "--layout", tmp_path / "layout.json")
    assert result.exit_code == 0
    assert "no proof" in result.stderr
    assert torch.equal(tensors(tmp_path / "out")[0]["t1"], snapshot.fragments[1].params)


def test_k4_sweep_files_are_exported(tmp_path: Path, layout: Path) -> None:
    (tmp_path / "P").write_bytes(encode(cut(4), 3, "sweep"))
    assert run("export", tmp_path / "P", tmp_path / "out", "--layout", layout).exit_code == 0


def test_export_refuses_damage_and_unmarked_files(final: Path, layout: Path) -> None:
    out = final.with_name("out")
    damaged = final.with_name("Q")
    data = bytearray(final.read_bytes())
    data[70] ^= 1
    damaged.write_bytes(data)
    result = run("export", damaged, out, "--layout", layout, "--require-final")
    assert result.stderr.startswith("refused:unmarked ")
    final.with_name("P.sums").rename(final.with_name("Q.sums"))
    result = run("export", damaged, out, "--layout", layout)
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:integrity ")
    data[49 + 16 : 49 + 20] = struct.pack("<f", float("inf"))
    damaged.write_bytes(data)
    final.with_name("Q.sums").unlink()
    result = run("export", damaged, out, "--layout", layout)
    assert result.stderr.startswith("refused:non-finite ")
    assert not out.exists()


def test_export_replaces_only_by_force(final: Path, layout: Path) -> None:
    out = final.with_name("out")
    out.write_text("mine")
    result = run("export", final, out, "--layout", layout)
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert out.read_text() == "mine"
    assert run("export", final, out, "--layout", layout, "--force").exit_code == 0
    assert len(tensors(out)[0]) == 4


def test_export_never_replaces_what_is_no_file(final: Path, layout: Path) -> None:
    """Its rename would take a device or a pipe away from everyone else."""
    out = final.with_name("pipe")
    os.mkfifo(out)
    result = run("export", final, out, "--layout", layout, "--force")
    assert result.exit_code == 1
    assert "no regular file" in result.stderr
    assert out.is_fifo()


def test_k15_k21_pipes_beside_the_checkpoint_are_not_waited_for(final: Path) -> None:
    for name in ("P.sums", "P.final"):
        final.with_name(name).unlink()
        os.mkfifo(final.with_name(name))
    assert run("verify", final).exit_code == 3
    assert run("verify", final, "--require-final").exit_code == 1
    assert run("inspect", final).exit_code == 0


@pytest.mark.parametrize("name", ["P", "P.sums", "P.final", "P.tmp", "P.lock", "layout.json"])
def test_export_never_writes_to_its_inputs(final: Path, layout: Path, name: str) -> None:
    before = final.read_bytes()
    result = run("export", final, final.with_name(name), "--layout", layout, "--force")
    assert result.exit_code == 2
    assert final.read_bytes() == before


def test_export_never_writes_through_a_link(final: Path, layout: Path) -> None:
    link = final.with_name("link")
    link.symlink_to(final)
    hard = final.with_name("hard")
    hard.hardlink_to(final)
    for out in (link, hard):
        assert run("export", final, out, "--layout", layout, "--force").exit_code == 2


def test_export_refuses_two_tensors_of_one_name(tmp_path: Path) -> None:
    twice = NamedLayout(
        tuple(
            NamedFragment(MergeMode.AVG, (TensorSpec(name, (2,)),)) for name in ("a", "momentum.a")
        )
    )
    (tmp_path / "layout.json").write_text(twice.to_json())
    (tmp_path / "P").write_bytes(encode(cut(4, (2, 2), fingerprint=twice.fingerprint)))
    arguments = ("export", tmp_path / "P", tmp_path / "out", "--layout", tmp_path / "layout.json")
    assert run(*arguments, "--momentum").stderr.startswith("refused:layout ")
    assert run(*arguments).exit_code == 0


def test_a_failing_output_disk_leaves_nothing(final: Path, layout: Path) -> None:
    result = run("export", final, final.parent / "missing" / "out", "--layout", layout)
    assert result.exit_code == 1
    assert result.stderr.startswith("refused:output ")


def test_tools_need_constant_memory(tmp_path: Path) -> None:
    numel = 3 << 20
    layout = flat_layout((numel,))
    ramp = torch.arange(numel, dtype=torch.float32)
    snapshot = Snapshot(0, layout.fingerprint, OTHER, 1, (FragmentState(1, ramp, -ramp),), {})
    store = started(tmp_path / "P")
    store.save(snapshot, patch=False, last=True)
    store.release()
    arguments = (tmp_path / "P", tmp_path / "out", layout)
    export_file(*arguments, ExportOptions())  # what is loaded or compiled once does not count
    tracemalloc.start()
    inspect_file(tmp_path / "P")
    compare_files(tmp_path / "P", tmp_path / "P")
    export_file(*arguments, ExportOptions(momentum=True, force=True))
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()
    with safe_open(tmp_path / "out", "np") as file:
        assert np.array_equal(file.get_tensor("momentum.t0"), -ramp.numpy())


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "P", "--nope"],
        ["verify", "P", "--layout", "missing.json"],
        ["export", "P", "out"],
        ["export", "P", "--layout", "layout.json"],
        ["export", "P", "out", "--layout", "layout.json", "--dtype", "q4"],
        ["export", "P", "out", "--layout", "layout.json", "--legacy-fingerprint", "12"],
        ["export", "P", "out", "--layout", "layout.json", "--legacy-fingerprint", "g" * 64],
        ["diff", "P"],
        ["unknown"],
    ],
)
def test_usage_errors_exit_2(
    final: Path, layout: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(final.parent)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "--help" in result.stderr


def test_help_and_version() -> None:
    assert isinstance(main, click.Group)
    for command in ([], *([name] for name in main.commands)):
        assert run(*command, "--help").exit_code == 0
    assert run("--version").exit_code == 0
