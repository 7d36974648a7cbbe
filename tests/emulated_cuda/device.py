"""A CUDA device without a GPU, to find what is on the wrong device and what makes the host wait.

Every tensor is a real tensor on the CPU, of its real type. Which storages "are on" `cuda:0` or `cuda:1` stands in a
table beside them; `Tensor.device`, `.to`, the factories and `torch.cuda` answer from that table, and a
TorchDispatchMode looks at every operator: it raises where devices are mixed as CUDA does, counts what the host waits
for (`waits.py`), and notes the devices of the results. So a stock `Trainer(accelerator="cuda")` trains, autocast and
GradScaler compute in real float16, foreach and fused optimizers take the paths they take on CUDA, and a device has
random numbers of its own.

What it shows: tensors that are made, left or restored on the wrong device, branches on the device that change values,
and reads and copies that stall. What it cannot show: anything about kernels, their rounding and determinism; streams,
which are in order here; memory (`memory_allocated` counts living storages); which of its operators autocast runs in
float16, as the lists are those of the CPU; NCCL; `torch.compile`, whose graphs carry devices of their own; lazy
modules before their first call; NVML, for which `FakeNvml` stands; what C++ alone does with a device. It is never
evidence that something runs on CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.emulated_cuda import generators, stubs
from tests.emulated_cuda.waits import Waits

_CPU, _UNDECIDED = -1, -2  # undecided: made inside an operator of several steps; the first tensor that it meets decides

_FACTORIES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range scalar_tensor
    sparse_coo_tensor tensor tril_indices triu_indices zeros
""".split()  # noqa: SIM905
_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
_NEW = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
_FROM_DATA = {"as_tensor", "asarray", "new_tensor", "sparse_coo_tensor", "tensor"}

