"""What averages gradients inside torch's DistributedDataParallel, for fake tensors.

Torch's own reducer is C++ that reads indices of buckets back from the card, and waits for results that a fake process
group does not have. Here it is Python under the same interface, and allocates as torch's: one bucket, or one for each
limit, when the model is wrapped; new ones by the order in which gradients came, after the first backward pass; a map of
the parameters that were used. All of DistributedDataParallel around it is torch's.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from actbench.device.patches import Patches
from actbench.device.works import Works
from actbench.errors import UntraceableError

_bucket_assignment: Any = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. {} parameters had no "
    "gradient in the last backward pass (the first is {}): DistributedDataParallel(find_unused_parameters=True) allows "
    "for them"
)
_TWICE = (
    "Expected to mark a variable ready only once. {} had a gradient twice in one backward pass: it is used by several "
    "reentrant checkpoints, or in several forward passes; static_graph=True, or use_reentrant=False, allows for it"
)


class Bucket:
    """Gradients that are averaged at once; stands in for ``torch.distributed.GradBucket``.

    Args:
        number: Its place in the order of averaging.
        members: The parameters, of one type.
        is_last: Whether no other comes after it.

    Attributes:
        views: The part of each parameter.
        missing: How many gradients are not there yet.
        future: The averages, once the averaging has begun.
    """

    def __init__(self, number: int, members: Sequence[nn.Parameter], *, is_last: bool) -> None:
        self._number, self._last = number, is_last
        self.members = members
        self._flat = members[0].new_empty(sum(each.numel() for each in members), requires_grad=False)
        self.views = views(self._flat, members)
        self.missing = len(members)
        self.future: Any = None

    def index(self) -> int:
        """Return its place in the order of averaging."""
        return self._number

    def is_last(self) -> bool:
        """Return whether no other comes after it."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Take another tensor in place of :meth:`buffer`."""
        self._flat = tensor

    def gradients(self) -> list[Tensor]:
        """Return the part of each parameter."""
        return self.views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters."""
        return list(self.members)


def views(flat: Tensor, members: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the part of each parameter in a flat tensor, with its strides where it has no gaps."""
    found, offset = [], 0
    for each in members:
        found.append(flat.as_strided(each.shape, torch.empty_like(each, device="meta").stride(), offset))
        offset += each.numel()
    return found


