"""The place of an error is in the user's code, wherever it was raised."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from worldline.usercode import raised

CODE = """
import json

def helper(call):
    return call()

def reads():
    return json.loads("{")

def fails():
    return helper(lambda: 1 / 0)
"""


@pytest.fixture
def code(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "code.py").write_text(CODE)
    return runpy.run_path(str(tmp_path / "inner" / "code.py"))


def told(call: object, *search: Path) -> str:
    try:
        call()  # type: ignore[operator]
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # not this frame
        return raised(error, search)
    raise AssertionError("it did not raise")


def test_the_innermost_frame_of_the_users(code: dict[str, object], tmp_path: Path) -> None:
    """Told from the folders that are searched, or in full; frames of a library are passed over."""
    assert told(code["fails"], tmp_path) == (
        "ZeroDivisionError: division by zero (inner/code.py:11, in <lambda>)"
    )
    place = tmp_path / "inner" / "code.py"
    assert told(code["fails"]) == f"ZeroDivisionError: division by zero ({place}:11, in <lambda>)"
    assert told(code["reads"], Path("/nowhere"), tmp_path / "inner").endswith(" (code.py:8, in reads)")


def test_where_no_frame_is_the_users() -> None:
    assert raised(AssertionError()) == "AssertionError"


def test_a_file_that_cannot_be_parsed_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = (")
    said = told(lambda: runpy.run_path(str(tmp_path / "code.py")))
    assert said.startswith("SyntaxError: '(' was never closed (code.py, line 1)")
