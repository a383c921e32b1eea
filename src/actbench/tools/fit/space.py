"""All that a plan can be made of: settings around the blocks, and the actions on each of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actbench.tools.fit.costs import Blocks, Costs, Way
from actbench.tools.fit.errors import Errors
from actbench.tools.fit.plan import AS_IT_IS, Action, Candidate, Plan, training_of
from actbench.tools.fit.records import Training
from actbench.tools.fit.solver import Chain, Option, least_peak, solve

_WORTH = 0.005  # share of a step's bytes or seconds that has to be saved outside of blocks
_MOST_ROWS = 4  # rows of equal blocks whose orders are tried


@dataclass(frozen=True)
class Setting:
    """What is changed around the blocks, and what their options then are.

    Attributes:
        around: The changes.
        rest: What is done with the modules outside of the blocks.
        actions: What may be done with a block.
        chain: The blocks with these options.
        squared_error: Of the gradient, from outside of the blocks.
    """

    around: Action
    rest: Action
    actions: Sequence[Action]
    chain: Chain
    squared_error: float = 0.0

    def plan(self, indices: Sequence[int]) -> Plan:
        """Return the plan of the chosen options, with those of equal blocks in rows, in the order that needs least.

        Only where the rows need no more: which of equal blocks come first may matter.
        """
        equal: dict[int, list[int]] = {}
        for place, options in enumerate(self.chain.options):
            equal.setdefault(id(options), []).append(place)
        best, peak = tuple(indices), self.chain.peak(indices)
        taken = [index for index in dict.fromkeys(indices) if indices.count(index) > 1]
        for order in itertools.permutations(taken if len(taken) <= _MOST_ROWS else taken[:1]):
            found = list(indices)
            for places in equal.values():
                row = sorted((indices[place] for place in places), key=lambda index: (*order, index).index(index))
                for place, index in zip(places, row, strict=True):
                    found[place] = index
            if (again := self.chain.peak(found)) <= peak and tuple(found) != best:
                best, peak = tuple(found), again
        actions = tuple(self.actions[index] for index in best)
        return Plan(self.around, actions if any(actions) else (), self.rest, peak, self.chain.time(best))

    def of_some(self, slowest: float) -> Iterator[Plan]:
        """Yield the plans that do one thing with some of the blocks, and take at most so many seconds.

        These are the first k, the last k, or every second or fourth.
        """
        if AS_IT_IS not in self.actions:
            return
        count, nothing = len(self.chain.options), list(self.actions).index(AS_IT_IS)
        some = [range(first, last) for k in range(1, count) for first, last in ((0, k), (count - k, count))]
        some += [range(0, count, every) for every in (2, 4)]
        for index, chosen in itertools.product((place for place, each in enumerate(self.actions) if each), some):
            indices = [index if place in chosen else nothing for place in range(count)]
            if self.chain.time(indices) <= slowest:
                yield self.plan(indices)


@dataclass
class Space:
    """Settings, each with a chain of blocks, and the fastest plan among all of them.

    Attributes:
        blocks: The blocks of the model.
        ways: Effects for each way of computing and each number of micro-batches.
        errors: Of the gradient, where they are limited; a change whose error is unknown is in no plan then.
        most_squared_error: Of the gradient.
        warnings: Of simulations of single candidates.
    """

    blocks: Blocks
    ways: list[Way] = field(default_factory=list)
    errors: Errors = field(default_factory=Errors)
    most_squared_error: float = math.inf
    warnings: dict[Candidate, Sequence[str]] = field(default_factory=dict)
    _left_out: dict[tuple[Action, Action], set[Action]] = field(default_factory=dict, repr=False)
    _settings: dict[tuple[Training, int], list[Setting]] = field(default_factory=dict, repr=False)
    _solved: dict[tuple[Training, int, float, float], Plan | None] = field(default_factory=dict, repr=False)

    def settings(self, level: Training) -> list[Setting]:
        """Return the settings in which training is no further from the exact step's than a level.

        Those come first with which a step is fastest if memory is no limit.
        """
        key = level, len(self.ways)
        if key not in self._settings:
            found = [setting for way in self.ways for setting in self._of(way, level)]
            self._settings[key] = sorted(found, key=lambda each: (each.chain.bound(math.inf), len(each.around)))
        return self._settings[key]

    def solve(self, level: Training, limit: float) -> Plan | None:
        """Return the fastest plan of a level within a limit of bytes; None if there is none."""
        key = level, len(self.ways), limit, self.most_squared_error
        if key not in self._solved:  # a planner asks again when it corrects a plan, and when it has looked further
            best: Plan | None = None
            for setting in self.settings(level):
                fastest = best.seconds if best else math.inf
                if setting.squared_error <= self.most_squared_error and setting.chain.bound(limit) < fastest:
                    room = self.most_squared_error - setting.squared_error
                    indices = solve(setting.chain, limit, room, fastest)
                    if indices is not None and setting.chain.time(indices) < fastest:
                        best = setting.plan(indices)
            self._solved[key] = best
        return self._solved[key]

    def least(self, level: Training) -> Plan | None:
        """Return the plan of a level with the smallest peak."""
        best: Plan | None = None
        for setting in sorted(self.settings(level), key=lambda each: each.chain.least_bytes):
            needed, room = setting.chain.least_bytes, self.most_squared_error - setting.squared_error
            if best is not None and needed > best.peak:
                break
            if setting.squared_error > self.most_squared_error:
                continue
            if best is None or needed < best.peak or setting.chain.bound(needed) < best.seconds:
                try:
                    found = setting.plan(least_peak(setting.chain, room))
                except ValueError:  # the errors of its plans are too large
                    continue
                if best is None or (found.peak, found.seconds) < (best.peak, best.seconds):
                    best = found
        return best

    def uniform(self, level: Training, limit: float) -> Plan | None:
        """Return the fastest plan within a limit that does the same with all blocks."""
        found = (
            setting.plan([index] * len(self.blocks.paths))
            for setting in self.settings(level)
            for index in range(len(setting.actions))
        )
        return min(self._within(found, limit), key=lambda each: each.seconds, default=None)

    def of_some(self, level: Training, limit: float, slowest: float = math.inf) -> list[Plan]:
        """Return the plans within a limit that do one thing with some blocks and nothing with the rest, fastest first.

        Those that take longer than ``slowest`` are left out.
        """
        settings = (each for each in self.settings(level) if each.chain.bound(limit) <= slowest)
        found = (plan for setting in settings for plan in setting.of_some(slowest))
        return sorted(self._within(found, limit), key=lambda each: each.seconds)

    def _within(self, plans: Iterable[Plan], limit: float) -> Iterator[Plan]:
        most = self.most_squared_error
        return (each for each in plans if each.peak <= limit and self.errors.of(each) <= most)

    def know(self, errors: Errors, most_squared_error: float = math.inf) -> None:
        """Make plans with these errors from now on, and with no larger one."""
        self.errors, self.most_squared_error = errors, most_squared_error
        self._settings.clear()
        self._solved.clear()

    def inexact(self) -> tuple[list[Action], list[Action], list[Candidate]]:
        """Return the actions on blocks, those on the rest and the changes around them that change the gradient."""
        acting = [(way, action) for way in self.ways for action in way.actions if self._is_inexact(action)]
        around = dict.fromkeys(each for way in self.ways for each in way.around.union(*way.changes))
        return (
            list(dict.fromkeys(action for _, action in acting)),
            list(dict.fromkeys(action for way, action in acting if self._acts_on_rest(way, action))),
            [each for each in around if self._is_inexact(frozenset({each}))],
        )

    def _is_inexact(self, action: Action) -> bool:
        return not self._training(action).has_exact_gradient

    def _training(self, action: Action) -> Training:
        return training_of(action, [text for each in action for text in self.warnings.get(each, ())])

    def leave_out(self, plan: Plan, known: Iterable[Plan]) -> None:
        """Make no more plans like a refused one, with the same changes around the blocks.

        With these changes, its actions are left out, except those that known plans have; or no action at all, if it has
        none.
        """
        setting = plan.around, plan.rest
        used = set(itertools.chain.from_iterable(each.actions for each in known if (each.around, each.rest) == setting))
        actions = {action for action in plan.actions if action}
        self._left_out.setdefault(setting, set()).update(actions - used or actions or {AS_IT_IS})
        self.know(self.errors, self.most_squared_error)

    # -- settings -----------------------------------------------------------------------------------------------------

    def _of(self, way: Way, level: Training) -> Iterator[Setting]:
        """Yield the settings of one way of computing."""
        if not self._training(way.around).is_as_near(level):
            return
        allowed = (action for action in way.actions if self._training(way.around | action).is_as_near(level))
        actions = [action for action in allowed if math.inf not in self.errors.of_blocks.get(action, ())]
        options = functools.cache(lambda acting: (self._options(way, acting), self._pairs(way, acting)))
        rests = [AS_IT_IS, *(action for action in actions if self._acts_on_rest(way, action))]
        for (more, costs), rest in itertools.product(self._combined(way, level), rests):
            around, of_rest = way.around | more, way.actions[rest].rest if rest else None
            # what cannot be limited to the rest is done with all blocks, too
            possible = [rest] if self.blocks.are_changed_with(rest) else actions
            left_out = self._left_out.get((around, rest), set())
            acting = tuple(action for action in possible if action not in left_out)
            if acting or not (self.blocks.paths or left_out):
                changed = costs + of_rest if of_rest else costs
                chain = _chain(changed, way.exact, *options(acting))
                yield Setting(around, rest, acting, chain, self.errors.outside(around, rest))

    def _acts_on_rest(self, way: Way, action: Action) -> bool:
        """Whether an action acts outside of the blocks, and saves enough of a step's bytes or seconds there."""
        effect = way.actions[action].rest
        if effect is None or not any(self.blocks.rest.get(each) for each in action):
            return False
        saved = -(effect.base + effect.top) / way.exact.peak, -effect.around_seconds / way.exact.total_seconds
        return max(saved) > _WORTH

    def _combined(self, way: Way, level: Training) -> list[tuple[Action, Costs]]:
        """Return changes that stand together, at most one of each kind, with the costs of a step with them."""
        kinds: dict[object, list[Action]] = {}
        for change in (each for each in way.changes if self._training(way.around | each).is_as_near(level)):
            kinds.setdefault(tuple(sorted({each.changes for each in change})), [AS_IT_IS]).append(change)
        found = [(AS_IT_IS, way.exact)]
        for alternatives in kinds.values():
            found = [
                (merged | change, costs + way.changes[change] if change else costs)
                for merged, costs in found
                for change in alternatives
                if all(one.stands_with(two) for one, two in itertools.product(change, (merged | way.around) - change))
            ]
        return found

    def _options(self, way: Way, actions: Sequence[Action]) -> list[tuple[Option, ...]]:
        """Return the options of each block; equal blocks share one object, without what changes around them."""
        shared: dict[object, tuple[Option, ...]] = {}
        found = []
        for place in range(len(self.blocks.paths)):
            options = []
            for action in actions:
                held, forward, backward, seconds = (
                    getattr(way.exact, name)[place] + getattr(way.actions[action].costs, name)[place]
                    for name in ("held", "forward", "backward", "seconds")
                )
                error = self.errors.of_blocks[action][place] if action in self.errors.of_blocks else 0.0
                options.append(Option(round(held), round(forward), round(backward), round(seconds, 9), error))
            found.append(shared.setdefault(tuple(options), tuple(options)))
        return found

    def _pairs(self, way: Way, actions: Sequence[Action]) -> list[Mapping[tuple[int, int], float]]:
        """Return what a pair of neighbours holds more: the tensor between them, if the first saves what it returns.

        The effect of an action on all blocks has it that the block before does the same.
        """
        found: list[Mapping[tuple[int, int], float]] = []
        effects = [way.actions[action] for action in actions]
        for place, output in enumerate(self.blocks.outputs[:-1] / way.parts):
            keeps = [index for index, each in enumerate(effects) if each.keeps_output[place]]
            frees = [
                index
                for index, each in enumerate(effects)
                if each.frees_input[place + 1] and not each.keeps_output[place]
            ]
            found.append(dict.fromkeys(itertools.product(keeps, frees), float(output)))
        return found if any(found) else []


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
