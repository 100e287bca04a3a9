"""YAML of strangers: aliases that stand for gigabytes, depth, odd values; and what an error message repeats."""

import pytest

from sparse_rl.config import load_recipe, make_recipe, parse_value, read_yaml
from sparse_rl.config.read import DEEPEST, LARGEST, LONGEST
from sparse_rl.errors import LONGEST_MESSAGE, SparseRLError, nearest, require_int, shown
from sparse_rl.report.read import read_recipe


def bomb(levels: int, width: int = 9, leaf: str = "lol") -> str:
    """A recipe whose last alias stands for width ** levels values."""
    lines = [f"a0: &a0 [{', '.join([leaf] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"model: {{name: *a{levels - 1}}}", "task: {name: sums}", ""])


BOMBS = {
    "wide": (bomb(30), "expands to more than"),
    "merged": (bomb(4) + "run: {<<: [*a3, *a3, *a3, *a3]}", "expands to more than"),
    "long text": (f"t: &t {'x' * 90_000}\n{bomb(2, leaf='*t')}", "expands to more than"),
    "deep": ("model: {name: " + "[" * 5000 + "]" * 5000 + "}", "more than 20 levels deep"),
    "deep blocks": ("\n".join("  " * i + "a:" for i in range(100)), "more than 20 levels deep"),
    "itself": ("model: &m {name: *m}", "stands for nothing, or itself"),
    "large": ("model: {name: " + "x" * LONGEST + "}", "at most 200,000"),
    "number": ("run: {seed: " + "9" * 5000 + "}", "is not YAML"),
    "hexadecimal": ("run: {seed: 0x" + "f" * 5000 + "}", "is too large"),
    "surrogate": (r'model: {name: "\ud800"}', "is not YAML"),
    "set": ("model: {name: !!set {a, b}}", "could not determine a constructor"),
    "bytes": ("model: {name: !!binary aGk=}", "could not determine a constructor"),
    "object": ("model: {name: !!python/object/apply:os.getcwd []}", "could not determine a constructor"),
    "key": ("model: {[a]: 1}", "unhashable key"),
}


@pytest.mark.parametrize("content, message", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_one_sentence(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(SparseRLError, match=message) as caught:
        load_recipe(path)
    assert len(str(caught.value)) < LONGEST_MESSAGE + 100
    notes = []
    assert read_recipe(path, notes) == ({}, False) and "cannot be read" in notes[0] and len(notes[0]) < 1000
    with pytest.raises(SparseRLError):
        parse_value(content)


def test_what_fits_is_read_as_before():
    small = "a: &a [1, 2.5, yes, ~, 1e-4, text]\nb: {<<: {x: 1}, y: *a}\nc: 2024-01-31\n"
    assert read_yaml(small, "it") == {
        "a": [1, 2.5, True, None, "1e-4", "text"],
        "b": {"x": 1, "y": [1, 2.5, True, None, "1e-4", "text"]},
        "c": "2024-01-31",
    }
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert str(read_yaml(deep, "it")) == deep
    assert len(read_yaml(f"[{'1, ' * (LARGEST - 1)}]", "it")) == LARGEST - 1


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, ["y" * 10**5] * 10, 10**4999, {"k": list(range(10**5))}],
    ids=["text", "list", "number", "keys"],
)
def test_messages_repeat_little_of_a_value(value):
    assert len(shown(value)) < 400
    with pytest.raises(SparseRLError) as caught:
        make_recipe({"model": {"name": "tiny"}, "task": {"name": "sums"}, "optimizer": {"betas": value}})
    assert len(str(caught.value)) < 500
    with pytest.raises(SparseRLError) as caught:
        make_recipe({"model": value, "task": {"name": "sums"}} if not isinstance(value, dict) else {"model": {**value}})
    assert len(str(caught.value)) < 500
    with pytest.raises(SparseRLError) as caught:
        require_int(rows=[value])
    assert len(str(caught.value)) < 500


def test_a_long_message_keeps_its_remedy():
    error = SparseRLError(f"there is no {'x' * 10**6}; write y instead.")
    assert len(str(error)) < LONGEST_MESSAGE + 100 and str(error).endswith("write y instead.")
    assert nearest("budget" + "t" * 10**6, ["budget"]) == "known: budget."
