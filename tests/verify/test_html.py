"""Pages: self-contained, escaped, and true to the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from firstlight.engine.assemble import declare
from firstlight.verify.day0 import Day0Options, Day0Report, run_day0
from firstlight.verify.html import BAR_WIDTH, error_bars, render_day0, render_verify

VOID = {"meta", "br", "wbr", "rect", "line"}


class Page(HTMLParser):
    """Reads a page; keeps its tags, attributes and text, and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that it closes the tag opened last."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note text outside of styles."""
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        """Return what a reader sees, blanks folded."""
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def report(tiny: Callable[[str], Path]) -> Day0Report:
    """Return the report of a tiny hybrid with an index."""
    declared = declare(str(tiny("glm5_next")))
    return run_day0(declared, declared.plan(), Day0Options(reference="ref", num_tokens=6, max_tokens=2))


@pytest.fixture
def failed(report: Day0Report) -> Day0Report:
    """Return the report with one check of layer 3 failed."""
    index = next(i for i, check in enumerate(report.proof.checks) if check.layer == 3)
    bad = replace(report.proof.checks[index], relative=0.5, passed=False, note="grows with position")
    checks = (*report.proof.checks[:index], bad, *report.proof.checks[index + 1 :])
    return replace(report, proof=replace(report.proof, checks=checks), repro="firstlight verify m --layers 3")


@pytest.mark.parametrize("kind", ["day0", "verify"])
def test_page_is_whole_and_loads_nothing(report: Day0Report, kind: str) -> None:
    text = render_day0(report) if kind == "day0" else render_verify(report.proof)
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.links == []
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text.lower()


def test_page_suits_light_dark_and_paper(report: Day0Report) -> None:
    text = render_day0(report)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_page_opens_with_the_checklist_and_its_evidence(report: Day0Report) -> None:
    text = Page(render_day0(report)).text
    places = [text.index(f" {step.name}{step.status} ") for step in report.steps]
    assert places == sorted(places)
    assert places[-1] < text.index("What it writes")
    for step in report.steps:
        for finding in step.findings:
            assert finding.evidence in text


def test_page_tells_the_verdict_and_every_check(report: Day0Report, failed: Day0Report) -> None:
    good, bad = Page(render_day0(report)).text, Page(render_day0(failed)).text
    assert report.proof.verdict in good
    assert "unproven" in good
    assert "first divergence" not in good
    assert "differs from its reference" in bad
    assert "first divergence" in bad
    assert "firstlight verify m --layers 3" in bad
    assert "grows with position" in bad
    assert all(check.place in good for check in report.proof.checks)


def test_page_of_a_verification_tells_the_same(failed: Day0Report) -> None:
    text = Page(render_verify(failed.proof, repro=failed.repro)).text
    assert "differs from its reference" in text
    assert failed.repro in text


def test_what_a_model_or_a_config_says_cannot_become_markup(report: Day0Report) -> None:
    evil = "<script>alert('&')</script>"
    written = replace(report.written, text=evil + "\x00\x1b", prompt=evil)
    proof = replace(report.proof, notices=(evil,))
    marked = replace(report, model=evil, unknown_keys=(evil,), written=written, proof=proof)
    page = Page(render_day0(marked))
    assert "script" not in page.tags
    assert page.text.count("alert('&')") == 6
    assert "\ufffd\ufffd" in page.text
    assert "\x00" not in page.text


def test_bars_pass_their_limit_exactly_where_a_check_fails(failed: Day0Report) -> None:
    for bar in error_bars(failed.proof):
        strict = bar.row.worst.tolerance == 0
        assert strict or (bar.length > bar.limit) == bool(bar.row.failed)


@pytest.mark.parametrize(
    ("relative", "share"),
    [(0.0, 0), (1e-12, 0), (1.0, 1), (50.0, 1), (float("inf"), 1), (float("nan"), 1)],
)
def test_bars_stay_in_their_frame(report: Day0Report, relative: float, share: int) -> None:
    check = replace(report.proof.checks[0], relative=relative)
    (bar,) = error_bars(replace(report.proof, checks=(check,)))
    assert bar.length == share * BAR_WIDTH
    assert 0 <= bar.limit <= BAR_WIDTH


def rows(text: str, summary: str) -> list[str]:
    """Return the rows of the table below a summary, without their numbers of errors."""
    table = text[text.index(summary) :].split("</table>")[0]
    return re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)[1:]


def test_each_choice_of_a_body_is_told_once_with_all_its_layers(report: Day0Report) -> None:
    found = rows(render_day0(report), "why these bodies")
    reasons = [row.split("</td>", maxsplit=2)[1:] for row in found]
    assert len(reasons) == len({str(reason) for reason in reasons})
    (linear,) = (row for row in found if ">linear/" in row)
    assert f"<td>outside, 0-{len(report.proof.layers) - 1}</td>" in linear


def test_outputs_of_one_module_share_a_row_that_tells_the_worst(report: Day0Report) -> None:
    place = "layers.0.mixer_residual"
    own = [check for check in report.proof.checks if check.place == place]
    assert len(own) > 1
    bad = replace(own[1], relative=0.25, passed=False)
    checks = tuple(bad if check is own[1] else check for check in report.proof.checks)
    found = rows(render_day0(replace(report, proof=replace(report.proof, checks=checks))), "comparisons</summary>")
    (row,) = (row for row in found if place in row.replace("<wbr>", ""))
    assert f"worst of {len(own)}" in row
    assert "2.5e-01" in row
    assert "failed" in row


def test_parallel_layout_ends_without_a_stray_blank(report: Day0Report) -> None:
    assert "CP=1; graph mode" in Page(render_day0(report)).text


def test_costs_are_told_within_the_context_of_the_model(report: Day0Report) -> None:
    text = Page(render_day0(report)).text
    assert [cost.context for cost in report.costs] == [report.memory.context]
    assert f"per token at {report.memory.context // 1024}k" in text
    assert "128k" not in text
