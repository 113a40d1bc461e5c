"""tools/screens.py: every screen has its place in the README, and a new one takes the old one's."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import screens  # noqa: E402 (it needs the path above)


def test_the_readme_shows_every_screen():
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in screens.SCREENS:
        [shown] = re.findall(f"<!-- screen {name} -->\n```text\n(.*?)```\n<!-- end of screen -->", readme, re.DOTALL)
        assert len(shown) > 300
        changed = screens.with_screen(readme, name, ["new", "lines"])
        assert changed == readme.replace(shown, "new\nlines\n")
    with pytest.raises(ValueError, match="no place for the screen 'other'"):
        screens.with_screen(readme, "other", [])
