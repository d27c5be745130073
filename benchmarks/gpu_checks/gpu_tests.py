"""All tests marked `gpu`, in one pytest process."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from gpu_checks.common import ROOT, CommandFailed, Context, Outcome, run_python

TESTS = ROOT / "tests"
LIMIT_SECONDS = 170


def run_marked_tests(context: Context) -> Outcome:
    """Passed when every test marked `gpu` passes; a skipped test counts as a failure."""
    files = sorted(path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))
    report = context.folder / "report.xml"
    words = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--durations=10"]
    error = ""
    try:
        run_python([*words, f"--rootdir={ROOT}", f"--confcutdir={TESTS}", *files], ROOT, LIMIT_SECONDS)
    except CommandFailed as failure:
        error = str(failure)
    if not report.exists():
        return Outcome(False, "pytest wrote no report", {"error": error})
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = {
        _name(case): _reason(case)
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = {_name(case): _reason(case) for case in cases if case.find("skipped") is not None}
    passed = len(cases) - len(failed) - len(skipped)
    return Outcome(
        bool(cases) and not error and not failed and not skipped,
        f"{passed} of {len(cases)} tests passed" + "".join(f"; {name}" for name in [*failed, *skipped][:3]),
        {
            "tests": len(cases),
            "passed": passed,
            "failed": failed,
            "skipped": skipped,
            "seconds": {_name(case): round(float(case.get("time", 0)), 1) for case in cases},
        },
    )


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _reason(case: ET.Element) -> str:
    found = next(child for child in case if child.tag in ("failure", "error", "skipped"))
    return (found.get("message") or "").strip()[:400]
