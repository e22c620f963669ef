"""``python -m quant_core``: see :mod:`quant_core.cli`."""

import sys

from .cli import main

sys.exit(main())
