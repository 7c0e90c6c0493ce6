"""A report as JUnit XML, which systems that run tests show: a test case for each trial."""

from __future__ import annotations

from xml.etree import ElementTree as xml

from octavo.conformance.registry import Outcome, Trial
from octavo.conformance.report import Report


def junit(report: Report) -> bytes:
    """UTF-8. What failed has the reason as its message, and the command that repeats it as its text."""
    failed = [outcome.result for _, outcome in report.outcomes]
    suite = xml.Element(
        "testsuite",
        name=f"octavo conformance {report.backend.qualified_name()} on {report.device}",
        tests=str(len(report.outcomes)),
        failures=str(failed.count("failed")),
        errors=str(failed.count("error")),
        skipped="0",
        time=f"{sum(outcome.seconds for _, outcome in report.outcomes):.3f}",
    )
    properties = xml.SubElement(suite, "properties")
    xml.SubElement(properties, "property", name="seed", value=str(report.seed))
    for trial, outcome in report.outcomes:
        suite.append(_case(report, trial, outcome))
    root = xml.Element("testsuites")
    root.append(suite)
    xml.indent(root)
    return bytes(xml.tostring(root, encoding="utf-8", xml_declaration=True))


def _case(report: Report, trial: Trial, outcome: Outcome) -> xml.Element:
    where = f"conformance.{report.backend.qualified_name()}.{trial.case.name}"
    case = xml.Element("testcase", classname=where, name=str(trial), time=f"{outcome.seconds:.3f}")
    if outcome.result != "passed":
        kind = "failure" if outcome.result == "failed" else "error"
        what = xml.SubElement(case, kind, message=_printable(outcome.reason), type=outcome.result)
        what.text = report.repeat(trial)
    elif outcome.remark:
        xml.SubElement(case, "system-out").text = _printable(outcome.remark)
    return case


def _printable(text: str) -> str:
    """Without what XML cannot hold: an error may say anything."""
    return "".join(character if character.isprintable() else " " for character in text)
