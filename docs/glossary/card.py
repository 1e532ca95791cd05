"""What the drawings are made of: cards with a light ground of their own, which read on light and
dark pages. Sizes are pixels."""

from html import escape

BLUE, ORANGE, GREEN, RED, GREY = "#a9cdf2", "#f7c88a", "#b5dca8", "#f2a9a9", "#dde2e8"
PURPLE, WHITE, INK, SOFT = "#cdbcf0", "#ffffff", "#1f2933", "#5b6774"
STAGES = (BLUE, ORANGE, GREEN, PURPLE)
TIMES = chr(215)  # the multiplication sign
WIDTH = 420


class Card:
    """One drawing, `height` pixels high."""

    def __init__(self, height, title):
        self.height, self.title, self.parts = height, title, []

    def text(self, x, y, words, size=12, at="middle", fill=INK, weight="normal"):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" fill="{fill}" '
            f'font-weight="{weight}">{escape(words)}</text>'
        )

    def note(self, x, y, words, at="middle"):
        self.text(x, y, words, 11, at, SOFT)

    def box(self, x, y, w, h, fill=WHITE, words="", size=12, dash=False, line=INK):
        style = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
            f'stroke="{line}"{style}/>'
        )
        if words:
            self.text(x + w / 2, y + h / 2 + size * 0.36, words, size)

    def row(self, x, y, w, h, cells, gap=0):
        """Boxes side by side; cells: (fill, words)."""
        for i, (fill, words) in enumerate(cells):
            self.box(x + i * (w + gap), y, w, h, fill, words, 11)

    def grid(self, x, y, columns, rows, size, cell):
        """cell(column, row): fill, or (fill, words)."""
        for r in range(rows):
            for c in range(columns):
                made = cell(c, r)
                fill, words = made if isinstance(made, tuple) else (made, "")
                self.box(x + c * size, y + r * size, size, size, fill, words, 10, line=SOFT)

    def line(self, x1, y1, x2, y2, dash=False, colour=INK):
        style = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"{style}/>'
        )

    def arrow(self, x1, y1, x2, y2, colour=INK):
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
            'stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self):
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" font-family="Helvetica, Arial, sans-serif" '
            f'role="img">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
            "</defs>\n"
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" '
            'fill="#f7f9fb" stroke="#c3cad3"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


CARDS = {}


def card(height):
    """Registers a function that draws a card of its name; its docstring is the title."""

    def add(draw):
        made = Card(height, draw.__doc__)
        draw(made)
        CARDS[draw.__name__] = made
        return draw

    return add
