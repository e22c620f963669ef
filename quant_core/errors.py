"""The exceptions that quant_core raises on purpose.

Both derive from a builtin, so that code which catches ``ValueError`` or ``RuntimeError`` keeps working.
"""

from __future__ import annotations


class QuantizationError(RuntimeError):
    """A layer could not be quantized, dequantized or run. The message names the layer and what to do."""


class CheckpointError(ValueError):
    """A file cannot be read, or does not fit the model or the method it is loaded with.

    The message names the file and the layer, what was expected, what was found, and the way out.
    """
