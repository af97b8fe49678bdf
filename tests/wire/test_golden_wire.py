"""Golden vectors of the wire: HELLO, layouts, identities, fixed payloads."""

from __future__ import annotations

import pytest

from tests.wire.support import golden
from wire.dtypes import DType
from wire.errors import ProtocolError
from wire.frames import MessageType
from wire.identity import SyncerProfile, session_contract_hash
from wire.layout import MergeMode, NamedFragment, NamedLayout, TensorSpec, parse_layout
from wire.messages import FinalAck, Hello, PushFragment, decode_hello, decode_payload, encode_frame


def named(fragments: list) -> NamedLayout:
    return NamedLayout(
        tuple(
            NamedFragment(
                MergeMode(mode), tuple(TensorSpec(name, tuple(shape)) for name, _, shape in tensors)
            )
            for mode, tensors in fragments
        )
    )


def test_the_example_of_w20_and_w21() -> None:
    layout = named(
        [
            [0, [["model.embed.weight", 8, [4, 2]]]],
            [1, [["model.layers.0.q.weight", 6, [2, 3]], ["model.layers.0.b", 3, [3]]]],
        ]
    )
    expected = "280cda42a57f7b1244ba7026f99663e4c09f48aa97cdd51274db608aff385a14"
    assert layout.fingerprint.hex() == expected
    contract = session_contract_hash(layout.fingerprint, "run-1")
    assert contract.hex() == "f82061263c484f8aa976c33957ce35ebd05497864fbfe1ba628122aa4b9c8e5d"
    assert session_contract_hash(layout.fingerprint, None) == layout.fingerprint


@pytest.mark.parametrize("vector", golden("layout_fingerprint"), ids=lambda v: v["id"])
def test_fingerprint(vector: dict) -> None:
    assert named(vector["input"]["fragments"]).fingerprint.hex() == vector["expected"]


@pytest.mark.parametrize("vector", golden("layout_parse"), ids=lambda v: v["id"])
def test_layout_parse(vector: dict) -> None:
    raw = bytes.fromhex(vector["input"]["hex"])
    layout, used = parse_layout(memoryview(raw), vector["input"]["count"])
    assert used == len(raw)
    assert layout.encode() == raw
    got = [
        [f.mode, list(f.numels), None if f.shapes is None else [list(s) for s in f.shapes]]
        for f in layout.fragments
    ]
    assert [g[: len(e)] for g, e in zip(got, vector["expected"], strict=True)] == vector["expected"]


@pytest.mark.parametrize("vector", golden("layout_parse_error"), ids=lambda v: v["id"])
def test_layout_parse_error(vector: dict) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_layout(memoryview(bytes.fromhex(vector["input"]["hex"])), vector["input"]["count"])
    assert caught.value.code == "layout"


@pytest.mark.parametrize("vector", golden("hello"), ids=lambda v: v["id"])
def test_hello(vector: dict) -> None:
    fields = vector["input"]
    layout = named(fields["fragments"])
    contract = fields["contract"]
    hello = Hello(
        learner_id=fields["learner"],
        generation=fields["generation"],
        dtype=DType(fields["dtype"]),
        layout=layout.numeric,
        fingerprint=layout.fingerprint,
        contract=layout.fingerprint if contract == "fingerprint" else bytes.fromhex(contract),
        profile=None if fields["profile"] is None else bytes.fromhex(fields["profile"]),
        num_streams=fields["streams"],
    )
    payload = encode_frame(hello)[13:]
    assert payload.hex() == vector["expected"]
    assert decode_hello(memoryview(payload), learners=256) == hello


@pytest.mark.parametrize("vector", golden("push_head"), ids=lambda v: v["id"])
def test_push_head(vector: dict) -> None:
    f = vector["input"]
    push = PushFragment(
        f["learner"], f["fragment"], f["step"], f["attempt"], f["base"], f["local"], f["c_steps"],
        f["c_tokens"], b"",
    )  # fmt: skip
    payload = encode_frame(push)[13:]
    assert payload.hex() == vector["expected"]
    assert decode_payload(MessageType.PUSH_FRAGMENT, memoryview(payload)) == push


@pytest.mark.parametrize("vector", golden("final_ack"), ids=lambda v: v["id"])
def test_final_ack(vector: dict) -> None:
    assert encode_frame(FinalAck(vector["input"]))[13:].hex() == vector["expected"]


@pytest.mark.parametrize("vector", golden("final_ack_error"), ids=lambda v: v["id"])
def test_final_ack_error(vector: dict) -> None:
    with pytest.raises(ProtocolError):
        decode_payload(MessageType.FINAL_ACK, memoryview(bytes.fromhex(vector["input"])))


@pytest.mark.parametrize("vector", golden("bulk_dtype"), ids=lambda v: v["id"])
def test_bulk_dtype(vector: dict) -> None:
    codes = vector["input"] if isinstance(vector["input"], list) else [vector["input"]]
    assert [DType(code).bulk for code in codes] == vector["expected"]


@pytest.mark.parametrize("vector", golden("profile"), ids=lambda v: v["id"])
def test_profile(vector: dict) -> None:
    fields = dict(vector["input"])
    assert fields.pop("policy_sweep_fragments") is None
    profile = SyncerProfile(
        heloco=fields.pop("delta_correction") == "heloco",
        equal_weights=fields.pop("learner_weight") == "equal",
        **fields,
    )
    assert profile.digest().hex() == vector["expected"]
