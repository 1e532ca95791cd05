"""Hooks of MkDocs (mkdocs.yml) that make a site of the pages as they are, written for a checkout.

A page of the site has to be within docs/, and so have its links. Pages link to the rest of the
tree too: such a target becomes a page of the site under source/, a Markdown file as it is, code as
a listing, a folder as a list of what is in it, a drawing as a file; and the link leads there. A
target that does not exist is left to MkDocs, which then fails.

GitHub begins a list without an empty line before it, Python's Markdown does not: it gets one.
"""

import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^ *```")
ITEM = re.compile(r" *([-*]|\d+\.) ")
IMAGES = (".svg", ".png")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python"}


def origin(uri):
    """Where in the tree a page of the site comes from."""
    path = normpath(uri.removeprefix("source/")) if uri.startswith("source/") else f"docs/{uri}"
    is_code = uri.startswith("source/") and not (ROOT / path).exists()
    return path.removesuffix(".md") if is_code else path


def place(path):
    """Where on the site a path of the tree is."""
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/README.md"
    return f"source/{path}" if path.endswith((".md", *IMAGES)) else f"source/{path}.md"


def outside_code(text):
    """(line, whether it is in a fenced block) for each line."""
    fenced = False
    for line in text.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
            yield line, True
        else:
            yield line, fenced


def targets(text, path):
    """The paths of the tree that a page at `path` links to."""
    prose = "\n".join(line for line, is_code in outside_code(text) if not is_code)
    for name, _ in LINK.findall(prose):
        target = normpath(join(dirname(path), name))
        if "://" not in name and (ROOT / target).exists():
            yield target


def listing(path):
    """The page of a file or folder that is no Markdown."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(p.name for p in full.iterdir() if p.is_file() and p.suffix in LANGUAGES)
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in names) + "\n"
    text = full.read_text(encoding="utf-8")
    ticks = "`" * (1 + max(2, *map(len, ["", *re.findall("`+", text)])))
    return f"# {path}\n\n{ticks}{LANGUAGES.get(full.suffix, 'text')}\n{text}\n{ticks}\n"


def text_of(path):
    """What the page of a path of the tree says, links as in the tree."""
    full = ROOT / path
    if full.is_dir() and (full / "README.md").exists():
        full /= "README.md"
    return full.read_text(encoding="utf-8") if full.suffix == ".md" else listing(path)


def on_files(files, config):
    """Adds what the pages link to outside of docs/, and what those pages link to in turn."""
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        uri = place(path)
        if path.endswith(IMAGES):
            if uri.startswith("source/"):
                files.append(File.generated(config, uri, abs_src_path=os.fspath(ROOT / path)))
            continue
        if uri.startswith("source/"):
            there = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=text_of(path), inclusion=there))
        is_page = path.endswith(".md") or (ROOT / path).is_dir()
        pending += targets(text_of(path), uri_base(path)) if is_page else []
    return files


def uri_base(path):
    """The file that the links of a path's page are relative to."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def on_page_markdown(markdown, page, config, files):
    """Turns links that leave docs/ to the site's copies, and separates lists from paragraphs."""
    uri = page.file.src_uri
    path = origin(uri)

    def link(match):
        name, anchor = match.groups()
        target = normpath(join(dirname(path), name))
        if "://" in name or not (ROOT / target).exists():
            return match.group()
        return relpath(place(target), dirname(uri) or ".") + anchor

    lines, before = [], ""
    for line, is_code in outside_code(markdown):
        if not is_code:
            line = LINK.sub(link, line)
            in_paragraph = before.strip() and not before.startswith((" ", "#", "|", "<"))
            if ITEM.match(line) and in_paragraph and not ITEM.match(before):
                lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines)
