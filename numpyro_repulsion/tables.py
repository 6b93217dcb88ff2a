"""The table that ``summary`` returns: a pandas DataFrame whose text and HTML begin with the findings about the run."""

from __future__ import annotations

from functools import cache
from typing import Any

from numpyro_repulsion.findings import Diagnosis

#: Tables of more rows are shortened when they are shown, as pandas shortens them.
MAX_ROWS = 1_000
#: What stands below the list of findings; the documentation has no address of its own yet.
WHERE = 'See "Troubleshooting" in the documentation for what each finding means.'


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