aten = torch.ops.aten
# What asks the device for a value or for the shape of its result
_READS = """
    _local_scalar_dense equal nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount multinomial
    repeat_interleave _linalg_check_errors histc is_nonzero
""".split()  # noqa: SIM905
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class EmulatedCuda(TorchDispatchMode):
    """Within it there are CUDA devices; `waits` lists what the host waited for."""

    active: EmulatedCuda | None = None

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.waits = Waits(self._arrive)
        self.current = 0
        self.peak = 0
        self.limit = stubs.TOTAL
        self._on_their_way: list[tuple[Tensor, Tensor]] = []
        self.generators = [generators.Generator(f"cuda:{index}") for index in range(count)]
        self._homes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._limit = 1000
        self._wanted = threading.local()
        self._patches = ExitStack()

    def __enter__(self) -> EmulatedCuda:
        assert EmulatedCuda.active is None, "there is one emulation at a time"
        EmulatedCuda.active = self
        _device_constructors()  # those of torch, before they are patched
        self._patches.callback(setattr, EmulatedCuda, "active", None)
        self._patch_tensors()
        self._patch_factories()
        self._patch_storages()
        stubs.patch_torch(self, self._patches)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._arrive()
        super().__exit__(*exception)
        self._patches.close()
        _device_constructors.cache_clear()  # which may know those that are patched
        self._homes.clear()
        self._pinned.clear()

    # Where a tensor is

    def index(self, device: Any) -> int | None:
        """Return the number of a device of ours, -1 for the CPU, None for another kind."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cpu":
            return _CPU
        if device.type != "cuda":
            return None
        index = self.current if device.index is None else device.index
        if index >= len(self.generators):
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {len(self.generators)})")
        return int(index)

    def home(self, tensor: Tensor) -> int:
        storage = _storage(tensor)
        return _CPU if storage is None else self.home_of_storage(storage)

    def home_of_storage(self, storage: torch.UntypedStorage) -> int:
        found = self._homes.get(storage._cdata)
        return _CPU if found is None else found[1]

    def allocated(self, index: int) -> int:
        """Return how many bytes the living storages on a device hold."""
        self._drop_dead()
        held = sum(
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
            for reference, home in self._homes.values()
            if home == index
        )
        self.peak = max(self.peak, held)
        return held

    def place(self, made: Any, home: int) -> Any:
        for tensor in tree_leaves(made):
            storage = _storage(tensor) if isinstance(tensor, Tensor) else None
            if storage is not None:
                self._place_storage(storage, home)
        return made

    def _place_storage(self, storage: torch.UntypedStorage, home: int) -> None:
        if home == _CPU:
            self._homes.pop(storage._cdata, None)
        else:
            self._homes[storage._cdata] = (StorageWeakRef(storage), home)
        if len(self._homes) > self._limit:
            self._drop_dead()
            self._limit = 2 * len(self._homes) + 1000

    def _drop_dead(self) -> None:
        # a weak reference keeps the address of its storage from being given to another one
        for cdata in [cdata for cdata, (reference, _) in self._homes.items() if reference.expired()]:
            del self._homes[cdata]

    # What every operator goes through

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        homes = [self.home(tensor) for tensor in given]
        home = self._common_home(func, args, given, homes)
        if home >= 0:
            self._note_reads(func, args, home)
        with self._random_numbers_of(home, func, args, kwargs):
            made = func(*args, **kwargs)
        is_to_host = func.overloadpacket is aten.copy_ and len(given) == 2 and homes[0] < 0 <= homes[1]
        if is_to_host and not self._blocks(given, homes, args):
            self._send(given[0])
        if home != _CPU:
            old = {storage._cdata for storage in map(_storage, given) if storage is not None}
            for tensor in tree_leaves(made):
                storage = _storage(tensor) if isinstance(tensor, Tensor) else None
                if storage is not None and storage._cdata not in old:
                    self._place_storage(storage, home)
        return made

    def _common_home(self, func: Any, args: tuple[Any, ...], given: list[Tensor], homes: list[int]) -> int:
        packet = func.overloadpacket
        wanted: int | None = getattr(self._wanted, "home", None)
        if packet in (aten.copy_, aten._copy_from) and len(given) == 2:
            return self._copied(given, homes, args)
        ours = {home for home in homes if home >= 0}
        if not ours:
            if wanted is not None:
                return wanted
            undecided = not any(h == _CPU and t.dim() for t, h in zip(given, homes, strict=True))
            return _UNDECIDED if undecided and (not given or _UNDECIDED in homes) else self._decide(given, homes, _CPU)
        (home, *others) = sorted(ours)
        written = _written(func, args)
        for tensor, where in zip(given, homes, strict=True):
            if where != _CPU:
                continue
            is_scalar = tensor.dim() == 0 and not any(tensor is one for one in written)
            if is_scalar and not packet.__name__.startswith(("_fused", "_amp", "cat", "stack")):
                continue
            if packet in _INDEXING and tensor is not args[0] and any(tensor is one for one in args[1]):
                self.waits.note("to device", f"{packet} by an index on the CPU")
                continue
            others.append(_CPU)
        if others:
            names = " and ".join(_name(where) for where in (home, others[0]))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({packet})"
            )
        self._decide(given, homes, home)
        return home if wanted is None else wanted

    def _decide(self, given: list[Tensor], homes: list[int], home: int) -> int:
        for tensor, where in zip(given, homes, strict=True):
            if where == _UNDECIDED:
                self.place(tensor, home)
        return home

    def _copied(self, given: list[Tensor], homes: list[int], args: tuple[Any, ...]) -> int:
        """Note a copy into a tensor, and return where that is."""
        (target, source), (to, origin) = given, homes
        if to == _UNDECIDED:
            to = self._decide([target], [_UNDECIDED], origin)
        if origin == _UNDECIDED:
            origin = self._decide([source], [_UNDECIDED], to)
        self.note_copy(source, origin, to, blocks=self._blocks(given, homes, args))
        return to

    def _blocks(self, given: list[Tensor], homes: list[int], args: tuple[Any, ...]) -> bool:
        """Whether the host waits for a copy: it does, unless told not to, and always for one to memory not pinned."""
        non_blocking = len(args) > 2 and bool(args[2])
        return not non_blocking or (homes[0] < 0 <= homes[1] and not self._is_pinned(given[0]))

    def _send(self, target: Tensor) -> None:
        """Let a copy to the host arrive when it is waited for; before, its memory holds other values."""
        self._on_their_way.append((target, target.clone()))
        target.fill_(1)

    def _arrive(self) -> None:
        arriving, self._on_their_way = self._on_their_way, []
        for target, values in arriving:
            with torch.no_grad(), torch.utils._mode_utils.no_dispatch():
                target.copy_(values)

    def note_copy(self, source: Tensor, origin: int, to: int, *, blocks: bool) -> None:
        if origin >= 0 and to == _CPU:
            self.waits.note("to host", f"copy of {tuple(source.shape)}", blocks=blocks)
        elif origin == _CPU and to >= 0:
            self.waits.note("to device", f"copy of {tuple(source.shape)}", blocks=blocks)

    def _note_reads(self, func: Any, args: tuple[Any, ...], home: int) -> None:
        packet = func.overloadpacket
        if packet.__name__ in _READS:
            self.waits.note("read", str(packet))
        elif packet in _INDEXING:
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.waits.note("read", f"{packet} by a mask")

    @contextmanager
    def _random_numbers_of(self, home: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Let an operator on a device of ours draw from the device's generator."""
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        if any(generators.Generator.is_emulated(generator) != (home >= 0) for generator in given):
            expected, found = ("cuda", "cpu") if home >= 0 else ("cpu", "cuda")
            raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")
        if torch.Tag.nondeterministic_seeded not in func.tags or home < 0 or given:
            yield
            return
        of_cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generators[home].get_state())
        try:
            yield
        finally:
            self.generators[home].set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(of_cpu)

    # Python's view of tensors and storages

    def _patch(self, target: Any, name: str, new: Any) -> None:
        own = name in vars(target) if isinstance(target, type) else hasattr(target, name)
        if own:
            self._patches.enter_context(patch.object(target, name, new))
        else:  # a class that inherits the name from one of C++
            setattr(target, name, new)
            self._patches.callback(delattr, target, name)

    def _patch_tensors(self) -> None:
        of_cpp = torch._C.TensorBase
        to, numpy, to_list, its_type = (getattr(Tensor, name) for name in ("to", "numpy", "tolist", "type"))
        device, grad = of_cpp.device, of_cpp.grad

        def device_of(tensor: Tensor) -> torch.device:
            home = self.home(tensor)
            return torch.device("cuda", home) if home >= 0 else device.__get__(tensor)

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target, dtype, non_blocking, kwargs = self._parse_to(tensor, args, kwargs)
            home = self.home(tensor)
            if target is None or target == home or (home == _UNDECIDED and target == _CPU):
                return to(tensor, tensor.dtype if dtype is None else dtype, **kwargs)
            if isinstance(target, torch.device):
                return to(tensor, target, dtype or tensor.dtype, **kwargs)
            # torch pins the memory of a copy to the host that does not block
            self.note_copy(tensor, home, target, blocks=not non_blocking)
            kwargs.pop("copy", None)
            result: Tensor = _Move.apply(tensor, target, dtype or tensor.dtype, kwargs)
            if non_blocking and target == _CPU:
                self._send(result.detach())
            return result

        def to_numpy(tensor: Tensor, *, force: bool = False) -> Any:
            if self.home(tensor) >= 0:
                if not force:
                    raise TypeError(
                        f"can't convert {device_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the "
                        "tensor to host memory first."
                    )
                tensor = moved(tensor.detach(), "cpu")
            return numpy(tensor, force=force)

        def as_list(tensor: Tensor) -> Any:
            if self.home(tensor) >= 0:
                self.waits.note("read", "tolist")
            return to_list(tensor)

        def named_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            named = its_type(tensor, *args, **kwargs)
            return (
                named.replace("torch.", "torch.cuda.") if isinstance(named, str) and self.home(tensor) >= 0 else named
            )

        def pinned(tensor: Tensor, device: Any = None) -> Tensor:
            if self.home(tensor) >= 0:
                raise RuntimeError(f"cannot pin '{named_type(tensor)}' only dense CPU tensors can be pinned")
            return tensor if self._is_pinned(tensor) else self.pin(tensor.clone())

        def set_grad(tensor: Tensor, value: Tensor | None) -> None:
            if isinstance(value, Tensor) and self.home(value) != self.home(tensor):
                raise RuntimeError("assigned grad has data located on a different device")
            grad.__set__(tensor, value)

        for name, new in {
            "device": property(device_of),
            "is_cuda": property(lambda tensor: self.home(tensor) >= 0),
            "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
            "grad": property(grad.__get__, set_grad, grad.__delete__),
            "get_device": lambda tensor: max(self.home(tensor), -1),
            "to": moved,
            "cuda": lambda tensor, device="cuda", non_blocking=False, **kwargs: moved(
                tensor, "cuda" if device is None else device, non_blocking=non_blocking, **kwargs
            ),
            "cpu": lambda tensor, **kwargs: moved(tensor, "cpu", **kwargs),
            "numpy": to_numpy,
            "tolist": as_list,
            "type": named_type,
            "pin_memory": pinned,
            "is_pinned": lambda tensor, device=None: self._is_pinned(tensor),
            "record_stream": lambda tensor, stream: None,
        }.items():
            self._patch(Tensor, name, new)

    def _parse_to(
        self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, torch.dtype | None, bool, dict[str, Any]]:
        """Return the target (a number of ours, another device or None), dtype, whether it may run on, and the rest."""
        kwargs = dict(kwargs)
        device, dtype, other = (kwargs.pop(name, None) for name in ("device", "dtype", "other"))
        flags = [arg for arg in args if isinstance(arg, bool)]
        for arg in (*args, other):
            if isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, str | torch.device | int) and not isinstance(arg, bool):
                device = arg
        non_blocking = bool(kwargs.pop("non_blocking", flags[0] if flags else False))
        if len(flags) > 1:
            kwargs["copy"] = flags[1]
        home = None if device is None else self.index(device)
        return (torch.device(device) if device is not None and home is None else home), dtype, non_blocking, kwargs

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._pinned

    def _patch_factories(self) -> None:
        for owner, names in ((torch, _FACTORIES + _LIKE), (Tensor, _NEW)):
            for name in names:
                factory = getattr(owner, name)
                self._patch(owner, name, self._factory(factory, name))

    def _factory(self, factory: Callable[..., Any], name: str) -> Callable[..., Any]:
        follows = name in (*_LIKE, *_NEW)

        @wraps(factory)
        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            source = args[0] if args and isinstance(args[0], Tensor) else None
            if source is not None and name in ("as_tensor", "asarray"):
                target = device if device is not None else _default_device(source.device)
                return source.to(target, kwargs.get("dtype") or source.dtype)
            if device is not None:
                home = self.index(device)
            elif source is not None and (follows or name in ("tensor", "normal")):
                home = self.home(source)
                if source.device.type not in ("cpu", "cuda"):
                    home = None
            else:
                home = self.index(_default_device(torch.device("cpu")))
            if home is None:
                return factory(*args, **kwargs) if device is None else factory(*args, device=device, **kwargs)
            if name in _FROM_DATA:
                for value in tree_leaves(args[:1] if not follows else args[1:2]):
                    if isinstance(value, Tensor) and self.home(value) >= 0 and value is not source:
                        self.waits.note("read", name)
                if home >= 0 and source is None:
                    self.waits.note("to device", name)
            try:
                with self._wanting(home):
                    made = factory(*args, device="cpu", **kwargs)
            except RuntimeError as error:
                if home < 0 or "can't allocate memory" not in str(error):
                    raise
                raise self._out_of_memory(home, int(str(error).split("you tried to allocate ")[1].split()[0])) from None
            if home >= 0 and made.nbytes > 2**20 and self.allocated(home) + made.nbytes > self.limit:
                raise self._out_of_memory(home, made.nbytes)
            self.place(made, home)
            return self.pin(made) if pin_memory else made

        return make

    def _out_of_memory(self, home: int, size: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU {home} has a total capacity of "
            f"{stubs.TOTAL / 2**30:.2f} GiB of which {(self.limit - self.allocated(home)) / 2**30:.2f} GiB is free."
        )

    @contextmanager
    def _wanting(self, home: int) -> Iterator[None]:
        before, self._wanted.home = getattr(self._wanted, "home", None), home
        try:
            yield
        finally:
            self._wanted.home = before

    def _patch_storages(self) -> None:
        clone, cpu, device = (getattr(torch.UntypedStorage, name) for name in ("clone", "cpu", "device"))

        def device_of(storage: torch.UntypedStorage) -> torch.device:
            home = self.home_of_storage(storage)
            return torch.device("cuda", home) if home >= 0 else device.__get__(storage)

        def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            home = self.home_of_storage(storage)
            self._place_storage(storage, _CPU)
            try:
                new = clone(storage)
            finally:
                self._place_storage(storage, home)
            self._place_storage(new, home)
            return new

        def to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            if self.home_of_storage(storage) < 0:
                return cpu(storage)
            self.waits.note("to host", f"storage of {storage.nbytes()} bytes")
            new = copied(storage)
            self._place_storage(new, _CPU)
            return new

        def restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
            if not str(location).startswith("cuda"):
                return None
            home = self.index(location)
            assert home is not None
            self.waits.note("to device", f"loaded storage of {storage.nbytes()} bytes")
            self._place_storage(storage, home)
            return storage

        for name, new in {
            "clone": copied,
            "cpu": to_host,
            "device": property(device_of),
            "is_cuda": property(lambda storage: self.home_of_storage(storage) >= 0),
        }.items():
            self._patch(torch.UntypedStorage, name, new)
        packages = torch.serialization._package_registry
        before = list(packages)
        torch.serialization.register_package(0, lambda storage: None, restored)
        self._patches.callback(packages.__setitem__, slice(None), before)


