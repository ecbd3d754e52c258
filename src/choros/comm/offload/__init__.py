"""All-reduces that a library of the framework makes: NCCL, gloo, JAX."""
