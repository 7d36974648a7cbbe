"""What stands for `torch.cuda`, `torch.accelerator` and autocast while devices are emulated."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.emulated_cuda.generators import Generator

if TYPE_CHECKING:
    from tests.emulated_cuda.device import EmulatedCuda

TOTAL = 8 << 30
NAME = "emulated A100"  # whose peak is known


def patch_torch(emulation: EmulatedCuda, stack: ExitStack) -> None:
    """Let torch find the emulated devices until `stack` is closed."""
    boards = [
        FakeGpu(NAME, f"GPU-{index}", memory_total=TOTAL, memory_used="1GiB")
        for index in range(len(emulation.generators))
    ]
    stack.enter_context(FakeNvml(boards))
    for owner, names in (
        (torch.cuda, _cuda(emulation) | _memory(emulation) | _random(emulation) | _streams(emulation)),
        (torch.cuda.nvtx, {name: lambda *given: 0 for name in ("range_push", "range_pop", "mark")}),
        (torch._C, _bindings(emulation)),
        (torch, _autocast() | {"Generator": Generator}),
        (torch.accelerator, _accelerator(emulation)),
        (torch.cuda.memory, {"_record_memory_history": lambda *given, **named: None}),
    ):
        for name, new in names.items():
            stack.enter_context(patch.object(owner, name, new, create=True))
    make_fake = FakeTensor.__new__

    def fake_on_cpu(cls: Any, fake_mode: Any, elem: Any, device: Any, *given: Any, **named: Any) -> Any:
        """Fakes have a device in C++ too."""
        device = torch.device(device)
        return make_fake(
            cls, fake_mode, elem, torch.device("cpu") if device.type == "cuda" else device, *given, **named
        )

    stack.enter_context(patch.object(FakeTensor, "__new__", staticmethod(fake_on_cpu)))
    parse = torch._C._nn._parse_to

    def parse_to(*given: Any, **named: Any) -> Any:
        """Parse the arguments of `Module.to`, to which a tensor may be given."""
        like = named.get("other", given[0] if given else None)
        return (like.device, like.dtype, False, None) if isinstance(like, torch.Tensor) else parse(*given, **named)

    stack.enter_context(patch.object(torch._C._nn, "_parse_to", parse_to))
    initialize = torch.autocast.__init__

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *given: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        initialize(self, device_type, dtype, *given, **named)

    stack.enter_context(patch.object(torch.autocast, "__init__", on_cpu))


def _cuda(emulation: EmulatedCuda) -> dict[str, Any]:
    def number(device: Any = None) -> int:
        index = emulation.index("cuda" if device is None else device)
        if index is None or index < 0:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return index

    def set_device(device: Any) -> None:
        emulation.current = number(device)

    def exchange(index: int) -> int:
        before = emulation.current
        if index >= 0:
            emulation.current = number(index)
        return before

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=NAME, total_memory=TOTAL, major=8, minor=0, multi_processor_count=1, uuid=f"GPU-{number(device)}"
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: len(emulation.generators),
        "current_device": lambda: emulation.current,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": properties,
        "synchronize": lambda device=None: emulation.waits.note("synchronize", "torch.cuda.synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(emulation.waits, "sync_debug_mode", mode),
    }


def _memory(emulation: EmulatedCuda) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        return emulation.allocated(emulation.index("cuda" if device is None else device) or 0)

    def peak(device: Any = None) -> int:
        return max(allocated(device), emulation.peak)

    def reset(device: Any = None) -> None:
        emulation.peak = 0

    def limit(share: float, device: Any = None) -> None:
        emulation.limit = int(share * TOTAL)

    return {
        "memory_allocated": allocated,
        "memory_reserved": peak,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset,
        "mem_get_info": lambda device=None: (TOTAL - peak(device), TOTAL),
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": allocated(device)},
        "memory_summary": lambda device=None, abbreviated=False: f"{allocated(device)} bytes",
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": limit,
    }


def _random(emulation: EmulatedCuda) -> dict[str, Any]:
    def generator(device: Any = "cuda") -> Generator:
        return emulation.generators[emulation.index(device) or 0]

    def seed_all(seed: int) -> None:
        for each in emulation.generators:
            each.manual_seed(seed)

    def set_all(states: Any) -> None:
        for index, state in enumerate(states):
            emulation.generators[index].set_state(state)

    return {
        "default_generators": tuple(emulation.generators),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": seed_all,
        "seed": lambda: generator().seed(),
        "initial_seed": lambda: generator().initial_seed(),
        "get_rng_state": lambda device="cuda": generator(device).get_state(),
        "set_rng_state": lambda state, device="cuda": generator(device).set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in emulation.generators],
        "set_rng_state_all": set_all,
    }


def _streams(emulation: EmulatedCuda) -> dict[str, Any]:
    class Event:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.at = 0.0

        def record(self, stream: Any = None) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return True

        def wait(self, stream: Any = None) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

        def synchronize(self) -> None:
            emulation.waits.note("synchronize", "Event.synchronize")

    class Stream:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.device = torch.device("cuda", emulation.current)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record()
            return event

        def wait_event(self, event: Event) -> None:
            pass

        def wait_stream(self, stream: Stream) -> None:
            pass

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            emulation.waits.note("synchronize", "Stream.synchronize")

    @contextmanager
    def on_stream(stream: Any) -> Any:
        yield

    only = Stream()
    return {
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "current_stream": lambda device=None: only,
        "default_stream": lambda device=None: only,
        "set_stream": lambda stream: None,
    }


def _bindings(emulation: EmulatedCuda) -> dict[str, Any]:
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        """Group lists of tensors by the device and dtype of the first list's, which C++ takes to be on the CPU."""
        found: dict[Any, Any] = {}
        for (_, dtype), (parts, indices) in group(lists, True).items():
            for position, index in enumerate(indices):
                key = (parts[0][position].device, dtype)
                columns, numbers = found.setdefault(key, ([[] for _ in lists], []))
                for column, part in zip(columns, parts, strict=True):
                    if part:
                        column.append(part[position])
                numbers.append(index)
        return {key: (columns, numbers if with_indices else []) for key, (columns, numbers) in found.items()}

    return {
        "_group_tensors_by_device_and_dtype": grouped,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_getDeviceCount": lambda: len(emulation.generators),
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def _autocast() -> dict[str, Any]:
    """The CPU's autocast for both kinds of device: there is one kind of kernel here."""

    def for_cpu(function: Any) -> Any:
        return lambda *given: function("cpu", *given[1:]) if given[:1] in ((), ("cuda",)) else function(*given)

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled")
    return {name: for_cpu(getattr(torch, name)) for name in names}


def _accelerator(emulation: EmulatedCuda) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: len(emulation.generators),
        "current_device_index": lambda: emulation.current,
        "current_device_idx": lambda: emulation.current,
        "current_stream": lambda device=None: torch.cuda.current_stream(device),
        "synchronize": lambda device=None: torch.cuda.synchronize(device),
    }
