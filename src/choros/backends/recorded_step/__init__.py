"""Steps of a model that run as a record of their operations, without the Python code of Keras (PyTorch)."""
