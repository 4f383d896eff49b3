"""A GPU that computes on the CPU: for tests of which tensors meet where, on machines without one.

Tensors of its device hold a tensor of the CPU. Operators check what those of CUDA check before they run on it: that all
their tensors lie on one device, and that they exist for GPUs. What makes the host wait for the device is counted, by
the line of the project that asks for it. torch's own questions about the device are answered; nothing of the project is
replaced.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.models.placement import sent

DEVICE = torch.device("cuda", 0)
_NARROW = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "scaled_dot_product_attention"}
_WIDE = {"exp", "pow", "__pow__", "rsqrt", "softplus", "layer_norm", "norm", "sum", "cumsum", "softmax", "log_softmax"}
"""What autocast computes in its type, and in float32."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_ANY_DEVICE = {"copy_", "_to_copy", "detach", "alias"}
_NO_SCALARS = {"index_select", "gather", "index_copy", "index_copy_", "index_add_", "scatter_add_", "mm", "bmm", "cat"}
"""Operators that refuse a tensor of the CPU even where it is a single number."""
_UNDETERMINED = {"cumsum", "put_", "histc", "bincount", "median"}
"""What has no deterministic kernel: `torch.use_deterministic_algorithms` (of `cumsum`, for floating point)."""
_ROOT = str(Path(__file__).parents[1] / "trivium")
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "_unique2", "is_nonzero")

aten = torch.ops.aten


_DATA: Any = torch.Tensor.data


class GpuTensor(torch.Tensor):
    """A tensor of the emulated device; `inner` holds its numbers."""

    inner: Any
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> GpuTensor:
        shape: dict[str, Any] = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "device": "meta"}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **shape, dtype=inner.dtype)
        made.inner = inner
        return made

    device: Any = property(lambda self: DEVICE)
    is_cuda: Any = property(lambda self: True)
    is_meta: Any = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.inner})"

    @property
    def data(self) -> Any:
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        _DATA.__set__(self, value)
        self.inner = value.inner

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __deepcopy__(self, memo: Any) -> Any:
        copied = GpuTensor(self.inner.detach().clone())
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the emulation")


class EmulatedGpu(TorchDispatchMode):
    """Within it, the device `cuda` is there, in the thread that entered it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()
        """What waited for the device: "operator trivium/file.py:line"; "operator transformers, trivium/file.py:line"
        where transformers asks."""
        self.copies = Counter[str]()
        """What was copied to the device, waited for or not: "trivium/file.py:line"."""
        self.operators = set[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is no compiler to hide from, and to import it takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        # torch's own code asks for the device of a tensor.
        if "device" in kwargs and str(kwargs["device"]) == "meta" and not _Calls.meta:
            kwargs["device"] = DEVICE
        name = func._schema.name.removeprefix("aten::")
        if name in ("pin_memory", "_pin_memory"):
            return _pinned(args[0].clone())
        tensors = _tensors([*args, *kwargs.values()])
        is_ours = any(isinstance(each, GpuTensor) for each in tensors)
        if not (is_ours or _is_gpu(kwargs.get("device")) or kwargs.get("pin_memory")):
            return func(*args, **kwargs)
        if _decomposes(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._run(func, name, args, kwargs, tensors)

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        wrappers = {id(each.inner): each for each in tensors if isinstance(each, GpuTensor)}
        target = kwargs.get("device")
        on_gpu = bool(wrappers) if target is None else _is_gpu(target)
        _check_devices(func, name, args, tensors)
        _check_exists(func, name)
        if torch.are_deterministic_algorithms_enabled() and name in _UNDETERMINED and args[0].is_floating_point():
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        self.operators.add(str(func))
        self._count(name, args, kwargs, on_gpu)
        inner = {k: v for k, v in _mapped(_inner, kwargs).items() if k not in ("pin_memory", "non_blocking")}
        if target is not None:
            inner["device"] = torch.device("cpu")
        kernel: Any = _OWN.get(func, func)
        out = kernel(*_mapped(_inner, args), **inner)
        if kwargs.get("pin_memory"):
            return _pinned(out)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or any(value is each for each in tensors):
                return value
            if id(value) in wrappers:
                return wrappers[id(value)]
            return GpuTensor(value) if on_gpu else value

        return _mapped(wrapped, out)

    def _count(self, name: str, args: Any, kwargs: dict[str, Any], on_gpu: bool) -> None:
        waits = name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if name in _INDEXING:
            indices = [each for each in args[1] if each is not None]
            waits = any(each.dtype == torch.bool or not isinstance(each, GpuTensor) for each in indices)
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            to, of = on_gpu if name == "_to_copy" else isinstance(args[0], GpuTensor), isinstance(source, GpuTensor)
            is_free = (kwargs.get("non_blocking") or args[2:] == (True,)) and getattr(source, "pinned", False)
            waits, name = to != of and not is_free, "to the host" if of else "to the device"
            if to and not of:
                self.copies[_caller()] += 1
        if waits:
            self.waits[f"{name} {_caller()}"] += 1


@cache
def _decomposes(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return func not in _OWN and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What the function makes of everything in lists, tuples and dicts (torch's own takes several times as long)."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among some arguments, and in the lists among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, GpuTensor) else value


def _pinned(tensor: Any) -> torch.Tensor:
    tensor.pinned = True
    return tensor


def _check_devices(func: Any, name: str, args: Any, tensors: Sequence[torch.Tensor]) -> None:
    here = [each for each in tensors if not isinstance(each, GpuTensor)]
    if name in _ANY_DEVICE or not here or len(here) == len(tensors):
        return
    first = args[0]
    if name in _INDEXING and isinstance(first, GpuTensor):  # which takes indices to the device
        here = [each for each in here if not any(each is index for index in args[1])]
    into_cpu = isinstance(first, torch.Tensor) and not isinstance(first, GpuTensor) and name.endswith("_")
    if into_cpu or any(each.dim() or name in _NO_SCALARS for each in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")


@cache
def _kernels() -> dict[str, str]:
    """What torch's list of operators says of each: where it has kernels."""
    import torchgen

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    blocks = path.read_text(encoding="utf-8").split("\n- func: ")[1:]
    return {block.partition("(")[0]: block.partition("\n")[2] for block in blocks}


