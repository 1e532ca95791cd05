"""Draws the glossary's pictures, one SVG per term: ``python docs/glossary/draw.py [FOLDER]``."""

import sys
from pathlib import Path

import hardware  # noqa: F401, which fills CARDS
import methods  # noqa: F401
from card import CARDS

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
for name, made in CARDS.items():
    (folder / f"{name}.svg").write_text(made.svg())