class Reducer:
    """Averages gradients over processes, bucket by bucket; stands in for ``torch.distributed.Reducer``.

    Args:
        note: Receives new buffers; the other arguments are those of torch's.
        works: Holds what asynchronous collectives hold.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: distributed.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 << 20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: dict[int, str] | None = None,
        first_bucket_bytes_cap: int = 1 << 20,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,
        lazy_bucket_allocation: bool = False,
        *,
        note: Callable[[list[Tensor]], object],
        works: Works,
    ) -> None:
        if any(expect_sparse_gradients):
            raise UntraceableError(
                "DistributedDataParallel averages sparse gradients, whose sizes only a real run knows: make embeddings "
                "with sparse=False, or run the script with --meter cuda"
            )
        if lazy_bucket_allocation:
            raise UntraceableError(
                "DistributedDataParallel(lazy_bucket_allocation=True) is not simulated: leave it out for an upper bound"
            )
        self._params, self._group, self._note, self._works = list(params), process_group, note, works
        self._caps = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._find_unused, self._as_view = find_unused_parameters, gradient_as_bucket_view
        self._names = param_to_name_mapping or {}
        self._static = self._rebuilt = self._reducing = self._finalizing = False
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        self._order: list[int] = []
        self._ready: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._buckets = self._made(bucket_indices)
        self._used = self._params[0].new_empty(len(self._params), dtype=torch.int32, requires_grad=False)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._told_of(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._params)
        ]

    @property
    def buffers(self) -> list[Tensor]:
        """The flat tensors in which gradients are averaged now."""
        return [bucket.buffer() for bucket in self._buckets]

    def prepare_for_forward(self) -> None:
        """Do what torch's does before a forward pass: nothing is timed here."""

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Let the next backward pass average gradients.

        Raises:
            RuntimeError: Parameters had no gradient in the one before, and were not declared as unused.
        """
        self._check_reducer_finalized()
        for bucket in self._buckets:
            bucket.missing, bucket.future = len(bucket.members), None
        self._ready.clear()
        self._reducing, self._finalizing = True, False

    def _told_of(self, index: int) -> Callable[[Tensor], None]:
        own = weakref.ref(self)

        def made(_: Tensor) -> None:
            reducer = own()
            if reducer is not None:
                reducer._autograd_hook(index)

        return made

    def _autograd_hook(self, index: int) -> None:
        """Take the gradient that a parameter has now."""
        if not self._reducing:
            return
        if not self._finalizing:
            Variable._execution_engine.queue_callback(self._finish)
            self._finalizing = True
        self._ready[index] += 1
        if self._static:
            if not self._expected or self._ready[index] < self._expected[index]:
                return
        elif self._ready[index] > 1:
            raise RuntimeError(_TWICE.format(self._name(index)))
        self._take(index)

    def _delay_all_reduce(self) -> None:
        """Average all gradients after the first backward pass of a static graph."""

    @torch.no_grad()
    def _take(self, index: int) -> None:
        if index not in self._order:
            self._order.append(index)
        parameter = self._params[index]
        bucket, view = self._places[index]
        gradient = parameter.grad
        share = 1 if self._hook else 1 / self._group.size()
        if gradient is None:
            view.zero_()
        elif gradient.untyped_storage() is view.untyped_storage():
            view.mul_(share)
        else:
            torch.mul(gradient, share, out=view) if share != 1 else view.copy_(gradient)
            if self._as_view:
                parameter.grad = view
        bucket.missing -= 1
        if not bucket.missing:
            bucket.future = self._run_comm_hook(bucket)

    def _run_comm_hook(self, bucket: Bucket) -> Any:
        if self._hook is None:
            work = distributed.all_reduce(bucket.buffer(), group=self._group, async_op=True)
            work.wait()  # what it would hold is alive as long as this reducer
            return None
        state, hook = self._hook
        return hook(state, bucket)

    @torch.no_grad()
    def _finish(self) -> None:
        """Take what was not taken, and give parameters their averages, at the end of a backward pass."""
        if self._static and not self._expected:
            self._expected.update(self._ready)
        waiting = [index for index in range(len(self._params)) if self._places[index][0].missing]
        if self._static or self._find_unused:
            for index in waiting:
                if index not in self._order or not self._ready[index]:
                    self._take(index)
            distributed.all_reduce(self._used, group=self._group)
        if any(bucket.missing for bucket in self._buckets):
            return  # the next forward pass says it
        for bucket in self._buckets:
            self._give_back(bucket)
        self._reducing = False

    def _give_back(self, bucket: Bucket) -> None:
        found = bucket.future.wait() if bucket.future is not None else bucket.buffer()
        found = found[0] if isinstance(found, list | tuple) else found
        bucket.future = None
        flat = bucket.buffer()
        averages = bucket.views if found is flat else views(found, bucket.members)
        for parameter, own, view in zip(bucket.members, bucket.views, averages, strict=True):
            if parameter.grad is None:
                continue  # unused here, and so in all processes
            if not self._as_view:
                parameter.grad.copy_(view)
            elif view is not own:
                own.copy_(view)

    def _made(self, indices: Sequence[Sequence[int]]) -> list[Bucket]:
        self._places: dict[int, tuple[Bucket, Tensor]] = {}
        buckets = []
        for number, members in enumerate(indices):
            bucket = Bucket(number, [self._params[index] for index in members], is_last=number == len(indices) - 1)
            self._places.update((index, (bucket, view)) for index, view in zip(members, bucket.views, strict=True))
            buckets.append(bucket)
        self._note([bucket.buffer() for bucket in buckets])
        return buckets

    def take_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average by a function of the user's from ``state`` and a bucket to a future."""
        self._hook = (state, hook)

    def take_builtin_hook(self, kind: Any) -> None:
        """Average by one of the functions that torch has in C++."""
        is_half = kind.name == "FP16_COMPRESS"
        self.take_hook(self._group, default_hooks.fp16_compress_hook if is_half else default_hooks.allreduce_hook)

    def _rebuild_buckets(self) -> bool:
        """Make buckets anew, by the order of gradients in the first backward pass; return whether it did."""
        if self._rebuilt or len(self._order) < len(self._params) or (self._find_unused and not self._static):
            return False
        ordered = [self._params[index] for index in self._order]
        sparse = [False] * len(ordered)
        assigned, _ = _bucket_assignment(list[Tensor](ordered), self._caps, sparse, self._order)
        self._works.synchronize()  # the processes agree on the order, by collectives that are waited for
        self._works.free()
        self._buckets.clear()  # torch frees the old ones first
        self._buckets = self._made(assigned)
        self._rebuilt = True
        return True

    def settle(self) -> None:
        """Make the buckets that there are after a first backward pass, in which the last parameters come first."""
        self._order = list(reversed(range(len(self._params))))
        self._rebuild_buckets()

    def _check_reducer_finalized(self) -> None:
        if self._reducing and self._finalizing:
            left = [index for index in range(len(self._params)) if not self._ready[index]]
            raise RuntimeError(_UNFINISHED.format(len(left), self._name(left[0])))

    def _name(self, index: int) -> str:
        return f"parameter {self._names.get(index, index)!r}"

    def _set_static_graph(self) -> None:
        self._static = True

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _update_process_group(self, new_process_group: distributed.ProcessGroup) -> None:
        self._group = new_process_group

    def _reset_state(self) -> None:
        self._reducing = self._finalizing = False

    def _get_zeros_like_grad_buckets(self) -> list[Bucket]:
        return [Bucket(bucket.index(), bucket.members, is_last=bucket.is_last()) for bucket in self._buckets]

    def _get_local_used_map(self) -> Tensor:
        return self._used

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Take what tells whether other processes have joined: none has."""

    def _push_all_rebuilt_params(self) -> None: ...

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None: ...

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None: ...

    def _set_optimizer_in_backward(self) -> None: ...

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None: ...

    def set_logger(self, logger: Any) -> None:
        """Accept a logger of this object, which is never read."""


class Logger:
    """Stands in for ``torch.distributed.Logger``, which describes a reducer in C++."""

    def __init__(self, reducer: Reducer) -> None: ...

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what notes nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: None


def reduce_fakes(patches: Patches, works: Works, note: Callable[[list[Tensor]], object] = lambda buffers: None) -> None:
    """Let DistributedDataParallel average gradients by :class:`Reducer`.

    Args:
        patches: Restores torch's own reducer.
        works: Holds what asynchronous collectives hold.
        note: Receives new buffers.
    """
    patches.replace(
        distributed,
        Reducer=functools.partial(Reducer, note=note, works=works),
        Logger=Logger,
        _register_comm_hook=Reducer.take_hook,
        _verify_params_across_processes=lambda *_: None,  # it reads values
        _register_builtin_comm_hook=Reducer.take_builtin_hook,
    )