@cache
def _check_exists(func: Any, name: str) -> None:
    overload = func._schema.overload_name
    block = "" if func in _OWN else _kernels().get(f"{name}.{overload}" if overload else name, "")
    kernels = re.search(r"^  dispatch:\n((?:    .*\n?)+)", block, re.M)
    if kernels and "structured_delegate" not in block and not re.search("CUDA|Composite", kernels[1]):
        raise NotImplementedError(f"Could not run {func} with arguments from the 'CUDA' backend")


def _caller() -> str:
    frame, by = sys._getframe(1), ""
    while frame is not None:
        file, is_ours, is_theirs = _place(frame.f_code)
        by = "transformers, " if is_theirs else by
        if is_ours:
            return f"{by}trivium{file.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _place(code: CodeType) -> tuple[str, bool, bool]:
    """The file of some code, whether it is the project's, and whether it is that of transformers."""
    file = code.co_filename
    return file, file.startswith(_ROOT) and code is not sent.__code__, "/transformers/" in file


# --------------------------------------------------------------------------- what a CPU has no kernels for


def _widened(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    assert a.dtype == b.dtype
    assert a.dtype in (torch.bfloat16, torch.float16) or a.dtype == out_dtype
    return a.to(out_dtype) @ b.to(out_dtype)


def _added(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor):
    assert into is out
    return out.add_(_widened(a, b, out_dtype))


def _efficient(q, k, v, bias, lse, dropout=0.0, is_causal=False, *, scale=None):
    assert q.shape[1] == k.shape[1], "grouped heads"
    out, norm = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, norm, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_backward(grad, q, k, v, bias, out, norm, seed, offset, dropout, mask, is_causal=False, *, scale=None):
    of = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, norm, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return (*of, None)


def _sequences(q, k, v, cu_q, cu_k, max_q, max_k, scale, window):
    """Of each sequence: its queries and keys as slices, weights (H, L, S), and keys and values of each query head."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert window[1] == 0
    for b in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        wide = [x[keys].float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
        length, size = queries.stop - queries.start, keys.stop - keys.start
        assert length <= max_q
        assert size <= max_k
        behind = torch.arange(length)[:, None] + size - length - torch.arange(size)
        seen = (behind >= 0) & ((behind <= window[0]) | (window[0] < 0))
        scores = torch.einsum("lhd,shd->hls", q[queries].float(), wide[0]) * (scale or q.shape[-1] ** -0.5)
        yield queries, keys, scores.masked_fill(~seen, -torch.inf).softmax(-1), *wide


def _varlen(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None, enable_gqa=False, *rest):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    parts = _sequences(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size)
    out = torch.cat([torch.einsum("hls,shd->lhd", weights, values) for _, _, weights, _, values in parts])
    return out.to(q.dtype), q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale=None, window=None, *rest):
    of_q, of_k, of_v = (torch.zeros(x.shape) for x in (q, k, v))
    for queries, keys, weights, wide, values in _sequences(q, k, v, cu_q, cu_k, max_q, max_k, scale, window):
        g = grad[queries].float()
        of_weights = torch.einsum("lhd,shd->hls", g, values)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        of_scores *= scale or q.shape[-1] ** -0.5
        of_q[queries] += torch.einsum("hls,shd->lhd", of_scores, wide)
        for of, each in (
            (of_k, torch.einsum("hls,lhd->shd", of_scores, q[queries].float())),
            (of_v, torch.einsum("hls,lhd->shd", weights, g)),
        ):
            of[keys] += each.unflatten(1, (of.shape[1], -1)).sum(2)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


_OWN: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: _widened,
    aten.bmm.dtype: _widened,
    aten.addmm.dtype_out: _added,
    aten.histc.default: lambda x, *how: x.float().histc(*how).to(x.dtype),
    aten._fused_sdp_choice.default: lambda *_, **__: 2,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}


class _Generator(torch.Generator):
    device: Any = property(lambda self: DEVICE)


class _Calls(TorchFunctionMode):
    """Calls that torch answers before any operator runs."""

    meta = 0
    """Calls that ask for the device `meta` by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # an attribute of a tensor: half of all calls
            return func(*args)
        kwargs = {**(kwargs or {})}
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = DEVICE
        if torch.is_autocast_enabled("cuda") and func.__name__ in _NARROW | _WIDE:
            dtype = torch.get_autocast_dtype("cuda") if func.__name__ in _NARROW else torch.float32
            args, kwargs = _mapped(partial(_autocast, dtype), (args, kwargs))
        if func is torch.Tensor.backward:
            with self:  # where layers are computed again
                ones = torch.ones_like(args[0])
                return _engine_run_backward((args[0],), (ones,), False, False, (), True, accumulate_grad=True)
        if func is torch.Tensor.to:
            return _moved(*args, **kwargs)
        if func is torch.tensor and _is_gpu(kwargs.get("device")):
            return _moved(torch.tensor(*args, **{**kwargs, "device": "cpu"}), DEVICE)
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], GpuTensor):
            return _attention(*args, **kwargs)
        named = "device" in kwargs and str(kwargs["device"]) == "meta"
        _Calls.meta += named
        try:
            result = func(*args, **kwargs)
        finally:
            _Calls.meta -= named
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != result.device.type:
            raise RuntimeError(f"Expected a {result.device.type!r} device type for generator ({func})")
        return result


