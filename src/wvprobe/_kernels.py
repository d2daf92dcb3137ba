"""Attention kernels forced one by one, what each really runs, and what the machine can do."""

import contextlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNELS = (*_BACKENDS, "eager")
DIRECTIONS = ("forward", "backward")
# Operations that move or prepare, and do no attention.
_WORK = ("attention", "bmm", "softmax", "matmul", "einsum")


@dataclass(frozen=True)
class Inputs:
    """What all configurations of a device have in common."""

    n_tokens: int
    causal: bool
    device: torch.device
    dtype: torch.dtype
    seed: int

    def heads(self, count: int, width: int) -> Tensor:
        """Return random [1, count, n_tokens, width], the same for the same arguments."""
        generator = torch.Generator().manual_seed(self.seed)
        made = torch.randn(1, count, self.n_tokens, width, generator=generator)
        return made.to(self.device, self.dtype)

    @cached_property
    def mask(self) -> Tensor:
        """Which keys a query does not see, [query, key]."""
        whole = torch.ones(self.n_tokens, self.n_tokens, dtype=torch.bool, device=self.device)
        return whole.triu(1)


def groups(layout: str, widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the calls of a layout: how many heads each takes, and of which width."""
    if layout == "looped":
        return tuple((1, width) for width in widths)
    if layout == "padded":
        return ((len(widths), max(widths)),)
    distinct = sorted(set(widths), reverse=True)
    return tuple((list(widths).count(width), width) for width in distinct)


class Run:
    """One configuration: a kernel, its calls, a direction."""

    def __init__(
        self,
        kernel: str,
        calls: Sequence[tuple[int, int]],
        direction: str,
        inputs: Inputs,
    ) -> None:
        """Make the inputs; nothing runs yet."""
        self.kernel, self.direction, self.inputs = kernel, direction, inputs

        def made(count: int, width: int) -> Tensor:
            return inputs.heads(count, width).requires_grad_(direction == "backward")

        self.heads = [
            (made(count, width), made(count, width), made(count, width)) for count, width in calls
        ]
        self.ran = ""
        self._watch: Any = contextlib.nullcontext()

    def refusal(self) -> str:
        """Run once, note what ran, and return why torch cannot ("" where it can)."""
        try:
            self._watch = recorder = _Recorder()
            self.once()
        except (RuntimeError, NotImplementedError) as error:
            return " ".join(str(error).split())[:200]
        finally:
            self._watch = contextlib.nullcontext()
        self.ran = recorder.told
        self.once()
        return ""

    def once(self) -> float:
        """Return the seconds of one forward or backward."""
        if self.direction == "forward":
            return self._timed(self._forward)
        outputs = self._forward()
        gradients = [torch.ones_like(output) for output in outputs]
        inputs = [tensor for call in self.heads for tensor in call]
        return self._timed(lambda: torch.autograd.grad(outputs, inputs, gradients))

    def _forward(self) -> list[Tensor]:
        backend = _BACKENDS.get(self.kernel)
        if backend is None:
            return [self._eager(*call) for call in self.heads]
        with sdpa_kernel([backend]):
            causal = self.inputs.causal
            return [
                F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v in self.heads
            ]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.inputs.causal:
            scores = scores.masked_fill(self.inputs.mask, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def _timed(self, work: Callable[[], Any]) -> float:
        self._wait()
        with self._watch:
            start = time.perf_counter()
            work()
            self._wait()
            return time.perf_counter() - start

    def _wait(self) -> None:
        if self.inputs.device.type == "cuda":
            torch.cuda.synchronize(self.inputs.device)


class _Recorder(TorchDispatchMode):
    """Notes the operations that torch dispatches, below what Python calls."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(part in name for part in _WORK):
            self._seen[f"aten::{name}"] = None
        return func(*args, **(kwargs or {}))

    @property
    def told(self) -> str:
        """The names in the order in which they first ran."""
        return ", ".join(self._seen)


def peak(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return FLOP/s of a large matrix product and bytes/s of a large copy, the best of several."""
    large = device.type == "cuda"
    size, numbers = (8192, 2**28) if large else (1024, 2**24)
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in "ab")
    source = torch.ones(numbers, device=device, dtype=dtype)
    target = torch.empty_like(source)

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            if large:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            work()
            if large:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    moved = 2 * source.numel() * dtype.itemsize  # read and written
    return 2 * size**3 / best(lambda: a @ b), moved / best(lambda: target.copy_(source))


def named(device: str) -> str:
    """Return what a device is called."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
