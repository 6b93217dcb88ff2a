"""Findings, each one problem of a run with its remedy; a diagnosis, an ordered list of them; a table with both."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
import json
import math
import re
from typing import Any, NamedTuple

#: From harmless to serious.
SEVERITIES = ("note", "warning", "error")
#: Above this share of rejected updates, the step-size bias is unknown.
MAX_FLAGGED = 1e-3
#: A scale that a small bias of many effects shifts by more of its standard deviations is named.
MAX_SHIFT = 0.25
#: What shifts a mean by more of its standard deviations is named: inexact integrals over latent variables of rows, and
#: rounded gradients. Five times as much is an error, of clipped gradients too.
MAX_MEAN_SHIFT = 0.1
#: The bound on the shift by clipped gradients above which it is named: several times the shift where that was measured.
MAX_CLIPPING_SHIFT = 0.25
#: A step that inflates variances by more is an error, however short the run is.
LARGE_BIAS = 0.2
#: Tables of more rows are shortened when they are shown, as pandas shortens them.
MAX_ROWS = 1_000
#: What stands below the list of findings; the documentation has no address of its own yet.
WHERE = 'See "Troubleshooting" in the documentation for what each finding means.'


class _Rule(NamedTuple):
    #: Findings that it makes superfluous: it names their cause or states the same more precisely.
    covers: str = ""
    #: Findings that it probably causes. These stay in the list, and their remedy refers to it.
    causes: str = ""


#: What gradients that vary a lot may cause.
_STEEP = "not_mixed flagged_updates clipped_gradients"
#: Findings of equal severity are listed in this order: causes before their symptoms.
RULES = {
    "short_run": _Rule(),
    "diverged_chains": _Rule(
        causes=f"{_STEEP} separate_modes several_basins funnel heavy_tails varying_curvature slow_directions step_bias"
    ),
    "cold_momenta": _Rule(causes="not_mixed slow_directions several_basins separate_modes"),
    "noncentered": _Rule(
        "funnel heavy_tails varying_curvature slow_directions step_bias short_run separate_modes several_basins "
        "gradient_noise control_variates_off",
        _STEEP,
    ),
    "few_levels": _Rule(
        "funnel heavy_tails varying_curvature slow_directions several_basins",
        f"{_STEEP} separate_modes",
    ),
    "funnel": _Rule("heavy_tails varying_curvature slow_directions step_bias short_run", _STEEP),
    "other_data": _Rule(causes=f"{_STEEP} step_bias"),
    "jumps_off": _Rule(causes="separate_modes several_basins not_mixed"),
    # Curvature differs between modes of different widths.
    "several_basins": _Rule("short_run funnel varying_curvature", "not_mixed"),
    # Where warmup finds several basins, it does not know how slow directions are.
    "slow_directions": _Rule("short_run", "not_mixed separate_modes step_bias"),
    "separate_modes": _Rule("several_basins short_run", "not_mixed"),
    "heavy_tails": _Rule("varying_curvature slow_directions step_bias short_run", _STEEP),
    "varying_curvature": _Rule("slow_directions step_bias short_run", _STEEP),
    "not_mixed": _Rule("short_run"),
    "step_bias": _Rule(causes="flagged_updates clipped_gradients"),
    "many_effects": _Rule(),
    "flagged_updates": _Rule(),
    "clipped_gradients": _Rule(),
    "rounding": _Rule(),
    "row_integrals": _Rule(),
    "gradient_noise": _Rule(),
    "control_variates_off": _Rule(),
    "optimizer": _Rule(),
}
#: What stands in backticks, and its HTML.
_BACKTICKS, _CODE = re.compile("`([^`]*)`"), r"<code>\1</code>"
#: Names of an earlier version.
_RENAMED = {"strayed": "diverged_chains", "noncentred": "noncentered"}


class Finding(NamedTuple):
    """One problem of a run.

    - **name** - a stable identifier, such as ``"funnel"``; :doc:`/findings` lists all of them.
    - **severity** - ``"note"``, ``"warning"`` or ``"error"``.
    - **figure** - the value that triggered it, or ``None``.
    - **message** - what is wrong, in one sentence.
    - **remedy** - what to do, in one sentence.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.findings import Finding
        >>> print(Finding("not_mixed", "error", 1.56, "R-hat is 1.56 for tau.", "Raise `num_steps`."))
        [error] not_mixed: R-hat is 1.56 for tau. Raise `num_steps`.
    """

    name: str
    severity: str
    figure: float | None
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.severity}] {self.name}: {self.message} {self.remedy}".rstrip()


class Diagnosis(tuple[Finding, ...]):
    """The findings about a run, a tuple, worst first; :func:`~numpyro_repulsion.diagnose` returns one.

    It is true if any finding is a warning or an error. ``"funnel" in diagnosis`` tests for a name, which occurs once. A
    finding that another one explains better is left out, and the remedy of a symptom refers to its cause.

    :param findings: in any order.
    :param headline: one line on what was run, for ``print``.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.findings import Diagnosis, Finding
        >>> found = Diagnosis([
        ...     Finding("short_run", "warning", 2.0, "The run is short for 2 of 2 quantities.", "Raise `num_samples`."),
        ...     Finding("several_basins", "error", None, "The weights of the modes are unknown.", "Order the labels."),
        ... ])
        >>> bool(found), [finding.name for finding in found], "several_basins" in found
        (True, ['several_basins'], True)
        >>> print(found)
        - [error] several_basins: The weights of the modes are unknown. Order the labels.
        >>> print(Diagnosis([]))
        No problems found.
    """

    headline: str

    def __new__(cls, findings: Iterable[Finding], headline: str = "") -> Diagnosis:
        diagnosis = super().__new__(cls, _merged(findings))
        diagnosis.headline = headline
        return diagnosis

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str) and item in _RENAMED:
            raise ValueError(f"The finding {item!r} is called {_RENAMED[item]!r} now.")
        return super().__contains__(item) or any(finding.name == item for finding in self)

    def __bool__(self) -> bool:
        return any(finding.severity != "note" for finding in self)

    def __str__(self) -> str:
        lines = [self.headline] if self.headline else []
        if not self:
            lines.append("No problems found.")
        return "\n".join(lines + [f"- {finding}" for finding in self])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = f"<p>{escape(self.headline)}</p>" * bool(self.headline) + "<p>No problems found.</p>" * (not self)
        if not len(self):
            return text
        left, colors = 'style="text-align: left"', {"note": "#3f7cc0", "warning": "#aa6c10", "error": "#d9453c"}
        rows = ""
        for finding in self:
            figure = "" if finding.figure is None else f"{finding.figure:.3g}"
            color = f'style="color: {colors[finding.severity]}; font-weight: bold"'
            cells = map(escape, (finding.name, figure, finding.message, finding.remedy))
            rows += f"<tr><td {color}>{escape(finding.severity)}</td>"
            rows += "".join(f"<td {left}>{_BACKTICKS.sub(_CODE, cell)}</td>" for cell in cells) + "</tr>"
        titles = "".join(f"<th {left}>{title}</th>" for title in ("Severity", "Finding", "Value", "Message", "Remedy"))
        return f"{text}<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"


def flagged_updates(count: int, share: float, remedy: str, is_measured: bool = False) -> Finding:
    """Return the finding about updates that were rejected or turned back.

    :param share: their share of all updates; 0 where it is unknown.
    :param remedy: what makes steps shorter, as a clause.
    :param is_measured: whether warmup measured the step, so that a few flagged updates are chance.
    """
    part = f" ({100 * share:.{3 if share > 0.095 else 2}g}% of all updates)" if share > 0 else ""
    words = f"{count} updates{part} were" if count > 1 else f"1 update{part} was"
    message = f"{words} rejected as not finite or reversed after a large gain of energy"
    severity, remedy = "warning", f"{remedy[:1].upper()}{remedy[1:]}, or reparameterize."
    if share > MAX_FLAGGED:
        severity, message = "error", f"{message}, so the step-size bias is unknown"
    elif is_measured and share > 0:
        severity, remedy = "note", "The effect on estimates is negligible."
    return Finding("flagged_updates", severity, float(count), f"{message}.", remedy)


def to_json(findings: Iterable[Finding]) -> str:
    """Return findings as JSON, for the attributes of inference data."""
    return json.dumps([finding._asdict() for finding in findings], allow_nan=False)


def from_json(text: str) -> list[Finding]:
    """Return the findings that :func:`to_json` wrote."""
    return [Finding(**finding) for finding in json.loads(text)]


def _level(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def _badness(finding: Finding) -> tuple[int, float]:
    figure = -math.inf if finding.figure is None else finding.figure
    # The figure of slow directions is how many draws the run is worth.
    return _level(finding), -figure if finding.name == "slow_directions" else figure


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return each name once, worst first, without covered findings; remedies of symptoms refer to their causes."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        if finding.name not in worst or _badness(finding) > _badness(worst[finding.name]):
            worst[finding.name] = finding
    rules = {name: rule for name, rule in RULES.items() if name in worst}
    covered = {
        name
        for cause, rule in rules.items()
        for name in rule.covers.split()
        if name in worst and _level(worst[name]) <= _level(worst[cause])
    }
    kept = {name: finding for name, finding in worst.items() if name not in covered}
    causes = {name: [x for x in rule.causes.split() if x in kept] for name, rule in rules.items() if name in kept}
    for cause, symptoms in reversed(causes.items()):
        # A cause is as serious as its worst symptom.
        severity = max([kept[cause], *(kept[name] for name in symptoms)], key=_level).severity
        kept[cause] = kept[cause]._replace(severity=severity)
    ordered = sorted(kept.values(), key=lambda x: (-_level(x), [*RULES, x.name].index(x.name)))
    for i, finding in enumerate(ordered):
        if cause := next((other.name for other in ordered if finding.name in causes.get(other.name, ())), ""):
            ordered[i] = finding._replace(remedy=f'The likely cause is "{cause}"; address it first.')
    return ordered


# --- The table that ``summary`` returns: a data frame whose text and HTML begin with the findings about the run. ---


class _Reported:
    """What the table of a summary adds to a class of data frames; the next class in line is that class."""

    diagnosis: Diagnosis | None = None
    to_string: Any
    _plain: Any

    @property
    def _constructor(self):
        # A selection of rows or columns, or a rounded table, keeps the findings.
        return type(self)

    def __repr__(self) -> str:
        is_long = len(self) > MAX_ROWS  # type: ignore[arg-type]
        table = self.to_string(max_rows=20 if is_long else None, show_dimensions=is_long)
        if self.diagnosis is None:
            return table
        report = [str(self.diagnosis), WHERE] if len(self.diagnosis) else [str(self.diagnosis)]
        return "\n".join([*report, "", table])

    __str__ = __repr__

    def _repr_html_(self) -> str | None:
        import pandas

        with pandas.option_context("display.max_rows", MAX_ROWS, "display.max_columns", None):
            table = super()._repr_html_()  # type: ignore[misc]
        if table is None or self.diagnosis is None:
            return table
        where = WHERE.replace('"', "&quot;")
        return self.diagnosis._repr_html_() + f"<p>{where}</p>" * bool(len(self.diagnosis)) + table

    def __reduce_ex__(self, protocol):
        # The class is made when it is needed, so pickle cannot find it by its name.
        return _empty, (self._plain,), self.__getstate__()


@cache
def _class_over(plain: Any) -> Any:
    """Return the class of tables with findings over a class of data frames, such as ArviZ's own."""
    body = {"_plain": plain, "_metadata": [*plain._metadata, "diagnosis"], "__module__": __name__}
    return type("SummaryTable", (_Reported, plain), body)


def _empty(plain):
    made = _class_over(plain)
    return made.__new__(made)


def with_findings(table: Any, diagnosis: Diagnosis) -> Any:
    """Return a data frame that shows the findings about its run above its rows, and is the same otherwise."""
    shown = _class_over(type(table))(table).__finalize__(table)  # type: ignore[arg-type]
    shown.diagnosis = diagnosis
    return shown
