"""What the documents name exists: files, folders, anchors, rungs of the ladders."""

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
LADDERS = sorted((ROOT / "csrc").rglob("README.md"))
TOP = ("benchmarks", "csrc", "docs", "examples", "python", "tests", "tools")
SOURCE = (".c", ".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".svg", ".cu*")
# Headers of other projects; the files of the op that add_an_op.md makes up.
ELSEWHERE = re.compile(r"cudnn\.h|cublasLt\.h|(.*/)?(test_)?square(\.\w+|/|$).*")
GENERATED = re.compile(r"<!-- bench:[\w:]+ -->\n.*?<!-- /bench -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNG = re.compile(r"\d\d_[a-z]\w*")


def known_paths():
    """Every file and folder of the project, relative to its root."""
    paths = [*FRONT, ROOT / "setup.py"]
    paths += (p for top in TOP for p in (ROOT / top, *(ROOT / top).rglob("*")))
    return {str(p.relative_to(ROOT)) for p in paths if "__pycache__" not in p.parts}


PATHS = known_paths()
SOURCES = "\n".join(p.read_text() for p in (ROOT / "csrc").rglob("*.*") if p.is_file())


def prose(text):
    return FENCED.sub("", GENERATED.sub("", text))


def exists(named):
    """Whether the project has such a path: from its root, or the end of one; <op> and * stand for
    anything."""
    pattern = re.sub(r"<\w+>", "*", named.strip("./"))
    if pattern.split("/")[0] in TOP:
        return any(fnmatchcase(path, pattern) for path in PATHS)
    return any(fnmatchcase("/" + path, "*/" + pattern) for path in PATHS)


def is_path(word):
    if not re.fullmatch(r"[\w.<>*/-]+", word) or ELSEWHERE.fullmatch(word):
        return False
    return word.startswith(tuple(top + "/" for top in TOP)) or word.endswith(SOURCE)


def missing_paths(text):
    """Paths and rungs that the text names as code, but that are not there."""
    words = {word for code in CODE.findall(prose(text)) for word in code.split()}
    missing = {word for word in words if is_path(word) and not exists(word)}
    rungs = {word for word in words if RUNG.fullmatch(word)}
    return sorted(missing | {r for r in rungs if r not in SOURCES and not exists(f"{r}.*")})


def anchors(path):
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def broken_links(page, text):
    broken = []
    for target in LINK.findall(FENCED.sub("", text)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES + LADDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert not missing_paths(page.read_text())


@pytest.mark.parametrize("page", PAGES + LADDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_of_prose_are_short(page):
    lines = prose(page.read_text()).splitlines()
    cannot_be_broken = ("|", "    ", "![", "#", "<")
    long = [line for line in lines if len(line) > 100 and not line.startswith(cannot_be_broken)]
    assert not long


def test_every_page_is_on_the_map():
    reached = LINK.findall((ROOT / "docs" / "README.md").read_text())
    reached = {(ROOT / "docs" / target.split("#")[0]).resolve() for target in reached}
    pages = set(PAGES) - {ROOT / "docs" / "README.md"}
    assert {page.resolve() for page in pages} <= reached


def test_drawings_are_whole_and_shown():
    text = "".join(page.read_text() for page in PAGES)
    drawings = sorted((ROOT / "docs" / "glossary").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
        assert f"glossary/{drawing.name})" in text, f"no page shows {drawing.name}"


def test_the_checks_can_fail(tmp_path):
    text = "`csrc/nowhere/`, `no_such_file.cuh`, `17_no_rung`, `csrc/ops/<op>.cpp`, `relu.cpp`"
    assert missing_paths(text) == ["17_no_rung", "csrc/nowhere/", "no_such_file.cuh"]
    assert missing_paths("`python setup.py build_ext`, `tests/test_none.py -x`") == [
        "tests/test_none.py"
    ]
    page = tmp_path / "page.md"
    page.write_text("# One Title: `a`\n[a](#one-title-a) [b](#other) [c](page.md#none) [d](e.md)")
    assert broken_links(page, page.read_text()) == ["#other", "page.md#none", "e.md"]


def test_drawings_are_what_the_script_draws(tmp_path):
    script = ROOT / "docs" / "glossary" / "draw.py"
    subprocess.run([sys.executable, "-B", script, tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in script.parent.glob("*.svg")}
