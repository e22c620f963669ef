"""The only part of the pack that imports ``comfy``."""
