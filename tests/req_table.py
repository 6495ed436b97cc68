"""A pytest plugin: which acceptance check is covered by which test.

``@pytest.mark.req("AC-07")`` (several ids allowed) ties a test to a check. After a run of the whole suite a table lists
every check of this release with its tests, or MISSING (``--req-table`` shows it for a partial run too). With
``--req-strict`` the run fails unless each required check has a test that passed and none that failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

TITLES = {
    "AC-01": "event ids rise strictly, also after a reset; a refusal changes nothing",
    "AC-02": "a full event queue answers with a typed error; queued events keep their order",
    "AC-03": "an event accepted during a tick takes effect in the next one",
    "AC-04": "concurrent next_chunk calls of one session never overlap",
    "AC-05": "output that names another tick is refused, and the session fails unchanged",
    "AC-06": "output without metadata, or with ids out of order, is refused by name",
    "AC-07": "the engine's error wins over missing metadata",
    "AC-08": "a failing prepare or commit changes nothing",
    "AC-09": "a failed session refuses ticks until reset, which keeps the event floor",
    "AC-10": "a tick never changes its sampling template",
    "AC-11": "routing id and tick request id differ, and both can be seen",
    "AC-12": "close from active or failed frees the pages, and the id can be used again",
    "AC-13": "a failed cleanup leaves a tombstone, and other sessions go on",
    "AC-14": "a socket closed during a tick takes the same close path",
    "AC-15": "concurrent closes clean up once and agree on the outcome",
    "AC-16": "more than one replica without affinity is refused before any work",
    "AC-17": "a batching mode the stage cannot honour is refused at startup",
    "AC-18": "capacity of the tiny geometry, byte by byte",
    "AC-19": "cross-attention reservation follows requested or effective sessions",
    "AC-20": "memory the model keeps for itself lowers the capacity",
    "AC-21": "capacity of the large causal world geometry",
    "AC-22": "capacity of the 44-page geometry",
    "AC-23": "the window stays bounded over 20 blocks and the free count levels off",
    "AC-24": "interleaved sessions have disjoint pages and the right LRU order",
    "AC-25": "eviction closes the oldest session once and returns all its pages",
    "AC-26": "a forward or device error returns the pages and drops model state",
    "AC-27": "paged attention across sink and window equals a dense reference",
    "AC-28": "two sessions never read each other's conditioning, and a session's next tick reads what its last one encoded",
    "AC-29": "conditioning is encoded once, and a branch is complete or not there",
    "AC-30": "what is in use stays readable after its session was evicted",
    "AC-31": "conditioning is counted by storage, and dropping the session drops it",
    "AC-32": "a session whose first step fails leaves nothing behind",
    "AC-33": "artifact errors name pipeline, artifact, expected, actual and request",
    "AC-34": "no preview is decoded unless requested, and none is made up",
    "AC-35": "media types and rates of decoded artifacts; an abort has no primary",
    "AC-36": "the first frame on the robot endpoint is the deployment's handshake map",
    "AC-37": "a full observation gets a finite chunk; a short state is padded, an empty camera masked; twice on a connection",
    "AC-38": "a malformed observation gets a coded error that names the key, and the next one succeeds",
    "AC-39": "with fixed noise, actions are the same under any session id and after a reset",
    "AC-40": "a flow-matching chunk equals the reference loop within 1e-6",
    "AC-41": "concurrent duplex sessions never get each other's frames; every frame names its session and response",
    "AC-42": "an interruption ends the response as cancelled, no later frame of it is delivered, and the next one starts",
    "AC-43": "exactly one terminal message on success, cancel, error and disconnect",
    "AC-46": "the stalled-input limit: parsing, and a stalled session ends with an error",
    "AC-48": "the recipe loader refuses what it does not own; the config survives msgpack",
    "AC-49": "importing config and session packages never loads CUDA or a model runtime",
    "AC-50": "metric labels are bounded and documented; benchmarks validate and name their setting",
}
REQUIRED = tuple(f"AC-{number:02d}" for number in (*range(1, 44), 46, 48, 49, 50))


@dataclass
class Coverage:
    """The tests of one acceptance check, by outcome."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAIL"
        if self.passed:
            return "pass"
        return "skipped" if self.skipped else "MISSING"


