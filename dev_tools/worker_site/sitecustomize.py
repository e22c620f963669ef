"""Python imports this at its start where this folder is in PYTHONPATH: the worker processes of the host tests.

They import pytest before they are told where it is. As in ``run_pytest.py``, its folder is searched after everything
else, so that nothing of the ComfyUI's own is hidden.
"""

import os
import sys

sys.path.extend(folder for folder in os.environ.get("QUANTCORE_EXTRA_PATH", "").split(os.pathsep) if folder)
