"""The requirements of the Spark tests."""


def test_spark_is_there(spark_is_there):
    import pyspark

    assert int(pyspark.__version__.split(".")[0]) >= 3