def _autocast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, GpuTensor) and value.is_floating_point() and value.dtype != torch.float64:
        return _moved(value, dtype)
    return value


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`tensor.to`"""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for each in args:
        if isinstance(each, torch.Tensor):
            device, dtype = each.device, each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, str | torch.device):
            device = each
    device, dtype = torch.device(device or tensor.device), dtype or tensor.dtype
    if not kwargs.get("copy") and device.type == tensor.device.type and dtype == tensor.dtype:
        return tensor
    where = DEVICE if device.type == "cuda" else device
    return aten._to_copy(tensor, dtype=dtype, device=where, non_blocking=bool(kwargs.get("non_blocking")))


def _attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """By the memory-efficient kernel, which is there for every type; it takes no grouped heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if enable_gqa else x for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Generator[EmulatedGpu]:
    """The device is there in the block, in this thread."""
    import torch.nn.attention.varlen

    _OWN[torch.ops.torch_attn._varlen_attn.default] = _varlen
    _OWN[torch.ops.torch_attn._varlen_attn_backward.default] = _varlen_backward
    properties = SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0, uuid="gpu-0", name="emulated")
    real = torch.Generator
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "emulated",
        "synchronize": lambda *_: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": _Generator() if _is_gpu(device) else real())
    with EmulatedGpu() as gpu, _Calls():
        yield gpu
