"""Summaries of runs: the numbers of ensembles, and what is wrong. On ArviZ 0.23 and on 1.x."""

from functools import partial
import importlib.metadata
from itertools import permutations
import json
from pathlib import Path
import pickle
import re
import warnings

import arviz
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import X, Y, made, run
import xarray

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, diagnose, ensemble_ess, ensemble_mcse, nested_rhat, summary, to_inference_data
from numpyro_repulsion.findings import RULES, SEVERITIES, Diagnosis, Finding, from_json, to_json
from numpyro_repulsion.kernels.runs import has_other_data
from numpyro_repulsion.report import _variable, diagnosis_of

NEW_ARVIZ = int(importlib.metadata.version("arviz").split(".")[0]) >= 1


@pytest.fixture(scope="module")
def mcmc(logistic_run):
    return logistic_run[0]


@pytest.fixture(scope="module")
def data(logistic_run):
    return logistic_run[1]


@pytest.mark.parametrize("from_data", [False, True])
def test_summary(mcmc, data, from_data, capsys, caplog):
    table = summary(data if from_data else mcmc, var_names=["beta", "total"])
    assert len(table) == 4 and table.diagnosis == diagnose(data if from_data else mcmc)
    text = str(table)
    assert text.startswith("SGLDR: 6 particles in 2 ensembles, 10 updates of size 0.001 per draw")
    assert text.startswith(str(table.diagnosis)) and text.endswith(table.to_string()) and "flagged_updates" not in text
    # A script that shows no table is told of problems, once and by name; nothing else is printed.
    assert capsys.readouterr().out == ""
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("summary found 1 problem: not_mixed (error).") and table.diagnosis[0].name == "not_mixed"


def test_summary_is_of_ensembles(mcmc, data):
    table = summary(data)
    labels = [f"beta[{i}]" for i in range(3)]
    for column, function in (
        ("ess_mean", ensemble_ess),
        ("ess_tail", partial(ensemble_ess, method="tail")),
        ("mcse_mean", ensemble_mcse),
        ("mcse_sd", partial(ensemble_mcse, method="sd")),
        ("nested_r_hat", nested_rhat),
        ("r_hat", lambda data: arviz.rhat(data["posterior"] if NEW_ARVIZ else data)),
    ):
        found = np.asarray(table.loc[labels, column], float)
        np.testing.assert_allclose(found, function(data)["beta"], rtol=0.06, atol=6e-4)
        # ArviZ 1.3 prints text that it made of its own numbers.
        lines = [line.split() for line in table.loc[labels].to_string().splitlines()]
        shown = [float(line[lines[0].index(column) + 1]) for line in lines[1:]]
        np.testing.assert_allclose(shown, function(data)["beta"], rtol=0.06, atol=6e-4)
    short = summary(data, coords={"draw": slice(0, 2)}, var_names=["beta"])
    assert list(short) == [*(name for name in table if name != "nested_r_hat")] and short["r_hat"].isna().all()
    other_order = summary(data, var_names=["total", "beta"])
    assert list(other_order.index) == ["total", *labels]
    for name in ("mean", "ess_mean", "r_hat"):
        np.testing.assert_array_equal(*(np.asarray(x.loc[labels, name], float) for x in (other_order, table)))
    diagnostics, stats = (summary(data, kind=kind) for kind in ("diagnostics", "stats"))
    assert [*stats, *diagnostics] == list(table) and "ess_mean" not in stats
    np.testing.assert_array_equal(np.asarray(diagnostics["r_hat"], float), np.asarray(table["r_hat"], float))
    # Not what ArviZ takes of independent chains.
    plain = np.asarray(arviz.summary(data).loc[labels, "ess_bulk"], float)
    assert not np.allclose(plain, np.asarray(table.loc[labels, "ess_mean"], float), rtol=0.01)


def test_of_some_chains_or_draws_it_is_of_ensembles_too():
    mcmc = run(
        SGLD(potential_fn=lambda z: jnp.sum(z**4), step_size=0.1, num_ensembles=2), num_samples=400, num_chains=8
    )
    data = to_inference_data(mcmc)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    # Those of independent chains are other ones.
    for coords, expected in (
        ({"chain": [0, 1, 2]}, ensemble_ess(draws[:3])),
        ({"draw": slice(0, 199)}, ensemble_ess(draws[:, :200], 2)),
    ):
        table = summary(data, coords=coords)
        np.testing.assert_allclose(np.asarray(table["ess_mean"], float), expected, rtol=0.01)


