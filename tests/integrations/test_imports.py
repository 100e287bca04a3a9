"""The package needs none of the other trainers."""

import os
import subprocess
import sys

from tests.helpers.host_cases import ROOT


def test_no_host_is_needed_to_import_the_package():
    code = "import sys, sparse_rl.integrations, sparse_rl.integrations.slime, sparse_rl.integrations.prime_rl\n"
    code += "assert not {'verl', 'slime', 'prime_rl', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
