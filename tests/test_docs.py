"""The documents keep up with the code: messages in troubleshooting, tests in compatibility."""

import ast
import re

import pytest
from script_runner import ROOT

pytestmark = pytest.mark.any_torch


def messages() -> dict[str, list[str]]:
    """For each function of trainstream/errors.py, the literal parts of its message."""
    tree = ast.parse((ROOT / "trainstream" / "errors.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {function.name: literal_parts(function) for function in functions}


def literal_parts(function: ast.FunctionDef) -> list[str]:
    returned = [node for node in ast.walk(function) if isinstance(node, ast.Return)][-1].value
    message = returned.args[0] if isinstance(returned, ast.Call) else returned
    constants = [node for node in ast.walk(message) if isinstance(node, ast.Constant)]
    return [each.value for each in constants if isinstance(each.value, str)]


def core_messages() -> dict[str, list[str]]:
    text = (ROOT / "csrc" / "base" / "error.cpp").read_text()
    return {found: [found] for found in re.findall(r'"(trainstream: \w[^"]{5,})"', text)}


@pytest.mark.parametrize("name, parts", [*messages().items(), *core_messages().items()])
def test_every_message_is_in_troubleshooting(name, parts):
    text = (ROOT / "docs" / "troubleshooting.md").read_text().replace("`", "")
    # The first words that are a message's own: what a reader looks for.
    longest = max((re.split(r"[;(:]|\. ", part)[0].strip() for part in parts), key=len)
    assert longest.replace("`", "") in text, f"{name}: {longest!r}"


def test_every_test_that_compatibility_names_is_there():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.(?:py|cpp))::(\w+)`", text)
    assert len(named) > 20
    for path, test in named:
        assert re.search(rf"\b{test}\b", (ROOT / path).read_text()), f"{path}::{test}"
