"""Whose turn it is: the optimizers that a script has made, and whether its loop has come round.

A cycle is what the script does from a backward pass to the next one with an update between them. All updates in a
cycle belong together: of several optimizers after one backward pass, and of hooks that step inside of it. The loop has
come round when an optimizer has its turn in another cycle again. Until all optimizers have been heard of, no single
turn shows that: after a discriminator's comes a generator's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class Turns:
    """Follows the turns of all optimizers, none of which it keeps alive.

    Optimizers have numbers. One that is made after another has stepped, and trains what that one trained, takes its
    number: a script that makes a new optimizer in each round of its loop comes round all the same.

    Attributes:
        updates: Updates so far.
        newest: The number of the last step in which an optimizer had its first turn.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._trained = WeakIdKeyDictionary()
        self._new_numbers = itertools.count()
        self._cycle = 0
        self._is_updated = False
        self._cycles: dict[int, int] = {}
        self._round: set[int] = set()
        self._steps: Counter[int] = Counter()
        self._ended = self.updates = self.newest = 0

    def forget(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Forget all turns, and optimizers that have no more of them."""
        self._cycles.clear()
        self._round.clear()
        self._steps.clear()
        self._ended = self.newest = 0
        for optimizer in optimizers:
            self._numbers.pop(optimizer, None)

    def made(self, optimizer: Optimizer) -> None:
        """Note a new optimizer."""
        taken = {number for other, number in self._numbers.items() if other not in self._stepped}
        free = (self._trained[each] for each in _parameters(optimizer) if each in self._trained)
        number = next((each for each in free if each not in taken), None)
        self._numbers[optimizer] = next(self._new_numbers) if number is None else number

    def begin_pass(self) -> None:
        """Note that the script begins a backward pass: the first one after an update begins a cycle."""
        self._cycle += self._is_updated
        self._is_updated = False

    def update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if optimizer not in self._numbers:
            self.made(optimizer)
        number = self._numbers[optimizer]
        if self._cycles.get(number, self._cycle) != self._cycle:
            self._round = set(self._cycles)
            self._cycles.clear()
        if number not in self._cycles:
            self._cycles[number] = self._cycle
            self._stepped.add(optimizer)
            self._trained.update(dict.fromkeys(_parameters(optimizer), number))
        self._is_updated = True
        self.updates += 1

    @property
    def are_complete(self) -> bool:
        """Whether all optimizers have had their turn in this step, or those of the last round that was seen whole."""
        if not self._cycles:
            return False
        is_round = bool(self._round) and self._round <= self._cycles.keys()
        return is_round or all(self._numbers[each] in self._cycles for each in self._training())

    def end_step(self) -> None:
        """Begin to note the turns of another step."""
        self._ended += 1
        if not self._steps.keys() >= self._cycles.keys():
            self.newest = self._ended
        self._steps.update(self._cycles.keys())
        self._cycles.clear()

    def waiting(self, turns: int) -> list[Optimizer]:
        """Return the optimizers with fewer than ``turns`` turns, but those through which another one steps."""
        through = {id(each.param_groups) for each, number in self._numbers.items() if self._steps[number] >= turns}
        return [
            each
            for each in self._training()
            if self._steps[self._numbers[each]] < turns and id(each.param_groups) not in through
        ]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of all optimizers."""
        for each in list(self._numbers):
            yield from _parameters(each)

    def _training(self) -> Iterator[Optimizer]:
        """Yield the optimizers that train a parameter: of some, no step is ever made, as of those that test rates."""
        return (each for each in list(self._numbers) if any(one.requires_grad for one in _parameters(each)))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