def test_rows_of_a_summary_find_their_variables():
    names = ["z", "z[a]", "z[a].b"]
    rows = ["z", "z[0]", "z[a]", "z[a][1, 2]", "z[a].b[3]"]
    assert [_variable(row, names) for row in rows] == ["z", "z", "z[a]", "z[a]", "z[a].b"]


def test_summary_counts_divergences():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mcmc = run(SGLD(potential_fn=lambda z: jnp.sum(z**4), step_size=3.0), num_samples=9, num_chains=6)
        data = to_inference_data(mcmc)
        said = str(summary(mcmc))
    flagged = data["posterior"].attrs["num_flagged_updates"]
    assert flagged == int(mcmc.last_state.num_flagged_updates) > 0
    assert f"[error] flagged_updates: {flagged} updates (" in said
    assert "% of all updates) were rejected as not finite or reversed after" in said
    # Of a step that is too long nothing is said twice.
    assert said.count("Divide `step_size`") == 1 and 'The likely cause is "step_bias"' in said


def test_other_formats_and_foreign_data_are_refused(data):
    for form in ("long", "xarray"):
        with pytest.raises(ValueError, match=f"the wide table; got fmt='{form}'. For ArviZ's own call arviz.summary"):
            summary(data, fmt=form)
    assert len(summary(data, fmt="wide", var_names=["beta"])) == 3
    chains = {"x": np.random.default_rng(0).normal(size=(2, 50))}
    foreign = arviz.from_dict({"posterior": chains}) if NEW_ARVIZ else arviz.from_dict(posterior=chains)
    for function in (summary, diagnose):
        for given in (foreign, chains, None):
            with pytest.raises(TypeError, match=f"`{function.__name__}` takes an MCMC run or .* to_inference_data"):
                function(given)


def rows_in_a_plate(x, y, weight=1.0):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.handlers.scale(scale=weight), numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def test_summary_knows_other_data_than_those_of_the_warmup():
    mcmc = made(SGLD(rows_in_a_plate), num_warmup=60, num_samples=40, num_chains=6)
    x = X[:, :2]
    mcmc.warmup(random.key(0), x, Y)
    state = mcmc.post_warmup_state
    mcmc.run(random.key(1), x, Y)
    data = to_inference_data(mcmc)
    assert data["posterior"].attrs["other_data"] == "false"
    assert np.isfinite(data["posterior"].attrs["step_size_bias"])
    assert "data changed" not in str(summary(mcmc))
    mcmc.post_warmup_state = state
    mcmc.run(random.key(1), x, Y, 30.0)
    for source in (mcmc, to_inference_data(mcmc)):
        said = str(summary(source))
        assert "The data changed after warmup" in said and "Warm up on these data, unless the two" in said
        assert "BiasBudget" not in said and "% of a posterior sd" not in said
        assert ("step_bias" in said) == (source is mcmc)
        # It is the cause of all the rest, and comes first.
        assert diagnose(source)[0].name == "other_data"


def begun(kernel, *args, seed=0):
    """A run before its first iteration."""
    mcmc = made(kernel, num_warmup=100, num_samples=1, num_chains=6)
    mcmc._args, mcmc._kwargs = args, {}
    starts = None if args else random.normal(random.key(1), (6, 2))
    mcmc._last_state = kernel.init(random.split(random.key(seed), 6), 100, starts, args, {})
    return mcmc


@pytest.mark.parametrize("num_rows", [1000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_same_data_are_never_taken_for_others(num_rows):
    # Terms of both signs, and sites of many scales.
    x = random.normal(random.key(0), (num_rows, 2))
    y = 1e-3 * random.normal(random.key(1), (num_rows,)) + x[:, 0]

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 3))
        numpyro.sample("y", dist.Normal(x @ beta, scale), obs=y)

    kernel = SGLD(model)
    for seed in range(2 if num_rows == 1000 else 6):
        mcmc, order = begun(kernel, x, y, seed=seed), np.random.default_rng(seed).permutation(num_rows)
        for mcmc._args in ((np.asarray(x), np.asarray(y)), (x[order], y[order])):
            assert not has_other_data(mcmc)
        mcmc._args = (x, 1.1 * y)
        assert has_other_data(mcmc)


