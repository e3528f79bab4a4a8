"""How the three libraries are built: a PEP 517 backend, the toolchain it finds, and the ninja file it writes."""
