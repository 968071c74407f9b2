"""Rules of the tree that no other tool holds."""

from __future__ import annotations

import platform
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_source_root_is_no_package() -> None:
    """An __init__.py in platform/ would shadow Python's own module of that name and break `import ray`."""
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert platform.python_version()


def test_constraints_pin_every_direct_dependency_without_a_build() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in wanted}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.lower().split("==") for line in lines)
    assert names <= pins.keys()
    assert not [line for line in lines if "+" in line or "@" in line or "/" in line]
