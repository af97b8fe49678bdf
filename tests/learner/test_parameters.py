"""The parameter mapping on real modules: names, ties, strides, dtypes, the blend (L1-L4, L26)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner.buffers import Buffers
from learner.errors import LayoutError
from learner.parameters import PIECE, Parameters, find_trainables, normalize_name, specs_of
from learner.partition import partition
from learner.staging import Host


def mapped(model: nn.Module, parts: int = 1) -> Parameters:
    trainables = find_trainables(model)
    return Parameters(trainables, partition(specs_of(trainables), parts))


def holder(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.module.a.b", "a.b"),
        ("layers.0._checkpoint_wrapped_module.mlp._fsdp_wrapped_module.w", "layers.0.mlp.w"),
        ("decoder.module.w", "decoder.module.w"),
        ("module", "module"),
        ("_orig_mod.module.weight", "weight"),
    ],
)
def test_names_lose_what_wrappers_add(raw: str, name: str) -> None:
    """L3: `module` only in front, the underscore names anywhere."""
    assert normalize_name(raw) == name


def test_compiled_and_plain_models_have_one_fingerprint() -> None:
    """L3."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = nn.ModuleDict({"module": torch.compile(plain)})
    assert mapped(plain).layout.fingerprint == mapped(wrapped).layout.fingerprint


def test_tied_parameters_are_mapped_once_under_the_first_name() -> None:
    """L2: the same Parameter, and two Parameters on one storage; both aliases see the update."""
    model = nn.Module()
    model.embed = nn.Embedding(5, 3)
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    model.twin = nn.Linear(3, 5, bias=False)
    model.twin.weight = nn.Parameter(model.embed.weight.detach())
    assert list(find_trainables(model)) == ["embed.weight"]
    parameters = mapped(model)
    parameters.overwrite(0, torch.arange(15.0))
    assert torch.equal(model.head.weight, torch.arange(15.0).view(5, 3))
    assert torch.equal(model.twin.weight, model.head.weight)
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_buffers_and_empty_ones_are_left_out() -> None:
    """L1."""
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 4)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    model.register_buffer("running", torch.ones(3))
    assert specs_of(find_trainables(model))[0].shape == ()
    assert list(find_trainables(model)) == ["scale"]
    assert mapped(model).numels == (1,)


