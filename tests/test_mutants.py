"""The bugs of ``mutants.py`` can still be put in."""

from mutants import MUTANTS, ROOT, broken


def test_every_bug_finds_its_line():
    for mutant in MUTANTS:
        assert broken(mutant) != (ROOT / "numpyro_repulsion" / mutant.file).read_text(), mutant.name
        assert all(list((ROOT / "tests").rglob(f"{name}.py")) for name in mutant.tests.split()), mutant.name
    assert len(MUTANTS) > 30
