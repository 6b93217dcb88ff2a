"""The house's own rules: imports run downward, heavy packages stay out, public names are documented."""

import ast
import graphlib
import importlib
import inspect
from pathlib import Path
import re
import subprocess
import sys

import pytest

import numpyro_repulsion

PACKAGE = "numpyro_repulsion"
ROOT = Path(numpyro_repulsion.__file__).parent
#: Files by dotted name: a noun is a file, or a folder of files whose imports of each other are its own affair.
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
MATHEMATICS = {"jax", "jaxtyping", "numpy"}
HOST = MATHEMATICS | {"numpyro"}
#: What each file may import: packages, and files of this one.
ARROWS = {
    "checks": (MATHEMATICS, set()),
    # A table shows itself by pandas.
    "findings": ({"pandas"}, set()),
    "noise": (MATHEMATICS, set()),
    "rounding": (MATHEMATICS | {"scipy"}, set()),
    "version": (set(), set()),
    "rows": (MATHEMATICS, {"digests", "layout", "processes"}),
    "from_full": (HOST, {"checks", "rows"}),
    "processes": (MATHEMATICS, set()),
    "digests": (MATHEMATICS, set()),
    "layout": (MATHEMATICS, {"processes"}),
    "interactions": (MATHEMATICS, {"checks", "noise", "rounding"}),
    "schedules": (MATHEMATICS, {"checks", "rounding"}),
    "dynamics": (MATHEMATICS, {"checks", "noise", "rounding", "interactions"}),
    "gradients": (HOST, {"checks", "layout", "noise", "processes", "rounding", "rows"}),
    "starts": (HOST, {"checks"}),
    "warmup": (
        MATHEMATICS,
        {"findings", "noise", "rounding", "interactions", "schedules", "dynamics", "gradients"},
    ),
    "moves": (MATHEMATICS, {"checks", "noise", "rounding", "dynamics", "warmup"}),
    "kernels": (
        # The progress bar of a warmup.
        HOST | {"tqdm"},
        {
            "checks",
            "digests",
            "findings",
            "noise",
            "processes",
            "rounding",
            "rows",
            "interactions",
            "schedules",
            "dynamics",
            "gradients",
            "layout",
            "moves",
            "starts",
            "warmup",
        },
    ),
    # NumPyro has the effective sample size of one series, SciPy ranks.
    "diagnostics": (HOST | {"scipy"}, {"checks", "rounding", "gradients", "kernels", "warmup"}),
    "bias": (
        HOST,
        {"checks", "warmup", "dynamics", "interactions", "gradients", "kernels", "diagnostics", "processes"},
    ),
    "inference_data": (
        HOST | {"arviz", "xarray"},
        {"findings", "schedules", "gradients", "kernels", "diagnostics"},
    ),
    # Nothing else imports it, the public face neither.
    "contrib": (
        HOST | {"scipy", "tqdm"},
        {"checks", "diagnostics", "gradients", "inference_data", "kernels", "plots", "report", "rows"},
    ),
    "predictions": (HOST, {"checks", "gradients", "inference_data", "kernels", "rows"}),
    "report": (
        HOST | {"arviz"},
        {"bias", "checks", "diagnostics", "findings", "inference_data", "kernels", "predictions"},
    ),
    "plots": (
        HOST | {"matplotlib"},
        {"checks", "interactions", "gradients", "kernels", "diagnostics", "inference_data", "predictions"},
    ),
    "checkpointing": (HOST | {"tqdm"}, {"checks", "digests", "layout", "processes", "version", "gradients", "kernels"}),
    "__init__": (
        set(),
        {name.split(".")[0] for name in FILES} - {"checks", "contrib", "digests", "noise", "processes", "rounding"},
    ),
}


