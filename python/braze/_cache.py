"""Where braze keeps data sets and tuned choices between runs."""

import os
from pathlib import Path


def user_folder():
    """``$XDG_CACHE_HOME/braze``, else ``~/.cache/braze`` (the XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which the specification has ignored
        base = os.path.expanduser("~/.cache")
    return Path(base) / "braze"
