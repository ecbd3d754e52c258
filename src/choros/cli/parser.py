"""The argument parser of all commands: its help pages, and the style of all errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from choros.errors import nearest, suggestion

EXIT_CODES = (
    "Exit codes: 0 success; 1 a failure, or an optional package is missing; 2 wrong usage, and nothing was started; "
    "75 the ranks saved their state before the time limit: start them again with resume=True; 130 interrupted "
    "(Ctrl-C). choros run ends with its ranks' code, choros check with 3 if it refuses the model."
)


# First words of messages that are names. An error of the API begins with a capital, one of a command does not.
_NAMES = (
    "Choros",
    "Cobalt",
    "Ensemble",
    "Flux",
    "Horovod",
    "Java",
    "Keras",
    "Kubernetes",
    "Parquet",
    "Python",
    "Spark",
)
_WORD = re.compile(r"[A-Z][a-z]*(?=[ ,:;]|$)")  # without a digit, a dot, quotes or a second capital
_MOST = 12  # words that a message lists


def print_error(prog: str, message: str, code: int) -> int:
    """Print an error in the one style of all commands; for wrong usage (code 2) a line names the help page.

    A message of several lines is a text with its own last line, and is printed as it is.

    Args:
        prog: the command as the user typed it, such as "choros site init".
        message: the error. Its first letter becomes lower case if it is not a name, and a final full stop is left out.
        code: the exit code.

    Returns:
        The code.
    """
    lines = [f"{prog}: error: {plain(message)}"]
    if code == 2 and "\n" not in message:
        lines.append(f"See '{prog} --help'")
    print(*lines, sep="\n", file=sys.stderr)
    return code


def plain(message: str) -> str:
    """Return a message as a command prints it.

    Example:
        >>> plain("There is no file a.py."), plain("Spark needs Java"), plain("nothing in .")
        ('there is no file a.py', 'Spark needs Java', 'nothing in .')
    """
    if (word := _WORD.match(message)) and word[0] not in _NAMES:
        message = message[0].lower() + message[1:]
    return message if "\n" in message else re.sub(r"(?<=[^\s.])\.$", "", message.rstrip())


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description and leaves indented blocks, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        paragraphs = (
            block if any(line.startswith("  ") for line in block.splitlines()) else filled(block, width, indent)
            for block in text.strip("\n").split("\n\n")
        )
        return "\n\n".join(paragraphs)


class _Store(argparse.Action):
    """Action that stores a value, and has the parser record the name of the option."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if option_string and isinstance(parser, Parser):
            parser.record(self, option_string, values)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser whose namespace has it as ``parser``, so that an error names the right command.

    It takes no option with a single dash for an abbreviation of another one. argparse always does, also for arguments
    of the user's program: ``-c`` of ``sh -c`` would be ambiguous in ``choros run``, which has ``-cb`` and ``-cc``.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)
        self._given = dict[str, tuple[str, Any]]()  # by destination: the name and the value of an option
        for name in (None, "store"):
            self.register("action", name, _Store)
        self.set_defaults(parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse the arguments, as argparse does; two names of one option with two values are refused."""
        self._given.clear()
        return super().parse_known_args(args, namespace)

    def record(self, action: argparse.Action, name: str, value: Any) -> None:
        """Record an option; refuse another value under another name of it, which would replace the first silently."""
        first, other = self._given.setdefault(action.dest, (name, value))
        if first != name and other != value:
            raise argparse.ArgumentError(action, f"given by two of its names, {first} and {name}: give one")
        self._given[action.dest] = (name, value)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        matches: list[Any] = super()._get_option_tuples(option_string)  # type: ignore[misc]
        return [match for match in matches if option_string.startswith(("--", match[1]))]

    def error(self, message: str) -> NoReturn:
        """Print an error of usage, and end with code 2."""
        raise SystemExit(print_error(self.prog, message, 2))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:  # its list of choices differs between versions of Python
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            error.message = f"invalid choice: {str(value)!r}{hint}"
            raise

    def visible_options(self) -> list[argparse.Action]:
        """Return the options that the help page lists."""
        return [action for action in self._actions if action.option_strings and action.help is not argparse.SUPPRESS]

    def numbers_of_values(self) -> dict[str, int]:
        """Return the number of values of each option that takes values, also of those that no help page lists."""
        numbers = {
            text: action.nargs if isinstance(action.nargs, int) else 1
            for action in self._actions
            for text in action.option_strings
        }
        return {text: number for text, number in numbers.items() if number}

    def runs_program(self) -> bool:
        """Return whether the first positional argument is a program, and the others are those of the program."""
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

    def actions(self) -> dict[str, Parser]:
        """Return the parsers of the actions below this command, by name."""
        choices = [action.choices for action in self._actions if not action.option_strings]
        return {name: parser for each in choices if isinstance(each, dict) for name, parser in each.items()}

    def values(self) -> list[str]:
        """Return the values that the first positional argument may have; an empty list if it may have any."""
        positional = next((action for action in self._actions if not action.option_strings), None)
        return [] if positional is None else [str(value) for value in positional.choices or ()]

    def refuse(self, arguments: Sequence[str]) -> None:
        """Print an error for arguments that the parser does not know; end with code 2."""
        options = [action.option_strings for action in self.visible_options()]
        option = next((argument.partition("=")[0] for argument in arguments if argument.startswith("-")), "")
        near = nearest(option, [name for names in options for name in names])
        hint = f" (did you mean {near}?)" if near else _listed([max(names, key=len) for names in options])
        self.error(f"unrecognized arguments: {' '.join(arguments)}{hint if option else ''}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar known word; if none is similar, with all words.

    Example:
        >>> did_you_mean("rnu", ["run", "where"]), did_you_mean("xyz", ["run", "where"])
        (' (did you mean run?)', ' (choose from run, where)')
    """
    return f" ({suggestion(word, known, 'choose from')})"


def _listed(options: Sequence[str]) -> str:
    """Return the options as a hint; "" if they are so many that the help page is easier to read."""
    return f" (choose from {', '.join(options)})" if len(options) <= _MOST else ""
