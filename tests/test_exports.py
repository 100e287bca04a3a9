"""The public names of `sparse_rl`: imported on first use, and known to editors and type checkers."""

import ast
import subprocess
import sys
from pathlib import Path

import sparse_rl


def test_importing_the_package_does_not_import_torch():
    code = "import sys, sparse_rl; sparse_rl.SparseRLError; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_the_names_that_are_imported_on_first_use():
    (block,) = (node for node in ast.parse(Path(sparse_rl.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {name.name: node.module for node in block.body for name in node.names}
    assert seen == sparse_rl._MODULES
    assert sparse_rl.__all__ == list(sparse_rl._MODULES)
    assert dir(sparse_rl) == sorted(sparse_rl.__all__)


def test_the_package_says_that_it_is_typed():
    assert (Path(sparse_rl.__file__).parent / "py.typed").is_file()
