"""Findings, each one problem of a run with its remedy; and a diagnosis, an ordered list of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
import json
import math
from typing import Any, NamedTuple, overload

__all__ = ["LARGE_BIAS", "SEVERITIES", "Diagnosis", "Finding", "flagged_updates", "from_json", "to_json"]

#: From harmless to serious.
SEVERITIES = ("note", "warning", "error")
#: Above this share of rejected updates and clipped gradients, the step-size bias is unknown.
MAX_FLAGGED = 1e-3
#: A step that inflates variances by more is an error, however short the run is.
LARGE_BIAS = 0.2
#: Findings of equal severity are listed in this order: causes before their symptoms.
_ORDER = (
    "short_run",
    "diverged_chains",
    "cold_momenta",
    "noncentered",
    "few_levels",
    "funnel",
    "other_data",
    "jumps_off",
    "several_basins",
    "slow_directions",
    "separate_modes",
    "heavy_tails",
    "varying_curvature",
    "not_mixed",
    "step_bias",
    "flagged_updates",
    "gradient_noise",
    "control_variates_off",
    "warmup",
    "optimizer",
)
#: Each finding makes the listed ones superfluous: it names their cause or states the same more precisely.
_COVERS = {
    "noncentered": {
        "funnel",
        "heavy_tails",
        "varying_curvature",
        "slow_directions",
        "step_bias",
        "short_run",
        "separate_modes",
        "several_basins",
        "gradient_noise",
        "control_variates_off",
    },
    "few_levels": {"funnel", "heavy_tails", "varying_curvature", "slow_directions", "several_basins"},
    "funnel": {"heavy_tails", "varying_curvature", "slow_directions", "step_bias", "short_run"},
    "heavy_tails": {"varying_curvature", "slow_directions", "step_bias", "short_run"},
    "varying_curvature": {"slow_directions", "step_bias", "short_run"},
    "separate_modes": {"several_basins", "short_run"},
    # Curvature differs between modes of different widths.
    "several_basins": {"short_run", "funnel", "varying_curvature"},
    "slow_directions": {"short_run"},
    "not_mixed": {"short_run"},
}
#: Each finding probably causes the listed ones. These stay in the list, and their remedy refers to the cause.
_CAUSES = {
    "diverged_chains": {
        "not_mixed",
        "separate_modes",
        "flagged_updates",
        "several_basins",
        "funnel",
        "heavy_tails",
        "varying_curvature",
        "slow_directions",
        "step_bias",
    },
    "cold_momenta": {"not_mixed", "slow_directions", "several_basins", "separate_modes"},
    "noncentered": {"not_mixed", "flagged_updates"},
    "few_levels": {"not_mixed", "flagged_updates", "separate_modes"},
    "funnel": {"not_mixed", "flagged_updates"},
    "heavy_tails": {"not_mixed", "flagged_updates"},
    "varying_curvature": {"not_mixed", "flagged_updates"},
    "other_data": {"not_mixed", "flagged_updates", "step_bias"},
    "jumps_off": {"separate_modes", "several_basins", "not_mixed"},
    "separate_modes": {"not_mixed"},
    "several_basins": {"not_mixed"},
    "step_bias": {"flagged_updates"},
    # Where warmup finds several basins, it does not know how slow directions are.
    "slow_directions": {"not_mixed", "separate_modes", "step_bias"},
}
#: Findings that get worse as their figure falls.
_WORSE_IF_SMALL = {"slow_directions"}
_COLORS = {"note": "#33659c", "warning": "#b7791f", "error": "#b3261e"}

#: Names of an earlier version.
_RENAMED = {"strayed": "diverged_chains", "noncentred": "noncentered"}


class Finding(NamedTuple):
    """One problem of a run.

    - **name** - a stable identifier, such as ``"funnel"``; :doc:`/findings` lists all of them.
    - **severity** - ``"note"``, ``"warning"`` or ``"error"``.
    - **figure** - the number behind it, or ``None``.
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


