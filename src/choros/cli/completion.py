"""``choros completion SHELL``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from choros.cli.arguments import Known
from choros.console import write_line

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers
    from choros.cli.parser import Parser

# A word after a comma is completed for itself. bash counts the "=" of --site=NAME as a word, zsh does not.
_BASH = """\
_choros() {
    local word="${COMP_WORDS[COMP_CWORD]}" option="${COMP_WORDS[COMP_CWORD-1]}" command="" words="" before="" list="" i
    if [[ "$word" == "=" ]]; then
        word=""
    elif [[ "$option" == "=" ]]; then
        option="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    case "$word" in
        --*=*) option="${word%%%%=*}"; before="$option="; word="${word#*=}" ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac
    done
    case "$command" in
%s
    esac
    if [[ -n "$command" && "$word" != -* && "$words" != [a-z]* ]]; then
        words=""  # a file
    fi
    case "$command $option" in
%s
    esac
    if [[ -n "$list" && "$word" == *,* ]]; then
        before="$before${word%%,*},"
        word="${word##*,}"
    fi
    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$word"))
}
_choros_sites() {
    local file
    for file in $(command ls "${XDG_CONFIG_HOME:-$HOME/.config}/choros/sites" 2>/dev/null); do
        case "$file" in
            *[!A-Za-z0-9_.-]*) ;;
            *.toml) words="$words ${file%%.toml}" ;;
        esac
    done
}
complete -o bashdefault -o default -F _choros choros
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH = """\
function __choros_list
    set -l before (commandline -ct | string replace -r '^--[^=]*=' '' | string match -r '.*,'; or echo '')
    printf '%s\\n' $before$argv
end
function __choros_sites
    set -l folder ~/.config
    test -n "$XDG_CONFIG_HOME"; and set folder $XDG_CONFIG_HOME
    command ls $folder/choros/sites 2>/dev/null | string replace -rf '\\.toml$' ''
end
"""


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "completion",
        help="print the completion of commands and options for a shell",
        description="Prints a script for the shell, which completes the commands and options of this version, "
        "and the values of options, such as the names of sites.",
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
    names = {name: [name, *(alias for alias, real in ALIASES.items() if real == name)] for name in COMMANDS}
    if shell == "fish":
        return _FISH + "\n".join(_fish(parsers, names, COMMANDS))
    cases = [f'        "") words="{" ".join([*COMMANDS, *ALIASES, "--help", "--version"])}" ;;']
    values = []
    for name, parser in parsers.items():
        options = parser.completed_options()
        words = " ".join([*parser.values(), *(text for action in options for text in action.option_strings)])
        cases.append(f'        {"|".join(names[name])}) words="{words}" ;;')
        for action in options:
            if action.nargs != 0:
                patterns = "|".join(f'"{each} {text}"' for each in names[name] for text in action.option_strings)
                values.append(f"        {patterns}) {_bash_values(_known(name, action))} ;;")
    bash = _BASH % ("\n".join(cases), "\n".join(values))
    return _ZSH + bash if shell == "zsh" else bash


def _known(command: str, action: argparse.Action) -> Known:
    """Return the values of an option that a shell completes."""
    known: dict[str, Known] = getattr(import_module(f"choros.cli.{command}"), "KNOWN", {})
    choices = Known(tuple(map(str, action.choices or ())))
    return next((known[text] for text in action.option_strings if text in known), choices)


def _bash_values(known: Known) -> str:
    """Return commands that set the words to the values; without words bash completes files."""
    commands = [f'words="{" ".join(known.words)}"']
    commands += ["_choros_sites"] if known.has_sites else []
    return "; ".join([*commands, *(["list=yes"] if known.is_list else [])])


def _fish_values(known: Known) -> str:
    """Return the arguments of ``complete`` for the values of an option; without words fish completes files."""
    if not known.words:
        return " -r"
    words = " ".join(known.words)
    if known.is_list:
        return f" -x -a '(__choros_list {words})'"
    if known.has_sites:
        return f" -r -a '{words} (__choros_sites)'"
    return f" -x -a '{words}'"


def _fish(parsers: Mapping[str, Parser], names: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> list[str]:
    """Return the lines of a script for fish."""
    lines = [
        f"complete -c choros -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}" for name, text in texts.items()
    ]
    for name, parser in parsers.items():
        condition = f"complete -c choros -n '__fish_seen_subcommand_from {' '.join(names[name])}'"
        lines += [f"{condition} -a {value}" for value in parser.values()]
        for action in parser.completed_options():
            options = [
                f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" if len(text) == 2 else f"-o {text[1:]}"
                for text in action.option_strings
            ]
            values = _fish_values(_known(name, action)) if action.nargs != 0 else ""
            lines.append(f"{condition} {' '.join(options)}{values}")
    return lines
