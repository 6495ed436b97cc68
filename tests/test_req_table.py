"""The requirement table itself."""

from __future__ import annotations

from req_table import REQUIRED, RequirementTable


def table_with(*reports: tuple[str, str, str]) -> RequirementTable:
    table = RequirementTable()
    table.add_test("tests/a.py::one", ("AC-01", "AC-02"))
    table.add_test("tests/a.py::two", ("AC-02",))
    for nodeid, when, outcome in reports:
        table.add_report(nodeid, when, outcome)
    table.settle()
    return table


def test_a_check_with_a_passing_test_passes_and_one_without_tests_is_missing() -> None:
    table = table_with(("tests/a.py::one", "setup", "passed"), ("tests/a.py::one", "call", "passed"))
    assert table.checks["AC-01"].verdict == "pass"
    assert table.checks["AC-03"].verdict == "MISSING"
    assert table.unmet() == [check for check in REQUIRED if check not in ("AC-01", "AC-02")]


def test_one_failing_test_fails_its_check_whatever_else_passed() -> None:
    table = table_with(("tests/a.py::one", "call", "passed"), ("tests/a.py::two", "call", "failed"))
    assert table.checks["AC-01"].verdict == "pass"
    assert table.checks["AC-02"].verdict == "FAIL"


def test_a_failing_teardown_turns_a_passed_test_into_a_failed_one() -> None:
    table = table_with(("tests/a.py::one", "call", "passed"), ("tests/a.py::one", "teardown", "failed"))
    assert table.checks["AC-01"].verdict == "FAIL"


def test_a_check_whose_only_test_was_skipped_is_not_met() -> None:
    table = table_with(("tests/a.py::one", "setup", "skipped"))
    assert table.checks["AC-01"].verdict == "skipped"
    assert "AC-01" in table.unmet()


def test_the_cases_of_a_parametrised_test_share_a_line() -> None:
    table = RequirementTable()
    for case in ("x", "y"):
        table.add_test(f"tests/a.py::many[{case}]", ("AC-05",))
        table.add_report(f"tests/a.py::many[{case}]", "call", "passed")
    table.settle()
    assert any(line.strip() == "tests/a.py::many (2 cases)" for line in table.lines())
