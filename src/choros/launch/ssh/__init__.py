"""Launch of ranks on several hosts over SSH."""
