"""``choros completion SHELL``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from choros.console import write_line

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers
    from choros.cli.parser import Parser

_BASH = """\
_choros() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac
    done
    case "$command" in
%s
    esac
    if [[ -n "$command" && "$word" != -* && "$words" != [a-z]* ]]; then
        words=""  # a file
    fi
    case "$command ${COMP_WORDS[COMP_CWORD-1]}" in
%s
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _choros choros
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "completion",
        help="print the completion of commands and options for a shell",
        description="Prints a script for the shell, which completes the commands and options of this version.",
        epilog="examples:\n"
        "  choros completion bash >~/.local/share/bash-completion/completions/choros\n"
        "  choros completion fish >~/.config/fish/completions/choros.fish\n"
        "  choros completion zsh >>~/.zshrc\n\n"
        "Exit codes: 0 success; 2 wrong usage.",
    )
    parser.add_argument("shell", choices=("bash", "fish", "zsh"), help="shell that reads the script")


def main(args: argparse.Namespace) -> int:
    """Print the script.

    Args:
        args: the parsed arguments.

    Returns:
        0.
    """
    write_line(script(args.shell).rstrip("\n"))
    return 0


def script(shell: str) -> str:
    """Return the script for ``"bash"``, ``"fish"`` or ``"zsh"``.

    Example:
        >>> script("bash").splitlines()[-1]
        'complete -o bashdefault -o default -F _choros choros'
    """
    from choros.cli import ALIASES, COMMANDS, command_parser

    parsers = {name: command_parser(name) for name in COMMANDS}
    if shell == "fish":
        return "\n".join(_fish(parsers, COMMANDS))
    names = {name: [name] for name in COMMANDS}
    for alias, name in ALIASES.items():
        names[name].append(alias)
    values = ["        ' ') ;;"]  # a case needs a pattern
    cases = [f'        "") words="{" ".join([*COMMANDS, *ALIASES, "--help", "--version"])}" ;;']
    for name, parser in parsers.items():
        options = [text for action in parser.visible_options() for text in action.option_strings]
        words = " ".join([*parser.values(), *options])
        for action in parser.visible_options():
            patterns = "|".join(f'"{each} {text}"' for each in names[name] for text in action.option_strings)
            if action.choices:
                values.append(f'        {patterns}) words="{" ".join(map(str, action.choices))}" ;;')
        cases.append(f'        {"|".join(names[name])}) words="{words}" ;;')
    bash = _BASH % ("\n".join(cases), "\n".join(values))
    return _ZSH + bash if shell == "zsh" else bash


def _fish(parsers: dict[str, Parser], commands: dict[str, str]) -> list[str]:
    """Return the lines of a script for fish."""
    lines = [
        f"complete -c choros -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}"
        for name, text in commands.items()
    ]
    for name, parser in parsers.items():
        condition = f"complete -c choros -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{condition} -a {value}" for value in parser.values()]
        for action in parser.visible_options():
            names = [
                f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" if len(text) == 2 else f"-o {text[1:]}"
                for text in action.option_strings
            ]
            needs = " -r" if action.nargs != 0 else ""
            values = f" -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else ""
            lines.append(f"{condition} {' '.join(names)}{needs}{values}")
    return lines