class Diagnosis(Sequence[Finding]):
    """The findings about a run, worst first; :func:`~numpyro_repulsion.diagnose` returns one.

    It is true if any finding is a warning or an error. ``"funnel" in diagnosis`` tests for a name. Each name occurs
    once. A finding that another one explains better is left out, and the remedy of a symptom refers to its cause.
    ``print`` shows one finding per line, and notebooks show a table.

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

    __slots__ = ("findings", "headline")

    def __init__(self, findings: Iterable[Finding], headline: str = ""):
        self.findings: tuple[Finding, ...] = _merged(findings)
        self.headline = headline

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...

    def __getitem__(self, index):
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str) and item in _RENAMED:
            raise ValueError(f"The finding {item!r} is called {_RENAMED[item]!r} now.")
        return item in self.findings or any(finding.name == item for finding in self.findings)

    def __bool__(self) -> bool:
        return any(_level(finding) > 0 for finding in self.findings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Diagnosis):
            return NotImplemented
        return (self.findings, self.headline) == (other.findings, other.headline)

    def __hash__(self) -> int:
        return hash((self.findings, self.headline))

    def __str__(self) -> str:
        lines = [self.headline] if self.headline else []
        if not self:
            lines.append("No problems found.")
        return "\n".join(lines + [f"- {finding}" for finding in self.findings])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = f"<p>{escape(self.headline)}</p>" if self.headline else ""
        if not self:
            text += "<p>No problems found.</p>"
        if not self.findings:
            return text
        rows = ""
        for finding in self.findings:
            color = _COLORS.get(finding.severity, _COLORS["warning"])
            figure = "" if finding.figure is None else f"{finding.figure:.3g}"
            rows += f'<tr><td style="color: {color}; font-weight: bold">{escape(finding.severity)}</td>'
            for cell in (finding.name, figure, finding.message, finding.remedy):
                rows += f'<td style="text-align: left">{escape(cell)}</td>'
            rows += "</tr>"
        header = "".join(
            f'<th style="text-align: left">{title}</th>' for title in ("Severity", "Finding", "Figure", "", "Remedy")
        )
        return f"{text}<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"


def flagged_updates(count: int, share: float, remedy: str, is_measured: bool = False) -> Finding:
    """Return the finding about updates that were rejected, turned back, or had a clipped gradient.

    :param count: number of such updates.
    :param share: their share of all updates; 0 where it is unknown.
    :param remedy: what makes steps shorter, as a clause.
    :param is_measured: whether warmup measured the step. A few flagged updates then are those of minibatches with
        unusual rows: a clipped gradient is ten times as long as others, and one in a thousand hardly moves a mean.
    """
    message = f"{f'{count} updates were' if count > 1 else '1 update was'} rejected (not finite), turned back (far "
    message += "too much energy) or had a clipped gradient (far too long)"
    if share > 0:
        message += f", {100 * share:.{3 if share > 0.095 else 2}g} % of all updates"
    remedy = f"{_capital(remedy)}, or reparameterize."
    if share > MAX_FLAGGED:
        return Finding(
            "flagged_updates", "error", float(count), f"{message}, so the step-size bias is unknown.", remedy
        )
    if is_measured and share > 0:
        return Finding("flagged_updates", "note", float(count), f"{message}.", "So few hardly matter.")
    return Finding("flagged_updates", "warning", float(count), f"{message}.", remedy)


def to_json(findings: Iterable[Finding]) -> str:
    """Return findings as JSON, for the attributes of inference data."""
    return json.dumps([finding._asdict() for finding in findings], allow_nan=False)


def from_json(text: str) -> list[Finding]:
    """Return the findings that :func:`to_json` wrote; ignores fields that this version does not know."""
    nothing: dict[str, Any] = {"name": "warmup", "severity": "warning", "figure": None, "message": "", "remedy": ""}
    found = [nothing | one for one in json.loads(text)]
    return [Finding(*(one[field] for field in Finding._fields)) for one in found]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _level(finding: Finding) -> int:
    """Return the rank of a finding's severity; one that this version does not know counts as a warning."""
    return SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else 1


def _place(finding: Finding) -> tuple[int, int]:
    return -_level(finding), _ORDER.index(finding.name) if finding.name in _ORDER else len(_ORDER)


def _badness(finding: Finding) -> tuple[int, float]:
    if finding.figure is None:
        return _level(finding), -math.inf
    return _level(finding), -finding.figure if finding.name in _WORSE_IF_SMALL else finding.figure


def _merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each name once, worst first, without covered findings; remedies of symptoms refer to their causes."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        if finding.name not in worst or _badness(finding) > _badness(worst[finding.name]):
            worst[finding.name] = finding
    covered = {
        name
        for name, finding in worst.items()
        for other in worst.values()
        if name in _COVERS.get(other.name, ()) and _level(finding) <= _level(other)
    }
    kept = {name: finding for name, finding in worst.items() if name not in covered}
    for cause in reversed(_ORDER):
        if cause in kept and (symptoms := [kept[name] for name in _CAUSES.get(cause, ()) if name in kept]):
            # A cause is as serious as its worst symptom.
            kept[cause] = kept[cause]._replace(severity=max([kept[cause], *symptoms], key=_level).severity)
    ordered = sorted(kept.values(), key=_place)
    return tuple(_with_cause(finding, ordered) for finding in ordered)


def _with_cause(finding: Finding, others: Sequence[Finding]) -> Finding:
    """Return the finding; its remedy refers to the first of its causes among the others, if there is one."""
    for other in others:
        if finding.name in _CAUSES.get(other.name, ()):
            return finding._replace(remedy=f'The likely cause is "{other.name}"; address it first.')
    return finding
