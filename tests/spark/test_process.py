"""A task's Python process: the caller's Keras, or the reason why it cannot have it."""

import os


def test_an_executor_without_the_drivers_backend_says_what_to_install(spark_is_there, user):
    code = """
from choros.errors import NoBackendError
from choros.spark.task_process import keras_there
try:
    keras_there({"backend": "torch", "settings": {}})
except NoBackendError as error:
    print(error)
"""
    output = user("-c", code).stdout
    assert f"The executor on {os.uname().nodename} has no torch" in output
    assert "pip install 'choros[spark,torch]'" in output
