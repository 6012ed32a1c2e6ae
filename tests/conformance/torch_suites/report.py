"""What a run has found, as it comes and at the end."""

from __future__ import annotations

import re

from conformance.torch_suites.lists import Exclusions
from conformance.torch_suites.runner import Result

__all__ = ["Report"]

_KINDS = "Error|Exception|Needed|Lost|Timeout|Exceeded|Initialized|Released|Consumed"
_ERROR = re.compile(rf"^[\w.]+({_KINDS}): ?.*", re.MULTILINE)


def _headline(text: str) -> str:
    """The line of a failure that says most."""
    found = _ERROR.search(text)
    return found[0] if found else text.partition("\n")[0]


class Report:
    """Collects results and prints them.

    Args:
        every: All tests of the suites that were chosen, run or not.
        excluded: Those that are left out.
        passing: Those that passed before, and have to.
        num_lines: How many lines to print of a failure.
    """

    def __init__(
        self, every: list[str], excluded: Exclusions, passing: set[str], num_lines: int
    ) -> None:
        self._every = every
        self._excluded = excluded
        self._passing = passing
        self._num_lines = num_lines
        self._results: list[Result] = []

    def add(self, result: Result) -> None:
        self._results.append(result)
        print(f"{result.outcome:7} {result.took_s:5.1f} s  {result.test}", flush=True)
        if result.text:
            print("    " + "\n    ".join(self._shorten(result.text)), flush=True)

    def _shorten(self, text: str) -> list[str]:
        # The end of the first traceback says what is wrong; its beginning is torch's.
        lines = text.splitlines()
        if not self._num_lines or len(lines) <= self._num_lines:
            return lines
        end = next(
            (i for i, line in enumerate(lines) if i and not line.strip()), len(lines)
        )
        return [lines[0], "...", *lines[max(1, end - self._num_lines) : end]]

    def ran(self) -> set[str]:
        return {result.test for result in self._results}

    def passed(self) -> set[str]:
        bad = {result.test for result in self._results if result.outcome != "passed"}
        return self.ran() - bad

    def regressions(self) -> list[str]:
        """Tests that are on the list and did not pass."""
        return sorted(self._passing & (self.ran() - self.passed()))

    def print_summary(self, took_s: float) -> None:
        failed = [result for result in self._results if result.outcome != "passed"]
        if failed:
            print("\nnot passed:")
        for result in failed:
            print(f"  {result.test}: {result.outcome} {_headline(result.text)[:200]}")
        print(
            f"\n{'suite':34} {'tests':>5} {'passed':>6} {'failed':>6} {'excluded':>8}"
        )
        passed, ran = self.passed(), self.ran()
        for suite in dict.fromkeys(test.partition(".")[0] for test in self._every):
            tests = {test for test in self._every if test.partition(".")[0] == suite}
            left_out = sum(test in self._excluded.reasons for test in tests - ran)
            print(
                f"{suite:34} {len(tests):5} {len(tests & passed):6} "
                f"{len(tests & ran - passed):6} {left_out:8}"
            )
        print(f"it took {took_s:.0f} s")
        print(f"conformance: {len(passed)} passed, {len(ran - passed)} failed")
        for test in self.regressions():
            print(f"regression: {test} is listed as passing")