def imports(tree):
    """``(packages, files of this package)`` imported anywhere in a syntax tree, the standard library left out."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            # `from numpyro_repulsion import schedules` names a file, `... import RBF` would go up through __init__.
            within = node.module == PACKAGE
            names |= {f"{PACKAGE}.{alias.name}" for alias in node.names} if within else {node.module}
    packages = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    files = {name.split(".")[1] for name in names if name.startswith(PACKAGE + ".")}
    if PACKAGE in names:
        files.add("__init__")
    return packages - {PACKAGE}, files


class RunOnImport(ast.NodeTransformer):
    """Leaves of a module what runs when it is imported."""

    def visit_FunctionDef(self, node):
        return None

    def visit_If(self, node):
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def test_every_file_has_its_place():
    assert {name.split(".")[0] for name in FILES} <= set(ARROWS), "a new noun: say in ARROWS what it may import"


def offenders(breaks):
    """``file -> what it breaks`` by a rule that gives nothing where a file keeps it."""
    return {name: found for name, path in sorted(FILES.items()) if (found := breaks(name, path.read_text()))}


def upward(name, text):
    noun = name.split(".")[0]
    packages, files = imports(ast.parse(text))
    allowed_packages, allowed_files = ARROWS[noun]
    return sorted(packages - allowed_packages) + sorted(files - {noun} - allowed_files)


def eager(name, text):
    packages, _ = imports(RunOnImport().visit(ast.parse(text)))
    return sorted(packages & {"arviz", "xarray", "matplotlib"})


def test_tests_mirror_the_package():
    tests = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert tests == {name.split(".")[0] for name in FILES if "." in name}
    beside = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    assert not tests & {name.removeprefix("test_") for name in beside}, "a test of a folder lies in its folder"


def test_imports_run_downward():
    assert not offenders(upward)


def test_the_map_for_contributors_names_all_and_imports_run_downward_in_it():
    page = (Path(__file__).parents[1] / "docs" / "contributing.md").read_text()
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [(name, row) for row, cell in enumerate(table) for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]
    assert sorted(name for name, _ in named) == sorted(set(ARROWS) - {"__init__"})
    places = dict(named)
    raised = [(name, other) for name in places for other in ARROWS[name][1] if places[other] > places[name]]
    assert not raised


def circle(sources):
    """Files, by dotted name, that import each other in a circle; for type checkers alone, too."""
    graph = {}
    for name, text in sources.items():
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        graph[name] = {node.module.removeprefix(PACKAGE + ".") for node in found} & set(sources)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    assert not circle({name: path.read_text() for name, path in FILES.items()})
    assert circle({"a": f"from {PACKAGE}.b import x", "b": f"def f():\n  from {PACKAGE}.a import y"})


def test_optional_packages_are_imported_lazily():
    assert not offenders(eager)


def private(name, text):
    return re.findall(r"mcmc\._\w+|_getframe", text) if name != "kernels.mcmc" else None


def test_private_attributes_of_numpyro_are_in_one_room():
    assert not offenders(private)


#: Whose products are those of a model, or within `compiled`.
ROUNDS = {"checkpointing.identity", "rounding"}


def rounded(name, text):
    """Matrix products that accelerators round to ten bits."""
    nodes = list(ast.walk(ast.parse(text)))
    found = [ast.unparse(node) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)]
    if "import jax.numpy" not in text:
        found = []  # It computes on the host.
    found += re.findall(r"jnp\.(?:matmul|dot|vdot|einsum|tensordot|inner)\b|lax\.dot\w*|jnp\.linalg\.multi_dot", text)
    return [] if name in ROUNDS else found


def test_products_are_those_of_rounding():
    assert not offenders(rounded), "accelerators round them: take `matmul` and `einsum` of numpyro_repulsion.rounding"


def test_offenders_are_named():
    """The control: a file that breaks each rule."""
    bad = "import arviz\nfrom numpyro_repulsion.kernels import SGLD\n"
    assert upward("dynamics.new", bad) == ["arviz", "kernels"]
    assert eager("dynamics.new", bad) == ["arviz"]
    assert private("dynamics.new", "mcmc._args") == ["mcmc._args"]
    assert rounded("dynamics.new", "import jax.numpy as jnp; a @ b + jnp.einsum('ij->i', c)") == ["a @ b", "jnp.einsum"]
    assert set(offenders(lambda name, text: text)) == {name for name, path in FILES.items() if path.stat().st_size}


def test_arrows_are_seen():
    source = "try:\n  import arviz\nfinally:\n  def f():\n    from numpyro_repulsion.kernels import SGLD\n"
    tree = ast.parse(source + "from numpyro_repulsion import RBF")
    assert imports(tree) == ({"arviz"}, {"kernels", "RBF"})
    assert imports(ast.parse(f"def f():\n  import {PACKAGE}")) == (set(), {"__init__"})
    assert imports(RunOnImport().visit(tree)) == ({"arviz"}, {"RBF"})


def test_import_is_light():
    program = f"import sys, {PACKAGE}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert PACKAGE in loaded
    assert not {"arviz", "xarray", "matplotlib", "optax", "pandas", "funsor", "equinox"} & set(loaded)


MOVED = [place.rpartition(".") for place in numpyro_repulsion._MOVED.values() if place.startswith(PACKAGE)]
PUBLIC = {".".join((module, name)): getattr(importlib.import_module(module), name) for module, _, name in MOVED}
PUBLIC |= {
    f"{PACKAGE}.{name}": value
    for name, value in vars(numpyro_repulsion).items()
    if not (name.startswith("_") or inspect.ismodule(value))
}


def test_public_names_are_documented_with_an_example():
    # `vars`, for a class without a docstring of its own shows that of its base.
    said = {name: (vars(x).get("__doc__") if inspect.isclass(x) else x.__doc__) or "" for name, x in PUBLIC.items()}
    assert [name for name, text in said.items() if ">>>" not in text] == []
    assert 35 <= len(numpyro_repulsion.__all__) <= 40 and set(numpyro_repulsion.__all__) <= {
        x.split(".")[-1] for x in said
    }


def test_names_of_an_earlier_version_say_where_they_are():
    for name, place in numpyro_repulsion._MOVED.items():
        with pytest.raises(ImportError, match=re.escape(f"numpyro_repulsion.{name} is now {place}.")):
            getattr(numpyro_repulsion, name)


def test_folders_list_what_they_offer():
    for name in sorted(set(FILES) - {"__init__"}):
        module = importlib.import_module(f"{PACKAGE}.{name.removesuffix('.__init__')}")
        assert module.__doc__, name
        if name.endswith("__init__"):
            assert [public for public in module.__all__ if not hasattr(module, public)] == [], name
            inside = f"{module.__name__}."
            own = [public.split(".")[-1] for public, value in PUBLIC.items() if value.__module__.startswith(inside)]
            assert set(own) <= set(module.__all__), name
