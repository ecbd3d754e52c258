"""The types of options that the examples share: each refuses a value with its range; not an example."""

import argparse
import math
import pathlib


def count(text):
    """Return a whole number of 1 or more."""
    return whole(text, 1)


def devices(text):
    """Return a number of devices, or -1 for all of them."""
    return -1 if text == "-1" else whole(text, 1, ", or -1 for all")


def pixels(text):
    """Return the side of a picture that the networks of keras.applications accept."""
    return whole(text, 32)


def whole(text, least=0, others=""):
    """Return a whole number of 0 or more, or of another least value."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more{others}, got {text}")
    return value


def positive(text):
    """Return a number greater than 0."""
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text}")
    return value


def number(text):
    """Return a number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text}")
    return value


def file(text):
    """Return the path of a file that exists."""
    if not pathlib.Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return text


def folder(text):
    """Return the path of a folder that exists."""
    if not pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return pathlib.Path(text)


def application(text):
    """Return a name in keras.applications."""
    import keras

    if not isinstance(getattr(keras.applications, text, None), type(application)):
        raise argparse.ArgumentTypeError(f"there is no keras.applications.{text}; ResNet50 is one")
    return text


def algorithm(text):
    """Return the name of an algorithm of Choros in small letters."""
    import choros

    known = [name.lower() for name in choros.algorithms()]
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {text}")
    return text.lower()
