"""The argument parser of all commands: its help pages, and its messages about unknown commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

EXIT_CODES = "Exit codes: 0 success; 1 a failure; 2 wrong usage, and nothing was started; 130 interrupted (Ctrl-C)."


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description and leaves indented blocks, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        paragraphs = (
            block if any(line.startswith("  ") for line in block.splitlines()) else filled(block, width, indent)
            for block in text.strip("\n").split("\n\n")
        )
        return "\n\n".join(paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser whose namespace has it as ``parser``, so that an error can show the usage of the right command.

    It takes no option with a single dash for an abbreviation of another one. argparse always does, also for arguments
    of the user's program: ``-c`` of ``sh -c`` would be ambiguous in ``choros run``, which has ``-cb`` and ``-cc``.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)
        self.set_defaults(parser=self)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        matches: list[Any] = super()._get_option_tuples(option_string)  # type: ignore[misc]
        return [match for match in matches if option_string.startswith(("--", match[1]))]

    def visible_options(self) -> list[argparse.Action]:
        """Return the options that the help page lists."""
        return [action for action in self._actions if action.option_strings and action.help is not argparse.SUPPRESS]

    def values(self) -> list[str]:
        """Return the values that the first positional argument may have; an empty list if it may have any."""
        positional = next((action for action in self._actions if not action.option_strings), None)
        return [] if positional is None else [str(value) for value in positional.choices or ()]

    def refuse(self, arguments: Sequence[str]) -> None:
        """Print the usage and an error for arguments that the parser does not know; end with code 2."""
        names = [name for action in self.visible_options() for name in action.option_strings]
        option = next((argument.partition("=")[0] for argument in arguments if argument.startswith("-")), "")
        self.error(f"unrecognized arguments: {' '.join(arguments)}{did_you_mean(option, names)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar known word, or "".

    Example:
        >>> did_you_mean("rnu", ["run", "where"])
        ' (did you mean run?)'
    """
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