@pytest.mark.parametrize("is_model", [True, False])
def test_another_rounding_is_no_other_data(is_model):
    wobble, shape = [0.0], jax.ShapeDtypeStruct((), jnp.float32)

    def energy(z):
        # As the error of an adaptive solver, which no digest of the program sees.
        return jnp.sum(z**2) / 2 + jax.pure_callback(lambda: np.float32(wobble[0]), shape, vmap_method="sequential")

    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.factor("energy", -energy(z - y))

    mcmc = begun(SGLD(model), jnp.ones(2)) if is_model else begun(SGLD(potential_fn=energy))
    wobble[0] = 100.0
    assert not has_other_data(mcmc)
    if is_model:
        mcmc._args = (jnp.ones(2) + 3.0,)
        assert has_other_data(mcmc)


def test_no_bias_is_promised_where_many_updates_are_flagged(mcmc):
    data = to_inference_data(mcmc)  # of its own, to be written to

    def say(share):
        data["posterior"].attrs.update(before | {"step_size_measured": "true", "step_size_bias": 0.03, **share})
        return str(summary(data))

    before = dict(data["posterior"].attrs)
    text = say({"num_flagged_updates": 1, "share_flagged": 1e-4})
    assert "at most 1.5%" in text and "[note] flagged_updates: 1 update (0.01% of all updates) was rejected" in text
    assert "energy. The effect on estimates is negligible.\n" in text
    text = say({"num_flagged_updates": 100, "share_flagged": 0.01})
    assert (
        "100 updates (1% of all updates) were" in text
        and "energy, so the step-size bias is unknown." in text
        and "at most" not in text
    )
    assert "at most 1.5%" in say({"clipping_shift": 0.05}) and "at most" not in say({"clipping_shift": 0.3})


# Findings, of pretended runs

ATTRIBUTES = {
    "inference_library": "numpyro_repulsion",
    "algorithm": "SGLD",
    "is_sampler": "true",
    "gradient": "FullData()",
    "minibatches": "",
    "step_size": 0.01,
    "step_size_measured": "true",
    "step_size_bias": 0.03,
    "remedy": "divide `step_size` by 2 to 10",
    "findings": "[]",
    "other_data": "false",
    "coupling": "noise",
    "num_independent": 1,
    "num_particles": 6,
    "num_ensembles": 1,
    "num_steps": 10,
    "num_flagged_updates": 0,
    "share_flagged": 0.0,
    "clipping_shift": 0.0,
}
NOISE = np.random.default_rng(0).normal(size=(6, 500, 2))
WALKS = NOISE.cumsum(1)
SIDE = np.where(np.arange(6) < 3, -5.0, 5.0)[:, None, None]


def pretend(draws=NOISE, **attributes):
    """The draws of a run, with its attributes."""
    dims = ("chain", "draw", "group")
    data = xarray.Dataset({"z": (dims, draws)}, {"group": ["north", "south"][: draws.shape[2]]})
    return data.assign_attrs(ATTRIBUTES | attributes)


def of_warmup(*names, severity="warning", figure=None):
    return to_json([Finding(name, severity, figure, f"It is {name}.", f"Change {name}.") for name in names])


def names_of(diagnosis):
    return [finding.name for finding in diagnosis]


def test_a_run_without_problems_has_no_findings():
    found = diagnosis_of(None, pretend())
    assert not found and len(found) == 0 and list(found) == []
    assert str(found) == (
        "SGLD: 6 particles in 1 ensemble, 10 updates of size 0.01 (adapted in warmup) per draw, step-size bias at "
        "most 1.5% of a posterior sd.\nNo problems found."
    )
    assert "below 0.1% of a posterior sd" in str(diagnosis_of(None, pretend(step_size_bias=1e-5)))


SAID = {
    ("not_mixed", None): ["R-hat is ", "Use the kernel SGHMC, or raise `num_steps`"],
    ("separate_modes", 2.0): [
        "For 2 of 2 quantities particles explore separate regions",
        "standard errors are unknown. Order",
    ],
    ("short_run", 2.0): ["For 2 of 2 quantities the run is short compared with the mixing time"],
    ("short_run", 1.0): ["Each particle has only 1 draw, too few"],
    ("short_run", 3.0): ["Each particle has only 3 draws, too few"],
}


