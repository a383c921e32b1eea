"""What each block of a model holds and takes in one simulated step."""

from __future__ import annotations

from actbench.model.data import Data
from actbench.units import NonNegativeFloat, NonNegativeInt


class BlockReading(Data):
    """One block in one step; bytes are all that is alive on the device, weights and optimizer state included.

    Attributes:
        path: Path of the module in the model.
        kind: Equal for blocks that may be exchanged: a hash of the class, of the shapes and dtypes of parameters and
            buffers, and of the shapes of what goes in.
        before_bytes: Alive when its forward pass begins.
        after_bytes: Alive when the forward pass of the next block begins; for the last, when its own ends.
        forward_peak_bytes: Most between these two moments.
        backward_peak_bytes: Most from the moment its backward pass begins until that of the block before it begins.
        done_bytes: Alive at the end of that time.
        forward_seconds: Estimated time of its part of the forward pass; 0 if no time is estimated.
        backward_seconds: Estimated time of its part of the backward pass.
        output_bytes: Bytes of the storages that it returns, rounded as the allocator does.
        waiting_bytes: Bytes of the inputs of earlier blocks that are still alive when its forward pass begins, and will
            be freed before the forward pass ends: the caller of those blocks holds them.
        keeps_output: Whether its own graph saves what it returns as it is, as ReLU does; not so what hooks pack.
        keeps_input: Whether it keeps the first tensor that goes in as it is: its graph saves that, or it is alive after
            the forward pass although the block before does not save it.
    """

    path: str
    kind: str
    before_bytes: NonNegativeInt
    after_bytes: NonNegativeInt
    forward_peak_bytes: NonNegativeInt
    backward_peak_bytes: NonNegativeInt
    done_bytes: NonNegativeInt
    forward_seconds: NonNegativeFloat = 0.0
    backward_seconds: NonNegativeFloat = 0.0
    output_bytes: NonNegativeInt
    waiting_bytes: NonNegativeInt = 0
    keeps_output: bool = False
    keeps_input: bool = False


class BlockReadings(Data):
    """All blocks in one step, and what is around them.

    Attributes:
        blocks: The blocks in the order of the forward pass.
        start_bytes: Alive when the forward pass begins.
        stem_peak_bytes: Most before the first block's forward pass.
        top_peak_bytes: Most between the end of the last block's forward pass and the beginning of its backward pass.
        end_peak_bytes: Most after the first block's backward pass; 0 if that cannot be told apart from it.
        stem_seconds: Estimated time of the forward pass before the first block.
        top_seconds: Estimated time of the head and the loss, both ways.
        end_seconds: Estimated time of the backward pass after the first block's.
    """

    blocks: tuple[BlockReading, ...]
    start_bytes: NonNegativeInt
    stem_peak_bytes: NonNegativeInt
    top_peak_bytes: NonNegativeInt
    end_peak_bytes: NonNegativeInt
    stem_seconds: NonNegativeFloat = 0.0
    top_seconds: NonNegativeFloat = 0.0
    end_seconds: NonNegativeFloat = 0.0
