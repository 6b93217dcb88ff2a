"""The table of `summary`: a data frame that shows the findings about its run."""

import pickle
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from numpyro_repulsion.findings import MAX_ROWS, WHERE, Diagnosis, Finding, with_findings

FOUND = Diagnosis([Finding("not_mixed", "error", 1.5, "R-hat is 1.5 < 2.", "Raise `num_steps`.")], "SGLD: 4 particles.")
COLUMNS = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean", "mcse_sd", "ess_mean", "ess_tail", "r_hat", "nested_r_hat"]


def plain(rows=3):
    values = np.arange(float(rows * len(COLUMNS))).reshape(rows, -1)
    return pd.DataFrame(values, [f"a_rather_long_name[{i}]" for i in range(rows)], COLUMNS)


@pytest.fixture
def table():
    return with_findings(plain(), FOUND)


def test_text_and_html_show_the_run_the_findings_and_all_columns(table):
    text = str(table)
    assert text == repr(table) == f"{FOUND}\n{WHERE}\n\n{plain().to_string()}"
    assert text.startswith("SGLD: 4 particles.\n- [error] not_mixed: ") and "..." not in text
    html = table._repr_html_()
    assert html.startswith(FOUND._repr_html_()) and html.count("R-hat is 1.5 &lt; 2.") == 1
    assert all(f"<th>{name}</th>" in html for name in [*COLUMNS, *plain().index])
    # Nothing is to be looked up in a list that is empty.
    good = with_findings(plain(), Diagnosis([], "SGLD: 4 particles."))
    assert str(good).startswith("SGLD: 4 particles.\nNo problems found.\n\n")
    assert "Troubleshooting" not in str(good) + good._repr_html_()
    with pd.option_context("display.notebook_repr_html", False):
        assert table._repr_html_() is None


def test_all_else_is_a_data_frame(table):
    assert isinstance(table, pd.DataFrame) and table.to_string() == plain().to_string()
    pd.testing.assert_frame_equal(pd.DataFrame(table), plain())
    assert "not_mixed" not in str(pd.DataFrame(table)) + table.to_html() + table.to_csv()


def test_parts_keep_the_findings(table):
    for part in (table[["mean", "sd"]], table.loc[table["mean"] > 5], table.round(1), table.sort_values("sd"), table.T):
        assert part.diagnosis is FOUND and str(part) == f"{FOUND}\n{WHERE}\n\n{part.to_string()}"
    assert pd.concat([table, table]).diagnosis is None and len(pd.concat([table, table])) == 6
    assert str(pd.concat([table, table])) == pd.concat([plain(), plain()]).to_string()


def test_copies_by_pickle_are_the_same(table):
    for again in (pickle.loads(pickle.dumps(table)), table.copy()):
        assert again.diagnosis == FOUND and str(again) == str(table) and type(again) is type(table)


def test_only_very_long_tables_are_shortened():
    assert len(str(with_findings(plain(MAX_ROWS), FOUND)).splitlines()) == MAX_ROWS + 5
    long = with_findings(plain(MAX_ROWS + 1), FOUND)
    assert len(str(long).splitlines()) < 40 and str(long).endswith(f"[{MAX_ROWS + 1} rows x {len(COLUMNS)} columns]")
    assert long._repr_html_().count("<tr>") < 40 and len(long.to_string().splitlines()) == MAX_ROWS + 2


def test_frames_that_show_text_of_their_own_keep_it():
    """As ArviZ's from 1.3 on, which carry what they show in a field."""

    class Own(pd.DataFrame):
        _metadata: ClassVar = ["_fmt_map"]
        _fmt_map = None

        @property
        def _constructor(self):
            return Own

        def to_string(self, *args, **kwargs):
            return pd.DataFrame(self).replace(self._fmt_map).to_string(*args, **kwargs)

    own = Own(plain())
    own._fmt_map = {0.0: "zero"}
    table = with_findings(own, FOUND)
    assert isinstance(table, Own) and table._fmt_map is own._fmt_map
    assert "zero" in str(table) and "zero" in str(table.loc[["a_rather_long_name[0]"]])
    assert type(table) is type(with_findings(Own(plain()), FOUND)) is not type(with_findings(plain(), FOUND))
