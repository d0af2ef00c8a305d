import subprocess
import sys

import pytest

_IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["jax"] = None  # any import of it raises
module = importlib.import_module(sys.argv[1])
for part in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(part.name)
"""


@pytest.mark.parametrize("module", ["tpu_infer.engine", "tpu_infer.text", "tpu_infer.frontend"])
def test_the_host_wing_imports_no_jax(module: str):
    result = subprocess.run([sys.executable, "-c", _IMPORT_ALL, module], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
