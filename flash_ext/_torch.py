"""Imports torch, which warns where NumPy is missing. Nothing here needs NumPy."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch  # noqa: F401
