"""The answer of a fit in a few sentences: whether the model fits unchanged, and the fastest plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actbench.tools.fit.records import Tried
from actbench.tools.fit.shortlist import Fitted
from actbench.units import format_bytes


def answer(found: Fitted) -> tuple[str, ...]:
    """Return a sentence if the model fits unchanged, and at most three about what else fits and is fast enough.

    If nothing does, the sentence is about what comes nearest.
    """
    return (*_unchanged(found), *(_told(each, found) for each in _plans_of_answer(found))) or _nearest(found)


def answer_first(found: Fitted) -> list[Tried]:
    """Return the plans of both shortlists, each once: those that the answer names, and then the others."""
    return _each_once([*_plans_of_answer(found), *found.shortlist(), *found.shortlist(adapters=True)])


def numbered(found: Fitted) -> list[Tried]:
    """Return all plans in tables by their numbers: first those of the answer. What changes nothing has no number."""
    shown = _each_once([*(answer_first(found) or _fitting(found)), *found.listed()])
    return [each for each in shown if not each.is_unchanged]


def _plans_of_answer(found: Fitted) -> list[Tried]:
    """Return the plans that an answer names, in its order; each is in a table below it. The exact step is left out."""
    shown, adapted = found.shortlist(), found.shortlist(adapters=True)
    if not shown and not adapted:
        return []
    chosen = [_nearest_to_exact(shown or adapted), *shown[:1]]
    chosen += [each for each in adapted[:1] if not shown or each.seconds < shown[0].seconds]
    return [each for each in _each_once(chosen) if each is not found.exact]


def _unchanged(found: Fitted) -> Sequence[str]:
    """Return the sentence that what the user named fits as it is; none if it does not."""
    base = found.exact.record.asked.scheme
    what = "unchanged" if base == "exact" else f"with {base} alone"
    return [f"It fits {what}: {_memory(found.exact, found)}."] if found.fits(found.exact) else []


def _nearest_to_exact(plans: Sequence[Tried]) -> Tried:
    """Return the fastest plan that trains as the exact step does, or else with its gradients, or else at all."""
    exact = [each for each in plans if each.training.is_exact]
    same = [each for each in plans if each.training.gradient == "exact"]
    return (*exact, *same, *plans)[0]


def _each_once(plans: Iterable[Tried]) -> list[Tried]:
    return list({id(each): each for each in plans}.values())


def _told(tried: Tried, found: Fitted) -> str:
    training = tried.training
    other = [what for what in ("updates", "precision") if getattr(training, what) == "other"]
    has = " and ".join([f"{training.gradient} gradients", *([f"other {' and '.join(other)}"] if other else [])])
    trains = f"trains adapters with {has}" if training.trained == "adapters" else f"has {has}"
    number = 1 + [id(each) for each in numbered(found)].index(id(tried))
    return (
        f"Plan {number} needs {_memory(tried, found)} and {_time(tried.slowdown)} (estimated), and {trains}: "
        f"{tried.words}."
    )


def _time(ratio: float) -> str:
    """Return a time in comparison with another: ``15 % more time``."""
    percent = round(100 * (ratio - 1))
    if ratio >= _MANY_TIMES:
        return f"{times(ratio)} the time"
    return f"{abs(percent)} % {'more' if percent > 0 else 'less'} time" if percent else "the same time"


_MANY_TIMES = 2  # from which on a ratio is told as such, not in percent


def times(ratio: float) -> str:
    """Return a ratio in words: ``twice``, ``2.5 times``."""
    return "twice" if ratio == _MANY_TIMES else f"{ratio:.3g} times"


def _memory(tried: Tried, found: Fitted) -> str:
    return f"{format_bytes(tried.need_bytes)} of {format_bytes(found.limit_bytes)}"


def _fitting(found: Fitted) -> list[Tried]:
    """Return the fastest plan that fits, however slow it is; none if none fits."""
    return [each for each in found.tried if found.fits(each)][:1]


def _nearest(found: Fitted) -> tuple[str, ...]:
    for fastest in _fitting(found):
        return f"Nothing fits within {times(found.max_slowdown)} the exact step's time.", _told(fastest, found)
    least, limit = found.least, format_bytes(found.limit_bytes)
    needs = f"{least.words} needs least of them, {format_bytes(least.need_bytes)}"
    return (f"No plan that was simulated fits in {limit}; {needs}.",)


def impossible(
    fitted: Fitted, *, cut_short: str, knows_least: bool, least_profile: str | None, has_more: bool
) -> tuple[str, ...]:
    """Return the sentences of a fit without a result: the least need, and what to change.

    The arguments are those of :class:`actbench.tools.fit.fit.Fit`.
    """
    if cut_short:
        *_, nearest = _nearest(fitted)
        return f"Nothing found yet within {times(fitted.max_slowdown)} the exact step's time. {cut_short}", nearest
    if not knows_least or _fitting(fitted):
        return _nearest(fitted)
    least, limit = fitted.least, fitted.limit_bytes
    remedies = [_smaller(least, limit)]
    card = f"--device-profile {least_profile}, the smallest card that would do"
    remedies += [card] if least_profile else []
    remedies += ["a larger --memory-limit"] if has_more else []
    remedies += ["leave out --exact"] if least.record.asked.exact else []
    needs = f"the least that is possible, {least.words}, needs {format_bytes(least.need_bytes)}"
    return (f"Nothing fits in {format_bytes(limit)}: {needs}; {', or '.join(remedies)}.",)


def _smaller(least: Tried, limit: int) -> str:
    """Return what to make smaller: the model, if it fills the memory by itself, or else the batch."""
    parts = least.measured.peak_parts
    of_model = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes if parts else 0
    if of_model <= limit:
        return "take a smaller --batch-size or shorter samples"
    alone = f"weights, gradients and optimizer state alone are {format_bytes(of_model)} of that"
    return f"{alone}: take a smaller model or type"
