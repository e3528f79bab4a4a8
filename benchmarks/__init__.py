import flash_ext  # noqa: F401  before torch, which it imports without a warning about NumPy