class _Move(torch.autograd.Function):
    """A copy to another device, and of its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, home: int, dtype: torch.dtype, kwargs: dict[str, Any]) -> Tensor:
        emulation = EmulatedCuda.active
        assert emulation is not None
        ctx.origin, ctx.dtype = emulation.home(tensor), tensor.dtype
        source = tensor.detach()
        copied = torch._C.TensorBase.to(source, dtype, copy=True, **kwargs)
        result: Tensor = emulation.place(copied, home)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        emulation = EmulatedCuda.active
        assert emulation is not None
        (gradient,) = gradients
        emulation.note_copy(gradient, emulation.home(gradient), ctx.origin, blocks=True)
        copied = torch._C.TensorBase.to(gradient, ctx.dtype, copy=True)
        return emulation.place(copied, ctx.origin), None, None, None


def _default_device(otherwise: torch.device) -> torch.device:
    modes = reversed(torch.overrides._get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), otherwise)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage that a tensor is on, below what `torch.func` wraps around it; None for one without data."""
    with torch._C.DisableTorchFunction():  # a mode would ask Python's view, which asks here
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.is_sparse:
            tensor = tensor._values()
        try:
            return tensor.untyped_storage() if torch._C.TensorBase.device.__get__(tensor).type == "cpu" else None
        except (NotImplementedError, RuntimeError):
            return None


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    schema = func._schema.arguments
    pairs = zip(schema, args, strict=False)
    return [one for info, arg in pairs if info.alias_info and info.alias_info.is_write for one in tree_leaves(arg)]


def _name(home: int) -> str:
    return "cpu" if home == _CPU else f"cuda:{home}"
