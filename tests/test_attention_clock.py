"""The clock: what it says ran did run, floors by hand, and a spread without luck in it."""

import pytest
import torch

from wvprobe import _kernels
from wvprobe._types import Provenance, Result
from wvprobe.attention_clock import AttentionTimes, Timed, time_attention
from wvprobe.errors import DeviceError, InputError

SMALL = {"d_model": 32, "n_tokens": 16, "d_heads": (8, 16), "seconds": 0.0}


@pytest.fixture(scope="module")
def small():
    return time_attention(**SMALL, uneven=(16, 8, 8), device="cpu")


def made_up(seconds, *, kernel="flash", directions=("forward",), widths=(8, 64, 128)):
    """Return times as if they had been measured, [configuration, round]."""
    timed = tuple(
        Timed("cpu", kernel, "aten::nothing", "even", (w,) * (128 // w), direction, 1e-3, "FLOPs")
        for direction in directions
        for w in widths
    )
    times = torch.tensor(seconds, dtype=torch.float64)
    return AttentionTimes(Provenance.of("none", ""), timed, times, (), 128, 16, {"cpu": (1.0, 1.0)})


def test_every_kernel_that_torch_has_here_is_timed_and_named(small):
    frame = small.to_frame()
    ran = frame.groupby("kernel")["ran"].agg("; ".join)
    assert {"flash", "math", "eager"} <= set(ran.index)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran["flash"]
    assert "flash" not in ran["math"] and "flash" not in ran["eager"]
    assert "softmax" in ran["math"] and "aten::bmm" in ran["eager"]
    backward = frame[(frame["kernel"] == "flash") & (frame["direction"] == "backward")]
    alone = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"  # no forward in it
    assert set(backward[backward["layout"] == "even"]["ran"]) == {alone}
    forward = frame[(frame["kernel"] == "flash") & (frame["direction"] == "forward")]
    assert not forward["ran"].str.contains("backward").any()
    # What a kernel was not timed on is told, with torch's own words.
    refused = {kernel for kernel, _, _ in small.refused}
    assert refused | set(ran.index) == set(_kernels.KERNELS)
    assert all(reason for _, _, reason in small.refused)


def test_frame_has_a_row_a_configuration_with_its_noise(small, tmp_path):
    frame = small.to_frame()
    layouts = frame[frame["kernel"] == "eager"].groupby("layout").size()
    assert dict(layouts) == {"even": 4, "padded": 2, "looped": 2, "grouped": 2}
    assert (frame["seconds"] > 0).all()
    assert ((frame["low"] <= frame["seconds"]) & (frame["seconds"] <= frame["high"])).all()
    assert (frame["n"] == 11).all()
    even = frame[frame["layout"] == "even"]
    assert (even["n_heads"] * even["d_head"] == 32).all()
    assert small.provenance.settings["threads"] == torch.get_num_threads()
    assert Result.load(small.save(tmp_path)).to_frame().equals(frame)


def test_the_clock_stops_when_its_time_is_up():
    wanted = {**SMALL, "kernels": ["flash"], "uneven": (), "directions": ["forward"]}
    longer = time_attention(**wanted | {"seconds": 0.3, "d_heads": (8, 16)}, device="cpu")
    assert 11 < longer.seconds.shape[1] <= 101


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "math", "eager"])
def test_every_kernel_computes_attention(kernel, causal):
    inputs = _kernels.Inputs(11, causal, torch.device("cpu"), torch.float32, 0)
    run = _kernels.Run(kernel, ((3, 8), (2, 16)), "forward", inputs)
    for (q, k, v), found in zip(run.heads, run._forward(), strict=True):
        scores = (q.double() @ k.double().transpose(-1, -2)) / q.shape[-1] ** 0.5
        if causal:
            scores = scores + torch.full((11, 11), float("-inf")).triu(1)
        torch.testing.assert_close(
            found.double(), scores.softmax(-1) @ v.double(), atol=1e-6, rtol=1e-5
        )


def test_layouts_hold_all_heads():
    widths = (16, 8, 8)
    assert _kernels.groups("looped", widths) == ((1, 16), (1, 8), (1, 8))
    assert _kernels.groups("grouped", widths) == ((1, 16), (2, 8))
    assert _kernels.groups("padded", widths) == ((3, 16),)
    assert _kernels.groups("even", (8, 8)) == ((2, 8),)


@pytest.mark.parametrize(
    ("causal", "direction", "peak", "floor", "bound"),
    [
        # 4 FLOPs a dimension (32) and visible pair (16 · 17 / 2); 4 · 16 · 32 numbers of 4 bytes.
        (True, "forward", (1e6, 1e9), 4 * 32 * 136 / 1e6, "FLOPs"),
        (False, "forward", (1e6, 1e9), 4 * 32 * 256 / 1e6, "FLOPs"),
        (True, "backward", (1e6, 1e9), 8 * 32 * 136 / 1e6, "FLOPs"),
        (True, "forward", (1e12, 1e6), 4 * 16 * 32 * 4 / 1e6, "bytes"),
        (True, "backward", (1e12, 1e6), 8 * 16 * 32 * 4 / 1e6, "bytes"),
    ],
)
def test_floors_by_hand(monkeypatch, causal, direction, peak, floor, bound):
    monkeypatch.setattr(_kernels, "peak", lambda *_: peak)
    found = time_attention(
        **SMALL, causal=causal, kernels=["eager"], directions=[direction], device="cpu"
    )
    even = [what for what in found.timed if what.layout == "even"]
    assert [what.floor for what in even] == pytest.approx([floor] * len(even))
    assert {what.bound for what in even} == {bound}


