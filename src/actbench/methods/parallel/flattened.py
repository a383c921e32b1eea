"""A model whose flat parameters are sharded over processes, and gathered unit by unit as they are used (FSDP1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.api import BackwardPrefetch
from torch.distributed.fsdp.wrap import CustomPolicy

from actbench.errors import ConversionError
from actbench.methods.formats.optim.shardoptimizer import refuse_unshared
from actbench.methods.parallel.sharded import leave_gathered, refuse_probing
from actbench.packing.hooked import HookedForward
from actbench.scheme.flat import flat_handles
from actbench.simulator.fake import mode_of


def flattened(
    module: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: MixedPrecision | None = None,
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    unsharded: Sequence[nn.Module] = (),
) -> nn.Module:
    """Return a model wrapped by torch's ``FullyShardedDataParallel``, and each unit inside it, which is replaced.

    All parameters of a unit, trained and frozen, lie one after the other in one vector, and each process holds an equal
    part of that vector; parameters in no unit are in a vector of the whole model. Parameters stay the same objects
    (``use_orig_params``) and become views of this process's part of them: a vector, or nothing.

    Args:
        module: The model; all schemes but those of the optimizer were applied before.
        units: Modules inside it, the blocks.
        mesh: The processes.
        precision: In which types parameters are gathered and gradients reduced.
        prefetch: Which unit is gathered while another one runs backward.
        unsharded: Modules in the units whose parameters each process holds whole. Their gradients are averaged over the
            processes as soon as they are added up.

    Raises:
        ConversionError: Hooks run backward passes of their own, or parameters of a unit differ in type.
    """
    refuse_probing(module, "FSDP1")
    bound = HookedForward.of(module)
    mode = mode_of(module)
    # FullyShardedDataParallel wraps the whole by itself, and would wrap it twice
    chosen = set(units) - {module}
    try:
        with mode or nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has both parameters with requires_grad")  # so do our pages
            whole = FullyShardedDataParallel(
                module,
                process_group=mesh.get_group(),
                auto_wrap_policy=CustomPolicy(chosen.__contains__),
                backward_prefetch=prefetch,
                mixed_precision=precision,
                device_id=next(module.parameters()).device,
                use_orig_params=True,
                ignored_modules=unsharded,
            )
    except (NotImplementedError, ValueError) as error:
        raise ConversionError(f"FSDP1 cannot flatten parameters of {type(module).__name__}: {error}") from error
    if mode is not None:  # torch compares addresses, which fake tensors do not have: no parameter was moved
        for handle in flat_handles(whole):
            handle._skip_writeback_check = True
    for parameter in (each for part in unsharded for each in part.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(_average, mesh.get_group()))  # type: ignore[no-untyped-call]
    if bound is not None:
        leave_gathered(bound.hooks.packer, list(chosen))
    return whole


def _average(group: ProcessGroup, parameter: Tensor) -> None:
    """Average a gradient; that of earlier micro-batches is the same in all processes, and stays so."""
    if parameter.grad is not None:
        all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def on_pieces(make: Callable[[nn.Module], optim.Optimizer], who: str) -> Callable[[nn.Module], optim.Optimizer]:
    """Return a function that makes optimizers of a process's pieces of parameters.

    They raise a ConversionError, told by ``who``, for an optimizer that needs whole parameters.
    """

    def made(module: nn.Module) -> optim.Optimizer:
        optimizer = make(module)
        refuse_unshared(optimizer, who)
        return optimizer

    return made
