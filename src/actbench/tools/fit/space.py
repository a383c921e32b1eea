"""All that a plan can be made of: settings around the blocks, and the actions on each of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actbench.tools.fit.chain import Chain, Option
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.costs import Costs
from actbench.tools.fit.effects import Blocks, Effects
from actbench.tools.fit.errors import Errors
from actbench.tools.fit.levels import Level
from actbench.tools.fit.plan import AS_IT_IS, Action, Around, Plan, training_of
from actbench.tools.fit.records import Training
from actbench.tools.fit.setting import Setting, Solved
from actbench.tools.fit.solver import least_bytes, least_peak, solve

_WORTH = 0.005  # share of a step's bytes or seconds that has to be saved outside of blocks


@dataclass
class Space:
    """Settings, each with a chain of blocks, and the fastest plan among all of them.

    Attributes:
        blocks: The blocks of the model.
        ways: Effects for each way of computing and each number of micro-batches.
        errors: Of the gradient, where they are limited; a change whose error is unknown is in no plan then.
        warnings: Of simulations of single choices.
    """

    blocks: Blocks
    ways: list[Effects] = field(default_factory=list)
    errors: Errors = field(default_factory=Errors)
    warnings: dict[Choice, Sequence[str]] = field(default_factory=dict)
    _left_out: dict[tuple[Around, Action], set[Action]] = field(default_factory=dict, repr=False)
    _settings: dict[tuple[Level, int], list[Setting]] = field(default_factory=dict, repr=False)
    _solved: dict[tuple[Level, int, float, float], Solved | None] = field(default_factory=dict, repr=False)

    def settings(self, level: Level) -> list[Setting]:
        """Return the settings of a level, those first with which a step is fastest if memory is no limit."""
        key = level, len(self.ways)
        if key not in self._settings:
            found = [setting for way in self.ways for setting in self._of(way, level)]
            self._settings[key] = sorted(found, key=lambda each: (each.quickest, len(each.around)))
        return self._settings[key]

    def solve(self, level: Level, limit: float, most_squared_error: float = math.inf) -> Solved | None:
        """Return the fastest plan of a level within a limit; None if there is none."""
        key = level, len(self.ways), limit, most_squared_error
        if key not in self._solved:  # a planner asks again when it corrects a plan, and when it has looked further
            self._solved[key] = self._fastest(level, limit, most_squared_error)
        return self._solved[key]

    def _fastest(self, level: Level, limit: float, most_squared_error: float) -> Solved | None:
        best: Solved | None = None
        for setting in self.settings(level):
            if best is not None and setting.quickest >= best.seconds:
                break
            if setting.least_squared_error > most_squared_error:
                continue
            if setting.bound(limit) >= (best.seconds if best else math.inf):
                continue
            indices = solve(setting.chain, limit, most_squared_error - setting.squared_error)
            if indices is not None and (best is None or setting.chain.time(indices) < best.seconds):
                best = setting.solved(indices)
        return best

    def least(self, level: Level, most_squared_error: float = math.inf) -> Solved | None:
        """Return the plan of a level with the smallest peak."""
        best: Solved | None = None
        chains = ((least_bytes(each.chain), each) for each in self.settings(level))
        for needed, setting in sorted(chains, key=lambda each: each[0]):
            if best is not None and needed > best.peak:
                break
            if setting.least_squared_error > most_squared_error:
                continue
            if best is not None and needed == best.peak and setting.bound(needed) >= best.seconds:
                continue
            found = setting.solved(least_peak(setting.chain, most_squared_error - setting.squared_error))
            if best is None or (found.peak, found.seconds) < (best.peak, best.seconds):
                best = found
        return best

    def uniform(self, level: Level, limit: float, most_squared_error: float = math.inf) -> Solved | None:
        """Return the fastest plan that does the same with all blocks."""
        found = (
            setting.solved([index] * len(self.blocks.paths))
            for setting in self.settings(level)
            for index in range(len(setting.actions))
        )
        within = (each for each in found if each.peak <= limit and self.errors.of(each.plan) <= most_squared_error)
        return min(within, key=lambda each: each.seconds, default=None)

    def of_some(
        self, level: Level, limit: float, most_squared_error: float = math.inf, slowest: float = math.inf
    ) -> list[Solved]:
        """Return the plans within a limit that do one thing with some blocks and nothing with the rest, fastest first.

        Those that take longer than ``slowest`` are left out.
        """
        settings = (each for each in self.settings(level) if each.bound(limit) <= slowest)
        found = (solved for setting in settings for solved in setting.of_some(slowest))
        within = (each for each in found if each.peak <= limit and self.errors.of(each.plan) <= most_squared_error)
        return sorted(within, key=lambda each: each.seconds)

    def know(self, errors: Errors) -> None:
        """Make plans with these errors from now on."""
        self.errors = errors
        self._forget()

    def inexact(self) -> tuple[list[Action], list[Action], list[Choice]]:
        """Return the actions on blocks, those on the rest and the changes around them that change the gradient."""
        ways = [(way, action) for way in self.ways for action in way.actions]
        rests = dict.fromkeys(action for way, action in ways if self._acts_on_rest(way, action))
        around = dict.fromkeys(choice for way in self.ways for choice in way.around.union(*way.changes))
        return (
            [action for action in dict.fromkeys(action for _, action in ways) if self._is_inexact(action)],
            [action for action in rests if self._is_inexact(action)],
            [choice for choice in around if self._is_inexact(frozenset({choice}))],
        )

    def _is_inexact(self, choices: Around) -> bool:
        return not self._training(choices).has_exact_gradient

    def leave_out(self, plan: Plan, known: Iterable[Plan]) -> None:
        """Make no more plans like a refused one, with the same changes around the blocks.

        With these changes, its actions are left out, except those that known plans have; or no action at all, if it has
        none.
        """
        setting = plan.around, plan.rest
        used = set(itertools.chain.from_iterable(each.actions for each in known if (each.around, each.rest) == setting))
        actions = {action for action in plan.actions if action}
        self._left_out.setdefault(setting, set()).update(actions - used or actions or {frozenset()})
        self._forget()

    def _forget(self) -> None:
        self._settings.clear()
        self._solved.clear()

    def _of(self, way: Effects, level: Level) -> Iterator[Setting]:
        if not level.allows(self._training(way.around)):
            return
        allowed = (action for action in way.actions if level.allows(self._training(way.around | action)))
        actions = [action for action in allowed if math.inf not in self.errors.of_blocks.get(action, ())]
        options = functools.cache(lambda acting: (self._options(way, acting), self._pairs(way, acting)))
        rests = [AS_IT_IS, *(action for action in actions if self._acts_on_rest(way, action))]
        for more, costs in self._combined(way, level):
            around = way.around.union(more)
            for rest in rests:
                of_rest = way.actions[rest].rest if rest else None
                # what cannot be limited to the rest is done with all blocks, too
                possible = [rest] if self.blocks.are_changed_with(rest) else actions
                left_out = self._left_out.get((around, rest), set[Action]())
                acting = tuple(action for action in possible if action not in left_out)
                if acting or not (self.blocks.paths or left_out):
                    changed, error = costs + of_rest if of_rest else costs, self.errors.outside(around, rest)
                    chain = self._chain(changed, way.exact, *options(acting))
                    yield Setting(around, rest, acting, chain, error)

    def _acts_on_rest(self, way: Effects, action: Action) -> bool:
        """Whether an action acts outside of the blocks, and saves enough of a step's bytes or seconds there."""
        effect = way.actions[action].rest
        if effect is None or not any(self.blocks.rest.get(choice) for choice in action):
            return False
        saved = -(effect.base + effect.top) / way.exact.peak, -effect.around_seconds / way.exact.total_seconds
        return max(saved) > _WORTH

    def _training(self, choices: Around) -> Training:
        return training_of(choices, [text for choice in choices for text in self.warnings.get(choice, ())])

    def _combined(self, way: Effects, level: Level) -> list[tuple[Around, Costs]]:
        """Return changes that stand together, at most one of each kind, with the costs of a step with them."""
        changes = [change for change in way.changes if level.allows(self._training(way.around | change))]
        kinds: dict[object, list[Around]] = {}
        for change in changes:
            kinds.setdefault(tuple(sorted({choice.changes for choice in change})), [frozenset()]).append(change)
        found = [(frozenset[Choice](), way.exact)]
        for alternatives in kinds.values():
            found = [
                (merged | change, costs + way.changes[change] if change else costs)
                for merged, costs in found
                for change in alternatives
                if all(one.stands_with(two) for one, two in itertools.product(change, (merged | way.around) - change))
            ]
        return found

    def _options(self, way: Effects, actions: Sequence[Action]) -> list[tuple[Option, ...]]:
        """Return the options of each block; equal blocks share one object, without what changes around them."""
        shared: dict[object, tuple[Option, ...]] = {}
        found = []
        for place in range(len(self.blocks.paths)):
            options = tuple(self._option(way, action, place) for action in actions)
            found.append(shared.setdefault(options, options))
        return found

    def _option(self, way: Effects, action: Action, place: int) -> Option:
        exact, costs = way.exact, way.actions[action].costs
        held, forward, backward, seconds = (
            getattr(exact, name)[place] + getattr(costs, name)[place]
            for name in ("held", "forward", "backward", "seconds")
        )
        error = self.errors.of_blocks[action][place] if action in self.errors.of_blocks else 0.0
        return Option(round(held), round(forward), round(backward), round(seconds, 9), error)

    def _pairs(self, way: Effects, actions: Sequence[Action]) -> list[Mapping[tuple[int, int], float]]:
        """Return what a pair of neighbours holds more: the tensor between them, if the first saves what it returns.

        The effect of an action on all blocks has it that the block before does the same.
        """
        found: list[Mapping[tuple[int, int], float]] = []
        for place, output in enumerate(self.blocks.outputs[:-1] / way.parts):
            keeps = [index for index, each in enumerate(actions) if way.actions[each].keeps_output[place]]
            frees = [
                index
                for index, each in enumerate(actions)
                if way.actions[each].frees_input[place + 1] and not way.actions[each].keeps_output[place]
            ]
            found.append({pair: float(output) for pair in itertools.product(keeps, frees)})
        return found if any(found) else []

    @staticmethod
    def _chain(
        costs: Costs,
        exact: Costs,
        options: Sequence[Sequence[Option]],
        pairs: Sequence[Mapping[tuple[int, int], float]],
    ) -> Chain:
        """Return the chain of a setting, in which changes around the blocks change what blocks hold and take, too."""
        more = costs - exact
        base, seconds = costs.base + more.held.sum(), costs.around_seconds + more.seconds.sum()
        least = max(costs.stem, costs.end, costs.update)
        return Chain(options, pairs, base, costs.top, costs.gradients.tolist(), costs.top_gradients, least, seconds)
