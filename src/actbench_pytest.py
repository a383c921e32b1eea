"""pytest's plug-in: ``@pytest.mark.gpu_memory`` on tests that train, which then run on a simulated card.

pytest imports this file in every process of an environment that has actbench. It stands beside the package, which is
not imported until a test with the mark is collected or an option is given.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

MARK = "gpu_memory"
_LINE = (
    f'{MARK}(device, limit=None): run the test on a simulated card, such as "rtx-4090", with no GPU; it fails if its '
    'training step needs more memory than the limit, such as "20 GiB", or than the card has'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for tests with the mark."""
    group = parser.getgroup("actbench", "memory of training steps on simulated cards")
    group.addoption(
        "--gpu-memory", action="store_true", help="show a table of the peaks of all tests with the mark gpu_memory"
    )
    group.addoption(
        "--gpu-memory-baseline",
        metavar="FILE",
        help="compare with the peaks of the last passing run in this file, and store those of tests that pass",
    )
    # --fail-on-increase is an option of pytest-memray: pytest would start with neither plug-in
    group.addoption(
        "--gpu-memory-fail-on-increase",
        metavar="SHARE",
        help="with --gpu-memory-baseline: fail tests whose peak is so much higher, such as 2%%",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and read the options that were given."""
    config.addinivalue_line("markers", _LINE)
    asked = ("gpu_memory", "gpu_memory_baseline", "gpu_memory_fail_on_increase")
    if any(config.getoption(name) for name in asked):
        from actbench.tools.pytest.session import configure

        configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a file or class with a mark whose arguments cannot be used."""
    report = yield
    marked = [each for each in report.result if isinstance(each, pytest.Item) and each.get_closest_marker(MARK)]
    if marked:
        from actbench.tools.pytest.mark import problems

        if found := problems(marked):
            report.outcome, report.longrepr, report.result = "failed", "\n".join(found), []
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run the body of a test with the mark on its card."""
    if pyfuncitem.get_closest_marker(MARK) is None:
        return (yield)
    from actbench.tools.pytest.measuring import on_card

    with on_card(pyfuncitem):
        return (yield)
    return True  # type: ignore[unreachable]  # the block has ended the training loop
