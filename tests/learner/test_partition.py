"""The partition: golden vectors, and properties over random models (L5-L9)."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.errors import LayoutError
from learner.partition import layer_index, partition
from wire.layout import MergeMode, TensorSpec

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["vectors"]


def vectors(kind: str) -> list:
    return [pytest.param(v, id=v["id"]) for v in VECTORS if v["kind"] == kind]


@pytest.mark.parametrize("vector", vectors("layer_index"))
def test_golden_layer_index(vector: dict) -> None:
    assert [layer_index(name) for name in vector["input"]] == vector["expected"]


@pytest.mark.parametrize("vector", vectors("fragments"))
def test_golden_fragments(vector: dict) -> None:
    given_, expected = vector["input"], vector["expected"]
    specs = [TensorSpec(name, (numel,)) for name, numel in given_["tensors"]]
    options = {"pattern": given_.get("pattern", "binpack"), "avg_regex": given_.get("avg_regex")}
    layout = partition(specs, given_["parts"], **options)
    rest = layout.fragments[1:]
    if expected.get("order_independent"):
        assert partition(specs[::-1], given_["parts"], **options) == layout
    if "frag0_mode" in expected:
        assert layout.fragments[0].mode == expected["frag0_mode"]
        assert [t.name for t in layout.fragments[0].tensors] == expected["frag0_names"]
        assert {f.mode for f in rest} == {expected["rest_mode"]}
    if "rest_sizes" in expected:
        assert [f.numel for f in rest] == expected["rest_sizes"]
    if "count" in expected:
        assert len(layout) == expected["count"]
    if "layers_per_bin" in expected:
        layers = [sorted({layer_index(t.name) for t in f.tensors} - {None}) for f in rest]
        assert layers == expected["layers_per_bin"]


names = st.one_of(
    st.builds("model.layers.{}.{}".format, st.integers(0, 12), st.sampled_from("abcdef")),
    st.builds("t.h.{}.{}".format, st.integers(0, 3), st.sampled_from("ab")),
    st.sampled_from(["wte.weight", "model.Embed.weight", "lm_head.weight", "norm.weight", "scale"]),
)
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(
    st.dictionaries(names, shapes, min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["binpack", "strided"]),
    st.sampled_from(["rda", "iso"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_every_tensor_once_whatever_the_order(tensors, parts, pattern, merge, rng) -> None:
    specs = [TensorSpec(name, shape) for name, shape in tensors.items()]
    layout = partition(specs, parts, pattern=pattern, matrix_merge=merge)
    placed = [tensor for fragment in layout.fragments for tensor in fragment.tensors]
    assert sorted(placed, key=lambda t: t.name) == sorted(specs, key=lambda t: t.name)
    rng.shuffle(specs)
    again = partition(specs, parts, pattern=pattern, matrix_merge=merge)
    assert again.fingerprint == layout.fingerprint

    averaged = [f for f in layout.fragments if f.mode is MergeMode.AVG]
    rest = [f for f in layout.fragments if f.mode is not MergeMode.AVG]
    # L5: one averaged fragment, first, sorted; L6: never more bins than asked for.
    assert averaged == list(layout.fragments[: len(averaged)])
    assert len(averaged) <= 1
    assert len(rest) <= max(1, parts - len(averaged))
    for fragment in averaged:
        assert list(fragment.tensors) == sorted(fragment.tensors, key=lambda t: (-t.numel, t.name))
    if merge == "iso":
        assert all(len(t.shape) == 2 for f in rest for t in f.tensors)
    assert layout.numeric.max_numel == max(
        sum(math.prod(t.shape) for t in f.tensors) for f in layout.fragments
    )


def test_one_part_of_both_classes_gives_two_fragments() -> None:
    """L6: P = 1 with an averaged and a merged class."""
    layout = partition([TensorSpec("wte.weight", (4, 4)), TensorSpec("a.weight", (2, 2))], 1)
    assert [f.mode for f in layout.fragments] == [MergeMode.AVG, MergeMode.RDA]


def test_binpack_fills_the_emptiest_bin_lowest_index_first() -> None:
    """L7."""
    sizes = {"a": 8, "b": 7, "c": 6, "d": 5, "e": 4}
    layout = partition([TensorSpec(n, (s,)) for n, s in sizes.items()], 2)
    assert [[t.name for t in f.tensors] for f in layout.fragments] == [["a", "d", "e"], ["b", "c"]]


def test_strided_puts_loose_tensors_onto_the_current_totals() -> None:
    """L8: layers are dealt in (layer, name) order, then layer-less tensors go by L7."""
    specs = [
        TensorSpec("m.layers.2.b", (2,)),
        TensorSpec("m.layers.2.a", (2,)),
        TensorSpec("m.layers.0.z", (9,)),
        TensorSpec("m.layers.1.z", (20,)),
        TensorSpec("norm", (3,)),
        TensorSpec("scale", ()),
    ]
    layout = partition(specs, 2, pattern="strided")
    groups = [[t.name for t in f.tensors] for f in layout.fragments]
    assert groups == [
        ["m.layers.0.z", "m.layers.2.a", "m.layers.2.b", "norm", "scale"],
        ["m.layers.1.z"],
    ]


def test_avg_regex_moves_what_it_finds() -> None:
    layout = partition(
        [TensorSpec("m.layers.0.norm", (4,)), TensorSpec("m.layers.0.q", (4,))],
        4,
        avg_regex="norm$",
    )
    assert [t.name for t in layout.fragments[0].tensors] == ["m.layers.0.norm"]
    assert layout.fragments[0].mode is MergeMode.AVG


@pytest.mark.parametrize(
    ("specs", "options", "text"),
    [
        ([], {}, "no trainable"),
        ([TensorSpec("a", (1,))], {"pattern": "zigzag"}, "zigzag"),
        ([TensorSpec("a", (1,))], {"matrix_merge": "svd"}, "svd"),
        ([TensorSpec("a", (1,)), TensorSpec("a", (2,))], {}, "twice"),
        ([TensorSpec("a", (0,))], {}, "no elements"),
    ],
)
def test_refusals_name_the_culprit(specs, options, text) -> None:
    """L9."""
    with pytest.raises(LayoutError, match=text):
        partition(specs, 2, **options)