def test_what_is_no_trainable_stays_as_it_is() -> None:
    """L1: running statistics, counters and masks are each island's own, whatever arrives."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_parameter("steps", nn.Parameter(torch.tensor([7, 8]), requires_grad=False))
    model.register_buffer("mask", torch.tensor([True, False]))
    model(torch.randn(5, 3))
    parameters = mapped(model)
    names = {name for name, _ in parameters.named()}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    before = {n: v.clone() for n, v in model.state_dict().items() if n not in names}
    assert "1.num_batches_tracked" in before
    parameters.overwrite(0, torch.randn(parameters.numels[0]))
    parameters.blend(0, torch.randn(parameters.numels[0]), 0.5)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")],
)
def test_what_cannot_be_synced_is_refused_by_name(tensor: Tensor) -> None:
    """L1."""
    with pytest.raises(LayoutError, match="culprit"):
        find_trainables(holder(culprit=tensor))


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"0\.weight.*lazy"):
        find_trainables(nn.Sequential(nn.LazyLinear(3)))


def test_names_that_become_equal_are_refused() -> None:
    """L3."""
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(LayoutError, match="'weight'"):
        find_trainables(model)


def strided_model() -> nn.Module:
    torch.manual_seed(0)
    return holder(
        channels=torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        transposed=torch.randn(6, 5).t(),
        sliced=torch.randn(8, 8)[::2, 1:4],
        f16=torch.randn(7).half(),
        brain=torch.randn(3, 3).bfloat16(),
        scalar=torch.tensor(0.5),
        f64=torch.randn(3, dtype=torch.float64),
    )


def reference(parameters: Parameters, fragment: int) -> Tensor:
    return torch.cat(
        [slot.parameter.detach().float().reshape(-1) for slot in parameters.slots(fragment)]
    )


def test_snapshot_is_row_major_whatever_the_strides() -> None:
    """L4."""
    parameters = mapped(strided_model())
    assert torch.equal(parameters.snapshot(0), reference(parameters, 0))


def test_delta_is_one_f32_subtraction() -> None:
    """L22."""
    parameters = mapped(strided_model())
    anchor = torch.randn(parameters.numels[0])
    assert torch.equal(parameters.delta(0, anchor), reference(parameters, 0) - anchor)


def test_the_terms_of_a_delta() -> None:
    """L22; strided tensors are left to `delta`."""
    torch.manual_seed(0)
    model = holder(
        large=torch.randn(3, 1000),
        brain=torch.randn(1000).bfloat16(),
        f64=torch.randn(2 * PIECE + 1, dtype=torch.float64),
        scalar=torch.tensor(0.5),
    )
    parameters = mapped(model)
    anchor = torch.randn(parameters.numels[0])
    terms = parameters.delta_terms(0, anchor)
    assert terms is not None
    assert torch.equal(torch.cat([a - b for a, b in terms]), parameters.delta(0, anchor))
    strided = mapped(strided_model())
    assert strided.delta_terms(0, torch.zeros(strided.numels[0])) is None


def test_writing_keeps_storage_strides_gradients_and_dtype() -> None:
    """L4: in place, cast to the parameter's dtype, round to nearest even."""
    model = strided_model()
    before = {n: (p.data_ptr(), p.stride(), p.dtype) for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parameters = mapped(model)
    values = torch.randn(parameters.numels[0])
    parameters.overwrite(0, values)
    after = {n: (p.data_ptr(), p.stride(), p.dtype) for n, p in model.named_parameters()}
    assert after == before
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    for slot in parameters.slots(0):
        assert torch.equal(slot.parameter, slot.of(values).to(slot.parameter.dtype))


def numpy_blend(local: np.ndarray, incoming: np.ndarray, alpha: float) -> np.ndarray:
    """L26 by the letter: two f32 products and one f32 sum."""
    left = np.float32(alpha) * local
    right = np.float32(1 - alpha) * incoming
    assert left.dtype == right.dtype == np.float32
    return left + right


@pytest.mark.parametrize("alpha", [0.5, 0.3, 0.9, 1 / 3])
@pytest.mark.parametrize("numel", [1, 1000, 300_000])
def test_blend_is_two_products_and_a_sum(alpha: float, numel: int) -> None:
    """L26, bit for bit."""
    generator = torch.Generator().manual_seed(numel)
    local = torch.randn(numel, generator=generator) * 3
    incoming = torch.randn(numel, generator=generator)
    model = holder(w=local.clone())
    mapped(model).blend(0, incoming, alpha)
    expected = numpy_blend(local.numpy(), incoming.numpy(), alpha)
    assert model.w.detach().numpy().tobytes() == expected.tobytes()


def test_blend_of_other_dtypes_and_strides() -> None:
    """L26, then the cast of L4."""
    parameters = mapped(strided_model())
    before = {slot.name: slot.parameter.detach().clone() for slot in parameters.slots(0)}
    values = torch.randn(parameters.numels[0])
    parameters.blend(0, values, 0.3)
    for slot in parameters.slots(0):
        local = before[slot.name].float().contiguous().numpy()
        expected = torch.from_numpy(np.asarray(numpy_blend(local, slot.of(values).numpy(), 0.3)))
        assert torch.equal(slot.parameter, expected.to(slot.parameter.dtype)), slot.name


def test_alpha_zero_overwrites_without_reading() -> None:
    """L26: a NaN in θ does not survive."""
    model = holder(w=torch.full((4,), float("nan")))
    mapped(model).blend(0, torch.arange(4.0), 0.0)
    assert torch.equal(model.w, torch.arange(4.0))


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_blend_for_any_alpha(alpha: float, seed: int) -> None:
    """L26."""
    generator = torch.Generator().manual_seed(seed)
    local, incoming = torch.randn(2, 64, generator=generator)
    model = holder(w=local.clone())
    mapped(model).blend(0, incoming, alpha)
    expected = numpy_blend(local.numpy(), incoming.numpy(), alpha)
    assert (
        model.w.detach().numpy().tobytes()
        == (incoming.numpy() if alpha == 0 else expected).tobytes()
    )


def test_bad_values_are_named() -> None:
    """L27."""
    parameters = mapped(holder(good=torch.zeros(3), bad=torch.zeros(2, 2)))
    flat = torch.zeros(7)
    assert parameters.first_bad(0, flat) is None
    place = next(slot for slot in parameters.slots(0) if slot.name == "bad")
    flat[place.start + 1] = float("nan")
    assert parameters.first_bad(0, flat) == "bad"
    flat[place.start + 1] = 3.4e38
    assert parameters.first_bad(0, flat) is None
    assert parameters.first_bad(0, flat, 3.3961775e38) == "bad"


def test_optimizer_state_survives_a_blend() -> None:
    """L4: moments stay what they were."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    parameters = mapped(model)
    parameters.blend(0, torch.zeros(parameters.numels[0]), 0.5)
    assert all(
        torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True)
    )
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def test_the_path_of_a_gpu_goes_through_its_staging_buffers() -> None:
    """The code of CUDA parameters, with an ordinary buffer and a counted synchronisation."""
    made: list[int] = []
    waits: list[None] = []

    def allocate(numel: int) -> Tensor:
        made.append(numel)
        return torch.full((numel,), float("nan"))

    host = Host(allocate, lambda: waits.append(None), staged=True)
    trainables = find_trainables(strided_model())
    layout = partition(specs_of(trainables), 2)
    staged = Parameters(trainables, layout, host)
    plain = Parameters(find_trainables(strided_model()), layout)
    for fragment, numel in enumerate(staged.numels):
        incoming = torch.randn(numel)
        for parameters in (staged, plain):
            parameters.blend(fragment, incoming, 0.3)
        assert torch.equal(staged.delta(fragment, incoming), plain.delta(fragment, incoming))
        staged.overwrite(fragment, incoming)
        plain.overwrite(fragment, incoming)
        assert torch.equal(staged.snapshot(fragment), plain.snapshot(fragment))
    # A way in and two out, and an overwrite, each waited for.
    assert made == [numel for numel in staged.numels for _ in range(4)]
    assert len(waits) == 4 * len(staged.numels)


def test_what_nobody_refers_to_serves_again() -> None:
    """Point 7 of the learner's memory: no fresh pages for a delta once the first has left."""
    buffers = Buffers()
    first, second = buffers.take(100_000), buffers.take(90_000)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    payload = memoryview(first.numpy().view("u1"))[:7]
    del first
    assert buffers.take(100_000).data_ptr() not in places  # the payload is still to be sent
    del payload, second
    again = [buffers.take(95_000), buffers.take(95_000)]
    assert {buffer.data_ptr() for buffer in again} & places


def test_small_buffers_and_other_sizes() -> None:
    buffers = Buffers()
    assert buffers.take(3).shape == (3,)
    large = buffers.take(4_000_000)
    place = large.data_ptr()
    del large
    assert buffers.take(1_000_000).data_ptr() != place  # too large to be wasted on that