class RequirementTable:
    """Collects outcomes as reports come in; the last phase that is not a pass decides a test's outcome."""

    def __init__(self) -> None:
        self.checks = {check: Coverage() for check in TITLES}
        self._outcomes: dict[str, str] = {}
        self._checks_of: dict[str, tuple[str, ...]] = {}

    def add_test(self, nodeid: str, checks: tuple[str, ...]) -> None:
        self._checks_of[nodeid] = checks

    def add_report(self, nodeid: str, when: str, outcome: str) -> None:
        tells = when == "call" or outcome != "passed"
        if tells and nodeid in self._checks_of and self._outcomes.get(nodeid) != "failed":
            self._outcomes[nodeid] = outcome

    def settle(self) -> None:
        """Sort every test that ran under its checks."""
        self.checks = {check: Coverage() for check in TITLES}
        for nodeid, outcome in self._outcomes.items():
            for check in self._checks_of[nodeid]:
                getattr(self.checks[check], outcome).append(nodeid)

    def unmet(self) -> list[str]:
        """The required checks without a passing test, or with a failing one."""
        return [check for check in REQUIRED if self.checks[check].verdict != "pass"]

    def lines(self) -> list[str]:
        rows = []
        for check, coverage in self.checks.items():
            required = "*" if check in REQUIRED else " "
            rows.append(f"{check}{required} {coverage.verdict:<8}{TITLES[check]}")
            tests = [("", coverage.passed), ("failed: ", coverage.failed), ("skipped: ", coverage.skipped)]
            rows.extend(f"{'':16}{label}{nodeid}" for label, nodeids in tests for nodeid in _merge_parameters(nodeids))
        rows.append("* required for this release")
        return rows


def _merge_parameters(nodeids: list[str]) -> list[str]:
    """One line per test function: the cases of a parametrised test are counted, not listed."""
    counts: dict[str, int] = {}
    for nodeid in nodeids:
        function = nodeid.split("[", 1)[0]
        counts[function] = counts.get(function, 0) + 1
    return [function if count == 1 else f"{function} ({count} cases)" for function, count in counts.items()]


_table = pytest.StashKey[RequirementTable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--req-strict", action="store_true", help="fail when a required acceptance check is not passing")
    parser.addoption("--req-table", action="store_true", help="show the acceptance checks after a partial run too")


def pytest_configure(config: pytest.Config) -> None:
    table = RequirementTable()
    config.stash[_table] = table
    config.pluginmanager.register(_Collector(table), "requirement-table")


class _Collector:
    """The hooks that need the table."""

    def __init__(self, table: RequirementTable) -> None:
        self.table = table

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            checks = tuple(str(check) for mark in item.iter_markers("req") for check in mark.args)
            unknown = [check for check in checks if check not in TITLES]
            if unknown:
                raise pytest.UsageError(f"{item.nodeid}: no such acceptance check: {', '.join(unknown)}")
            if checks:
                self.table.add_test(item.nodeid, checks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.table.add_report(report.nodeid, report.when or "", report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.table.settle()
        passed_so_far = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if session.config.getoption("--req-strict") and self.table.unmet() and passed_so_far:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    table = config.stash[_table]
    partial = config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr
    if partial and not config.getoption("--req-strict") and not config.getoption("--req-table"):
        return
    terminalreporter.section("acceptance checks")
    for line in table.lines():
        terminalreporter.write_line(line)
    if config.getoption("--req-strict") and table.unmet():
        terminalreporter.write_line(f"--req-strict: not passing: {', '.join(table.unmet())}", red=True)
