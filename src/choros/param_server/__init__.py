"""The parameter server of asynchronous training."""
