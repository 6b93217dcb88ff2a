"""The outputs that notebooks store, so that a code host shows them: text and small pictures, nothing of the machine.

``docs/execute.py --store`` writes them. The metadata of a notebook then contain two digests, of its code and of its
outputs. ``tests/test_notebooks.py`` compares them, so a notebook whose code has changed since, or whose outputs were
removed or replaced by hand, fails. Sphinx does not use stored outputs: its pages show those of a fresh execution.
"""

import base64
import hashlib
import io
import json
import re

#: The longest text of an output, in lines.
LINES = 60
#: The longest HTML of an output, in characters. A longer one is dropped if the output has another form.
HTML = 30_000
#: The widest stored picture, and the width of a thumbnail, in pixels.
WIDTH, THUMBNAIL = 1000, 600
#: The largest notebook, in bytes.
SIZE = 300_000

KEY = "stored_outputs"
#: Cells with this tag show the picture for docs/tutorials.md; without one it is the first picture of the notebook.
TAG = "gallery"
PICTURE, PAGE, TEXT = "image/png", "text/html", "text/plain"

MACHINE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|private|Users|work)/\w|[A-Z]:\\\w|\bat 0x[0-9a-f]{6,}")
FRAME = re.compile(r'frames\[\d+\] = "data:image/png;base64,([^"]+)"')
NUMBER = re.compile(r"[-+±]?\d(?:[\d.,]*\d)?(?:e[-+]?\d+)?%?|\bnan\b")


def joined(value):
    """Text, which files contain as a list of lines."""
    return "".join(value) if isinstance(value, list) else value


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest_of(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digests(notebook):
    """Digests of the code of a notebook, and of its outputs."""
    cells = code_cells(notebook)
    outputs = [
        [
            {"text": joined(output.get("text", ""))} | {k: joined(v) for k, v in output.get("data", {}).items()}
            for output in cell["outputs"]
        ]
        for cell in cells
    ]
    return {"code": digest_of([joined(cell["source"]) for cell in cells]), "outputs": digest_of(outputs)}


def scaled(png, width, *, grow=False):
    """A picture at most, or exactly, ``width`` pixels wide, with at most 256 colors."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    paper = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(paper, picture).convert("RGB")
    if picture.width > width or grow:
        height = round(picture.height * width / picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def encoded(png):
    return base64.b64encode(png).decode() + "\n"


def shortened(text):
    """At most ``LINES`` lines, without spaces at their ends; of a line that was written over, what remained."""
    lines = [line.split("\r")[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... {len(lines) - LINES + 1} more lines"]
    return "\n".join(lines)


def data_to_store(data):
    """The forms of an output that are worth storing: plain text, short HTML and one picture."""
    data = {kind: joined(value) for kind, value in data.items() if kind in (PICTURE, PAGE, TEXT)}
    if len(page := data.get(PAGE, "")) > HTML:
        del data[PAGE]
        if frames := FRAME.findall(page):  # an animation: its last frame
            data[PICTURE] = re.sub(r"\\?\s", "", frames[-1])
    if PICTURE in data:
        data[PICTURE] = encoded(scaled(base64.b64decode(data[PICTURE]), WIDTH))
    if TEXT in data:
        data[TEXT] = shortened(data[TEXT])
    return data


def outputs_to_store(outputs, count):
    """Outputs of a cell without progress bars, warnings, and what differs from one execution to the next."""
    stored, printed = [], None
    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] != "stdout" or not joined(output["text"]).strip():
                continue
            if printed is None:
                printed = {"output_type": "stream", "name": "stdout", "text": ""}
                stored.append(printed)
            printed["text"] += joined(output["text"])
        elif not any(kind.startswith("application/vnd.jupyter.widget") for kind in output["data"]):
            kept = {"output_type": output["output_type"], "metadata": {}, "data": data_to_store(output["data"])}
            stored.append(kept | ({"execution_count": count} if output["output_type"] == "execute_result" else {}))
    if printed is not None:
        printed["text"] = shortened(printed["text"])
    return stored


def store(notebook, executed, version):
    """Puts the outputs of an executed notebook into a notebook with the same code."""
    for count, (cell, done) in enumerate(zip(code_cells(notebook), code_cells(executed), strict=True), 1):
        cell["execution_count"] = count
        cell["outputs"] = outputs_to_store(done["outputs"], count)
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        KEY: digests(notebook) | {"version": version},
    }


def texts(cell):
    """All that a cell printed and showed as text."""
    for output in cell["outputs"]:
        yield joined(output.get("text", ""))
        yield from (joined(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))


def problems(notebook):
    """Sentences on what is wrong with the stored outputs of a notebook."""
    stored, now = notebook["metadata"].get(KEY), digests(notebook)
    if stored is None:
        yield "No outputs are stored."
        return
    if stored["code"] != now["code"]:
        yield "The code has changed since the outputs were stored."
    if stored["outputs"] != now["outputs"]:
        yield "Outputs were removed or changed since they were stored."
    cells = code_cells(notebook)
    if not any(PICTURE in output.get("data", {}) for cell in cells for output in cell["outputs"]):
        yield "No output is a picture."
    for number, cell in enumerate(cells, 1):
        for text in texts(cell):
            if found := MACHINE.search(text):
                yield f"The output of code cell {number} contains {text[found.start() :][:40]!r}."
        if any(output.get("name") == "stderr" or output["output_type"] == "error" for output in cell["outputs"]):
            yield f"The output of code cell {number} contains a warning or an error."


def worded(cell):
    """The words of the outputs of a cell: its plain texts without numbers."""
    plain = [joined(output.get("text", "") or output.get("data", {}).get(TEXT, "")) for output in cell["outputs"]]
    return NUMBER.sub("#", " ".join(" ".join(plain).split()))


def reworded(notebook, executed):
    """Numbers of the code cells whose stored outputs have other words than a fresh execution."""
    pairs = zip(code_cells(notebook), code_cells(executed), strict=True)
    return [
        number
        for number, (cell, done) in enumerate(pairs, 1)
        if worded(cell) != worded({"outputs": outputs_to_store(done["outputs"], number)})
    ]


def thumbnail(executed):
    """The picture of a notebook for docs/tutorials.md."""
    cells = code_cells(executed)
    tagged = [cell for cell in cells if TAG in cell["metadata"].get("tags", ())]
    for cell in tagged or cells:
        for output in cell["outputs"]:
            data = data_to_store(output.get("data", {}))
            if PICTURE in data:
                return scaled(base64.b64decode(data[PICTURE]), THUMBNAIL, grow=True)
    raise ValueError("No cell shows a picture.")
