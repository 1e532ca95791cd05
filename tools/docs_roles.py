"""A griffe extension (mkdocs.yml): roles in docstrings, as in :func:`braze.convert`, become links.

Links to what the reference has, that is; other names become code. Double backticks become single
ones, before griffe looks for colons: "name: what it is" begins an item in its sections.
"""

import re

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")


class Roles(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is None:
            return

        def link(match):
            name = match.group(1)
            whole = name if name.startswith(("braze.", "torch.")) else f"{obj.module.path}.{name}"
            return f'<autoref identifier="{whole}" optional><code>{name}</code></autoref>'

        text = re.sub(r"``([^`\n]+)``", r"`\1`", obj.docstring.value)
        obj.docstring.value = ROLE.sub(link, text)
