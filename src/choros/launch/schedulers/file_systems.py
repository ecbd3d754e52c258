"""File systems that a job uses: the names of ``--filesystems``, and PBS' directive for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from choros.errors import InvalidInputError
from choros.launch.schedulers.option_names import named

FILE_SYSTEMS = "-l filesystems="
_NAMES = re.compile(r"[A-Za-z0-9_-]+([:,][A-Za-z0-9_-]+)*")
_DIRECTIVE_ALONE = re.compile(r"\s*-l\s*filesystems\s*=\s*[^,\s]*\s*")


def parse_file_systems(text: str) -> str:
    """Return the names of file systems with colons between them.

    Args:
        text: the names, with colons or commas between them.

    Raises:
        InvalidInputError: there is no name, or a name has another character.

    Example:
        >>> parse_file_systems("home,eagle")
        'home:eagle'
    """
    if not _NAMES.fullmatch(text):
        raise InvalidInputError(
            f"{named('filesystems')} must be names of letters, digits, _ and -, with colons between them, as in "
            f"{named('filesystems', 'home:eagle')}; got {text!r}"
        )
    return text.replace(",", ":")


def has_option(directive: str, begin: str) -> bool:
    """Return whether an option of a directive begins so, or a resource in its list ``-l a=1,b=2`` does.

    Args:
        directive: the text after ``#PBS``, ``#SBATCH`` ...
        begin: the beginning of an option, such as ``"-l filesystems="``. Spaces do not count.

    Example:
        >>> [has_option(line, "-l b=") for line in ("-lb=2", "-l a=1,b=2", "-m n -l b=2", "-l ab=2")]
        [True, True, True, False]
    """
    begin = "".join(begin.split())
    for option in re.split(r"\s+(?=-)", directive):
        text = "".join(option.split())
        if text.startswith(begin) or (text[:2] == begin[:2] == "-l" and f",{begin[2:]}" in text):
            return True
    return False


def without_file_systems(directives: Iterable[str]) -> list[str]:
    """Return the directives without those that name file systems, and nothing else.

    Example:
        >>> without_file_systems(["-l filesystems=home:eagle", "-m abe"])
        ['-m abe']
    """
    return [line for line in directives if not _DIRECTIVE_ALONE.fullmatch(line)]
