"""Notebooks store outputs that belong to their code, and nothing of the machine on which they ran."""

import base64
import copy
import json
from pathlib import Path
import struct
import sys

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
sys.path.append(str(ROOT / "docs"))
outputs = pytest.importorskip("stored_outputs")  # a source distribution has no docs/


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_the_code(path):
    found = list(outputs.problems(json.loads(path.read_text())))
    assert not found, f"{' '.join(found)} Run `make store-notebooks`."
    assert path.stat().st_size <= outputs.SIZE


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_thumbnails_are_there(path):
    header = (ROOT / "docs" / "_static" / "gallery" / f"{path.stem.split('_', 1)[1]}.png").read_bytes()[:24]
    width, _ = struct.unpack(">II", header[16:])
    assert width == outputs.THUMBNAIL, "Run `make store-notebooks`."


def picture(width, color="red"):
    from io import BytesIO

    from PIL import Image

    Image.new("RGBA", (width, width // 2), color).save(file := BytesIO(), "PNG")
    return outputs.encoded(file.getvalue())


def size(png):
    return struct.unpack(">II", base64.b64decode(png)[16:24])


def printing(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def showing(**data):
    return {"output_type": "display_data", "metadata": {}, "data": {f"{k.replace('_', '/')}": data[k] for k in data}}


def notebook(*cells):
    """A notebook in which each cell has code and outputs."""
    made = [{"cell_type": "code", "metadata": {}, "source": [code], "outputs": shown} for code, shown in cells]
    return {"metadata": {}, "cells": [{"cell_type": "markdown", "metadata": {}, "source": ["# Title"]}, *made]}


def stored(*cells):
    ran = notebook(*cells)
    bare = notebook(*((code, []) for code, _ in cells))
    outputs.store(bare, ran, "1.0")
    return bare


PLOT = ("plot()", [showing(image_png=picture(1200), text_plain="<Figure size 1200x600>")])


def test_stored_outputs_are_clean_and_small():
    lines = "".join(f"line {k}  \n" for k in range(100))
    animation = f'<script>frames[0] = "data:image/png;base64,{picture(40)}"\n  frames[1] = "data:image/png;base64,'
    animation += picture(80)[:40] + "\\\n" + picture(80)[40:-1] + '"\n' + " " * outputs.HTML + "</script>"
    found = stored(
        ("1", [printing("sample: 1%\rsample: 100%\n", "stderr"), printing("a\n"), printing(["b \n", "c\n"])]),
        ("2", [printing(lines), showing(text_html="<table></table>", text_plain="table")]),
        ("3", [showing(text_html=animation)]),
        PLOT,
    )
    assert not list(outputs.problems(found))
    first, second, third, fourth = outputs.code_cells(found)
    assert first["outputs"] == [printing("a\nb\nc\n")]
    assert second["outputs"][0]["text"].splitlines()[-2:] == ["line 58", "... 42 more lines"]
    assert set(second["outputs"][1]["data"]) == {"text/html", "text/plain"}
    assert {kind: size(data) for kind, data in third["outputs"][0]["data"].items()} == {"image/png": (80, 40)}
    assert size(fourth["outputs"][0]["data"]["image/png"]) == (1000, 500)


def test_thumbnails_show_the_tagged_picture_or_the_first():
    ran = notebook(("first()", [showing(image_png=picture(1200, "blue"))]), PLOT)
    untagged = outputs.thumbnail(ran)
    assert size(base64.b64encode(untagged)) == (600, 300)
    outputs.code_cells(ran)[1]["metadata"]["tags"] = ["gallery"]
    assert outputs.thumbnail(ran) == outputs.thumbnail(notebook(PLOT)) != untagged
    with pytest.raises(ValueError, match="No cell shows a picture"):
        outputs.thumbnail(notebook(("1", [printing("text")])))


def change(found, how):
    found = copy.deepcopy(found)
    first = outputs.code_cells(found)[0]
    if how == "code":
        first["source"] = ["print(2)"]
    elif how == "removed":
        first["outputs"] = []
    elif how == "never":
        found["metadata"] = {}
    return found


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("code", "The code has changed"),
        ("removed", "Outputs were removed or changed"),
        ("never", "No outputs are stored"),
    ],
)
def test_stale_outputs_are_found(how, problem):
    found = stored(("print(1)", [printing("1\n")]), PLOT)
    assert not list(outputs.problems(found))
    assert next(outputs.problems(change(found, how))).startswith(problem)


@pytest.mark.parametrize("text", ["/home/me/run", "in /tmp/abc/x.npy", r"C:\Users", "<Line2D at 0x7f00aa11bb22>"])
def test_places_on_the_machine_are_found(text):
    (problem,) = outputs.problems(stored(("1", [printing(f"{text}\n")]), PLOT))
    assert problem.startswith("The output of code cell 1 contains ")
    assert not list(outputs.problems(stored(("1", [printing("and/or, 1/2, https://a.org/tmp/x\n")]), PLOT)))


def test_other_words_are_found_and_other_numbers_are_not():
    found = stored(("1", [printing("mean 1.5, sd nan\n")]), PLOT)
    assert outputs.reworded(found, notebook(("1", [printing("mean -2e-3,   sd 4\n")]), PLOT)) == []
    assert outputs.reworded(found, notebook(("1", [printing("mean 1.5, error nan\n")]), PLOT)) == [1]
