"""What ``python -m flash_ext`` is made of: a text, a model, its training, and measurements."""
