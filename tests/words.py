"""The words of this package's own that its pages avoid, and what they write instead; `test_pages.py` looks for them."""

from __future__ import annotations

from collections.abc import Iterator
import re

#: name: (a pattern, in prose and regardless of case; what to write instead).
WORDS = {
    # But for flights.
    "arrival": (
        r"(?<!late )(?<!flight )\barriv(al|e|ed|ing)s?\b(?! (late|delay|more than \d))",
        '"initial phase", "reach"',
    ),
    "balanced noise": (r"\bbalanced noise\b", '"zero-sum noise"'),
    "basin": (r"\bbasins?\b", '"mode"'),
    "cloud": (r"\bclouds?\b", '"particles", "ensemble"'),
    "given step": (
        r"\b(given|measured) steps?\b|\bsteps?( size)? (is|are) (given|measured)\b|\bmeasures? (the|its|a) steps?\b",
        '"user-supplied step size", "adapted step size"',
    ),
    "has not": (r"\b(has|have) not(?= *([.,;:)|]|$)| (a|an|the|any|and|or|in|at|on)\b)", '"does not have", "lacks"'),
    "is no": (
        r"(?<!there )\b(is|are|was|were) no (?!(more|less|such|worse|better|faster|larger|longer|slower)\b)[a-z]",
        '"is not a"',
    ),
    "kill": (r"\bkill(s|ed|ing)?\b", '"interruption"'),
    "knows": (
        r"\b(averages?|data|draws?|figures?|pages?|particles|runs?|sections?|tables?|warmup)"
        r" (knows?|says?|sees|tells?)\b(?! so\b)",
        'a verb for what it does: "lists", "reports", "depends on", …',
    ),
    "law": (r"\blaws?\b", '"distribution"'),
    "nothing set": (r"\bnothing (has to be |is |to be )?set\b|\bnothing to tune\b", '"default settings"'),
    "of its own": (
        r"\bof (its|their|your|our|my) own(?= *([.,;:)|]|$)| (and|as|at|by|for|from|in|is|are|that|to|which|with)\b)",
        '"its own …"',
    ),
    "percent": (r"\d %", '"5%", without a space'),
    "piece": (r"\bpieces?\b", '"chunk"'),
    "scales": (
        r"\b(learn|adapt|fr[eo]+ze)\w* (the |its )?scales\b|\b(dense|diagonal|low-rank) scales\b"
        r"|\bscales (that warmup|(is|are) (learned|frozen|adapted))\b",
        '"preconditioner"',
    ),
    "strayed": (r"\bstray(ed|s)?\b", '"diverged"'),
    "verdict": (r"\bverdicts?\b", '"diagnosis", or what `diagnose` reports'),
    "worth": (r"\bworth\b[^.|]{0,40}\bdraws?\b|\bdraws\b[^.|]{0,40}\bworth\b", '"an ESS of n"'),
}
#: Openings of sentences that put something else before the subject; questions may have them.
OPENINGS = re.compile(r"(Of|Where|Wherever|Whatever|What|Not \w+ed (is|are))\b")

#: (page, name): why it may stand there.
EXCEPTIONS = {
    ("notebooks/06_flights.ipynb", "arrival"): "that of a flight",
}
#: A page of terms lists those that are not used, too.
LEFT_OUT = ("docs/glossary.md",)

#: Blocks in fences that hold prose.
OF_PROSE = "admonition|card|details|dropdown|grid|grid-item|grid-item-card|important|note|tab-item|tab-set|tip|warning"
NO_PROSE = (
    (rf"^(`{{3,}}|:{{3,}}|~{{3,}})\{{({OF_PROSE})\}}[^\n]*\n(.*?)^\1", r"\3", re.M | re.S),
    (r"^ *(`{3,}|~{3,}).*?^ *\1", "", re.M | re.S),
    (r"<!--.*?-->", "", re.S),
    (r"\$\$.*?\$\$", "…", re.S),
    (r"^\([\w-]+\)=$", "", re.M),
    (r"(`+).+?\1", "`…`", re.S),
    (r"\$[^$\n]+(\n[^$\n]+)?\$", "…", 0),
    (r"\]\([^)\s]*\)", "]", 0),
    (r"https?://\S+", "", 0),
    (r"</?[a-zA-Z][^>]*>", "", 0),
)


def prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the paragraphs, items and rows of a page without code, formulas and addresses; and whether each is text,
    neither a heading nor a row of a table."""
    for pattern, kept, flags in NO_PROSE:
        markdown = re.sub(pattern, kept, markdown, flags=flags)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*:|#>]|\d+\.) ?)", markdown):
        if block and (line := " ".join(block.split())):
            yield line, not line.startswith(("#", "|"))


def private_words(page: str, markdown: str) -> list[str]:
    """Return where a page has private words, each with what to write instead."""
    if page in LEFT_OUT:
        return []
    found = []
    for text, is_text in prose(markdown):
        for name, (pattern, instead) in WORDS.items():
            if (page, name) not in EXCEPTIONS:
                for match in re.finditer(pattern, text, re.I):
                    around = text[max(0, match.start() - 40) : match.end() + 40]
                    found.append(f"{name}: …{around}… Write {instead}.")
        plain = re.sub(r"^([-*:>]|\d+\.) *|[*_“\"]", "", text)
        for sentence in re.findall(r"[^.!?:]+[.!?:]?", plain) if is_text else ():
            sentence = sentence.strip()
            if OPENINGS.match(sentence) and not sentence.endswith("?") and (page, "opening") not in EXCEPTIONS:
                found.append(f"opening: {sentence[:80]}… Begin with the subject.")
    return found