@pytest.mark.parametrize(
    "name, severity, figure, draws, attributes",
    [
        ("not_mixed", "error", None, WALKS, {}),
        # Particles that keep their order on a line, while their average goes everywhere.
        ("not_mixed", "warning", None, np.sort(NOISE, 0), {"coupling": "interaction"}),
        ("separate_modes", "error", 2.0, SIDE + NOISE, {}),
        ("short_run", "warning", 2.0, NOISE[:, :20], {}),
        ("short_run", "warning", 1.0, NOISE[:, :1], {}),
        # Said by a warmup that was too short to learn from, before what it seemed to learn.
        ("short_run", "error", 5.0, WALKS, {"findings": of_warmup("short_run", severity="error", figure=5.0)}),
        ("short_run", "warning", 3.0, NOISE[:, :3], {}),
        ("flagged_updates", "note", 3.0, NOISE, {"num_flagged_updates": 3, "share_flagged": 1e-4}),
        (
            "flagged_updates",
            "warning",
            3.0,
            NOISE,
            {"num_flagged_updates": 3, "share_flagged": 1e-4, "step_size_measured": "false"},
        ),
        ("flagged_updates", "error", 300.0, NOISE, {"num_flagged_updates": 300, "share_flagged": 0.01}),
        ("clipped_gradients", "warning", 0.3, NOISE, {"clipping_shift": 0.3}),
        ("clipped_gradients", "error", 0.7, NOISE, {"clipping_shift": 0.7}),
        ("other_data", "warning", None, NOISE, {"findings": of_warmup("other_data"), "other_data": "true"}),
        ("optimizer", "note", None, NOISE, {"is_sampler": "false"}),
        *[
            (name, "warning", 7.0, NOISE, {"findings": of_warmup(name, figure=7.0)})
            for name in (
                "funnel",
                "several_basins",
                "heavy_tails",
                "varying_curvature",
                "step_bias",
                "gradient_noise",
                "slow_directions",
                "jumps_off",
                "control_variates_off",
            )
        ],
    ],
)
def test_every_finding_is_reachable(name, severity, figure, draws, attributes):
    data = pretend(draws, **attributes)
    found = diagnosis_of(None, data)
    (finding,) = found
    assert (finding.name, finding.severity) == (name, severity) and name in found and name in RULES
    assert figure is None or finding.figure == figure
    assert bool(found) == (severity != "note")
    assert ("No problems found." in str(found)) == (severity == "note")
    assert finding.message.endswith(".") and not finding.message[0].islower()
    assert finding.remedy.endswith(".") and finding.remedy[0].isupper()
    assert str(found).splitlines()[-1] == f"- {finding}"
    assert all(words in str(finding) for words in SAID.get((name, figure), []))