@pytest.mark.parametrize(("direction", "flops"), [("forward", 4), ("backward", 4 + 8)])
def test_flops_of_the_floor_are_those_that_torch_counts(direction, flops):
    from torch.utils.flop_counter import FlopCounterMode

    # Unmasked: written out, attention multiplies every pair.
    inputs = _kernels.Inputs(16, False, torch.device("cpu"), torch.float32, 0)
    run = _kernels.Run("eager", ((4, 8),), direction, inputs)
    with FlopCounterMode(display=False) as counter:
        run.once()  # a backward after its forward
    assert counter.get_total_flops() == flops * 32 * 16 * 16


class TestSpread:
    def test_the_ratio_is_taken_on_rounds_that_did_not_pick(self):
        # By luck 8 is slow in the rounds that pick; in the others it is as fast as the rest.
        picked, held = (9.0, 1.0, 2.0), (1.0, 1.0, 2.0)
        times = [[a, b] * 6 for a, b in zip(picked, held, strict=True)]
        found = made_up(times).spread()
        assert (found.slowest, found.fastest) == (8, 64)
        assert (found.ratio, found.low, found.high) == (1.0, 1.0, 1.0)
        assert found.noise == pytest.approx(8 / 9)

    def test_a_steady_difference_is_found(self):
        found = made_up([[3.0] * 12, [2.0] * 12, [1.0] * 12]).spread()
        assert (found.slowest, found.fastest, found.ratio, found.noise) == (8, 128, 3.0, 0.0)
        assert (found.low, found.high) == (3.0, 3.0)
        usual = made_up([[3.0] * 12, [2.0] * 12, [1.0] * 12]).spread(widths=(64, 128))
        assert (usual.slowest, usual.ratio) == (64, 2.0)

    def test_the_interval_covers_what_noise_does(self):
        generator = torch.Generator().manual_seed(0)
        times = 1 + 0.3 * torch.rand(3, 40, generator=generator)
        found = made_up((times * torch.tensor([2.0, 1.0, 1.0])[:, None]).tolist()).spread()
        assert found.low < 2.0 < found.high and found.high - found.low < 0.6

    def test_the_fastest_kernel_is_told_by_direction(self):
        slow = made_up([[3.0] * 11] * 3 + [[1.0] * 11] * 3, directions=("forward", "backward"))
        fast = made_up(
            [[2.0] * 11] * 3 + [[2.0] * 11] * 3, kernel="math", directions=("forward", "backward")
        )
        both = AttentionTimes(
            slow.provenance, slow.timed + fast.timed, torch.cat([slow.seconds, fast.seconds]),
            (), 128, 16, slow.peak,
        )  # fmt: skip
        assert both.fastest_kernel() == "math"
        assert both.fastest_kernel("backward") == "flash"

    def test_one_width_has_no_spread(self):
        with pytest.raises(InputError, match="`widths` must be two that were timed with flash"):
            made_up([[1.0] * 11] * 3).spread(widths=(64,))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"d_heads": (7,)}, "`d_heads` must be divisors of d_model = 32. Got 7"),
        ({"d_heads": (64,)}, "`d_heads` must be divisors of d_model = 32. Got 64"),
        ({"d_heads": ()}, "`d_heads` must be at least one width"),
        ({"uneven": (16, 8)}, "`uneven` must be widths that sum to d_model = 32"),
        ({"kernels": ["flsh"]}, "`kernels` must be one of .*Did you mean 'flash'"),
        ({"directions": ["sideways"]}, "`directions` must be one of 'forward', 'backward'"),
        ({"dtype": "float31"}, "`dtype` must be one of 'float32'"),
        ({"n_tokens": 0}, "`n_tokens` must be an int of at least 1"),
    ],
)
def test_wrong_inputs(wrong, told):
    with pytest.raises(InputError, match=told):
        time_attention(**SMALL | wrong, device="cpu")


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceError, match="there is no device 'xpu' here; there is cpu"):
        time_attention(**SMALL, device="xpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no kernel of cudnn runs on cpu"):
            time_attention(**SMALL, kernels=["cudnn"], device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_beside_the_cpu():
    found = time_attention(**SMALL | {"d_model": 256, "n_tokens": 128}, uneven=())
    assert {what.device for what in found.timed} == {"cpu", "cuda"}


def test_the_default_uneven_split_has_the_mean_of_an_even_one():
    found = time_attention(512, 4, d_heads=(64,), kernels=["eager"], seconds=0.0, device="cpu")
    odd = next(what.widths for what in found.timed if what.layout == "padded")
    assert odd == (128, 128, 64, 64, 32, 32, 32, 32)
    without = time_attention(40, 4, d_heads=(8,), kernels=["eager"], seconds=0.0, device="cpu")
    assert {what.layout for what in without.timed} == {"even"}
