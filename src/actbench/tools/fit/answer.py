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
    return (*_unchanged(found), *(_told(each, found) for each in _plans_of_answer(found))) or (_nearest(found),)


def answer_first(found: Fitted) -> list[Tried]:
    """Return the plans of both shortlists, each once: those that the answer names, and then the others."""
    return _each_once([*_plans_of_answer(found), *found.shortlist(), *found.shortlist(adapters=True)])


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
    changes = [f"gradients {training.gradient}"]
    changes += [f"{what} changed" for what in ("updates", "precision") if getattr(training, what) == "other"]
    changes += ["adapters trained in place of the model"] if training.trained == "adapters" else []
    of_time = f"{tried.slowdown:.2f} of the exact step's time (estimated)"
    return f"{tried.words}: {_memory(tried, found)}, {of_time}, {', '.join(changes)}."


def _memory(tried: Tried, found: Fitted) -> str:
    return f"{format_bytes(tried.need_bytes)} of {format_bytes(found.limit_bytes)}"


def _nearest(found: Fitted) -> str:
    limit, fits = format_bytes(found.limit_bytes), [each for each in found.tried if found.fits(each)]
    if fits:
        first = fits[0]
        return (
            f"Nothing fits within {found.max_slowdown:g} times the exact step's time; {first.words} fits and takes "
            f"{first.slowdown:.3g} times: {format_bytes(first.need_bytes)} of {limit}."
        )
    least = found.least
    return (
        f"No plan that was simulated fits in {limit}; {least.words} needs least of them, "
        f"{format_bytes(least.need_bytes)}."
    )


def impossible(fitted: Fitted, *, knows_least: bool, least_profile: str | None, has_more: bool) -> str:
    """Return the message for a fit without a result: the least need, and what to change.

    The arguments are those of :class:`actbench.tools.fit.fit.Fit`.
    """
    limit = fitted.limit_bytes
    fits = [each for each in fitted.tried if fitted.fits(each)]
    if fits:
        fastest = fits[0]
        return (
            f"nothing fits within --max-slowdown {fitted.max_slowdown:g}: {fastest.words} fits and takes "
            f"{fastest.slowdown:.3g} times the exact step's time"
        )
    if not knows_least:
        return "the time of --budget ended before the plan that needs least was simulated: give a larger --budget"
    least = fitted.least
    remedies = [_smaller(least, limit)]
    card = f"--device-profile {least_profile}, the smallest card that would do"
    remedies += [card] if least_profile else []
    remedies += ["a larger --memory-limit"] if has_more else []
    remedies += ["leave out --exact"] if least.record.asked.exact else []
    return (
        f"nothing fits in {format_bytes(limit)}: the least that is possible, {least.words}, needs "
        f"{format_bytes(least.need_bytes)}; {', or '.join(remedies)}"
    )


def _smaller(least: Tried, limit: int) -> str:
    """Return what to make smaller: the model, if it fills the memory by itself, or else the batch."""
    parts = least.measured.peak_parts
    of_model = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes if parts else 0
    if of_model <= limit:
        return "take a smaller --batch-size or shorter samples"
    alone = f"weights, gradients and optimizer state alone are {format_bytes(of_model)} of that"
    return f"{alone}: take a smaller model or type"