def test_all_names_have_a_place_in_the_order_and_in_the_documentation():
    names = list(RULES)
    for cause, rule in RULES.items():
        assert set(rule.covers.split()) <= set(names)
        assert all(names.index(cause) < names.index(name) for name in rule.causes.split())
    page = (Path(__file__).parents[1] / "docs" / "findings.md").read_text()
    # A section each, whose name is its anchor.
    assert sorted(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == sorted(names)


def test_the_worst_comes_first_whatever_the_order():
    findings = [
        Finding("optimizer", "note", None, "", ""),
        Finding("gradient_noise", "warning", 20.0, "", ""),
        Finding("control_variates_off", "warning", None, "", ""),
        Finding("not_mixed", "error", 2.0, "", ""),
        Finding("of another package", "warning", None, "", ""),
    ]
    expected = ["not_mixed", "gradient_noise", "control_variates_off", "of another package", "optimizer"]
    for order in permutations(findings):
        assert names_of(Diagnosis(order)) == expected
    # It is true if something is wrong.
    assert [bool(Diagnosis([Finding("x", severity, None, "", "")])) for severity in SEVERITIES] == [False, True, True]


def test_each_name_occurs_once_with_the_worst_figure():
    # Plain chains have a warmup each.
    several = [Finding("slow_directions", "warning", figure, "", "") for figure in (90.0, 30.0, 60.0)]
    several += [Finding("funnel", "error", figure, "", "") for figure in (0.6, None, 1.2, 0.9)]
    several += [Finding("step_bias", "error", 0.1, "", ""), Finding("step_bias", "warning", 0.2, "", "")]
    assert [(finding.name, finding.figure) for finding in Diagnosis(several[:3])] == [("slow_directions", 30.0)]
    assert [(finding.name, finding.figure) for finding in Diagnosis(several[3:7])] == [("funnel", 1.2)]
    assert [(finding.severity, finding.figure) for finding in Diagnosis(several[7:])] == [("error", 0.1)]
    assert len(Diagnosis(several + several)) == 1


def test_causes_stand_for_what_they_explain():
    names = ("slow_directions", "step_bias", "funnel")
    draws = np.concatenate((WALKS[..., :1], NOISE[..., 1:]), -1)
    found = diagnosis_of(None, pretend(draws, findings=of_warmup(*names, severity="error"), num_flagged_updates=3))
    assert names_of(found) == ["funnel", "not_mixed", "flagged_updates"]
    assert "for z[north]," in found[1].message
    for symptom in found[1:]:
        assert symptom.remedy == 'The likely cause is "funnel"; address it first.'
    assert str(found).count("Change") == 1
    # A forecast that dense scales would mend, beside a run that is short: one remedy.
    found = diagnosis_of(None, pretend(NOISE[:, :20], findings=of_warmup("slow_directions")))
    assert names_of(found) == ["slow_directions"] and found[0].remedy == "Change slow_directions."
    # Jumps were asked for already.
    found = diagnosis_of(None, pretend(SIDE + NOISE, findings=of_warmup("jumps_off")))
    assert names_of(found) == ["jumps_off", "separate_modes"] and "Archive" not in str(found)
    found = diagnosis_of(None, pretend(SIDE + NOISE, findings=of_warmup("several_basins")))
    assert names_of(found) == ["separate_modes"]
    # A cause is as serious as its symptoms.
    found = diagnosis_of(None, pretend(WALKS, findings=of_warmup("slow_directions")))
    assert [(finding.name, finding.severity) for finding in found] == [
        ("slow_directions", "error"),
        ("not_mixed", "error"),
    ]
    assert Diagnosis(found) == found
    # Slow particles stay apart as in separate modes.
    found = diagnosis_of(None, pretend(SIDE + NOISE, findings=of_warmup("slow_directions")))
    assert names_of(found) == ["slow_directions", "separate_modes"] and '"slow_directions"' in found[1].remedy


def test_nothing_more_serious_is_covered():
    for cause, rule in RULES.items():
        for name in rule.covers.split():
            found = Diagnosis([Finding(cause, "warning", None, "", ""), Finding(name, "error", None, "", "")])
            assert name in found and found[0].name == name


def test_every_quantity_counts_once():
    # One has separate modes, the other has not mixed.
    draws = np.concatenate((SIDE + NOISE[..., :1], WALKS[..., 1:]), -1)
    found = diagnosis_of(None, pretend(draws))
    assert names_of(found) == ["separate_modes", "not_mixed"]
    assert found[0].message.startswith("For 1 of 2 quantities") and "R-hat is " in found[1].message
    assert "for z[south]," in found[1].message


def test_findings_survive_json_and_files(tmp_path, data):
    findings = [Finding("funnel", "error", 1.45, 'A "quoted" word, ε.', "Do."), Finding("x", "note", None, "", "")]
    assert from_json(to_json(findings)) == findings and from_json("[]") == []
    assert json.loads(to_json(findings))[0]["figure"] == 1.45
    assert Diagnosis(Diagnosis(findings)) == Diagnosis(findings)
    before = data["posterior"].attrs["findings"]
    data["posterior"].attrs["findings"] = to_json(findings)
    try:
        data.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
        read = arviz.from_netcdf(tmp_path / "run.nc")
        assert diagnose(read) == diagnose(data) and "funnel" in diagnose(read)
    finally:
        data["posterior"].attrs["findings"] = before


def test_html_is_escaped():
    found = Diagnosis([Finding("<b>", "error", 2.0, "1 < 2 & so on", 'set `x="<i>"`')], "A <run>")
    text = found._repr_html_()
    for piece in ("A &lt;run&gt;", "&lt;b&gt;", "1 &lt; 2 &amp; so on", "<code>x=&quot;&lt;i&gt;&quot;</code><", ">2<"):
        assert piece in text
    assert "<b>" not in text and "<i>" not in text and "No problems" not in text
    assert Diagnosis([])._repr_html_() == "<p>No problems found.</p>"
    note = Diagnosis([Finding("optimizer", "note", None, "It is.", "")])._repr_html_()
    assert "No problems found." in note and "It is." in note


def test_a_diagnosis_is_a_sequence():
    findings = [Finding("funnel", "error", 1.0, "", ""), Finding("jumps_off", "warning", None, "", "")]
    found = Diagnosis(findings)
    assert found[0] == findings[0] and found[:2] == tuple(findings) and found[-1].name == "jumps_off"
    assert findings[0] in found and "funnel" in found and "short_run" not in found and 3 not in found
    assert repr(found) == str(found) and found == Diagnosis(findings[::-1]) != 3
    again = pickle.loads(pickle.dumps(Diagnosis(findings, "A run.")))
    assert again == found and again.headline == "A run."
    for old, new in (("strayed", "diverged_chains"), ("noncentred", "noncentered")):
        with pytest.raises(ValueError, match=f"'{old}' is called '{new}' now"):
            old in Diagnosis([])  # noqa: B015
