"""Discovery of the own rank, and the choice and start of the process group."""
