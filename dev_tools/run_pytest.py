"""Runs pytest in the interpreter that started this file: ``run_pytest.py FOLDERS [pytest arguments]``.

FOLDERS (joined as in PATH, may be empty) are searched after everything else, so that a ComfyUI's Python without pytest
can run tests with nothing installed into it. Neither the repository nor this file's folder is put on ``sys.path``:
ComfyUI has a top-level module ``nodes`` of its own.
"""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != here]
    sys.path.extend(folder for folder in sys.argv[1].split(os.pathsep) if folder)
    import pytest

    sys.exit(pytest.main(sys.argv[2:]))
