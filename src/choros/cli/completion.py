"""``choros completion SHELL``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from choros.cli.arguments import Known
from choros.console import write_line

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers
    from choros.cli.parser import Parser

# ``page`` is the command with its action, or "-" after the user's script, whose arguments are not those of Choros.
# A word after a comma is completed for itself. bash counts the "=" of --site=NAME as a word, zsh does not.
_BASH = """\
_choros() {
    local word="${COMP_WORDS[COMP_CWORD]}" option="${COMP_WORDS[COMP_CWORD-1]}" page="" words="" before="" list="" i
    local given values=0
    if [[ "$word" == "=" ]]; then
        word=""
    elif [[ "$option" == "=" ]]; then
        option="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    case "$word" in
        --*=*) option="${word%%%%=*}"; before="$option="; word="${word#*=}" ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        given="${COMP_WORDS[i]}"
        [[ "$given" == "=" ]] && continue
        if ((values > 0)); then
            values=$((values - 1))
            continue
        fi
        case "$page $given" in
%(steps)s
        esac
    done
    case "$page" in
%(words)s
    esac
    if [[ -n "$page" && "$word" != -* && "$words" != [a-z]* ]]; then
        words=""  # a file
    fi
    case "$page $option" in
%(values)s
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
    printf '%%s\\n' $before$argv
end
function __choros_sites
    set -l folder ~/.config
    test -n "$XDG_CONFIG_HOME"; and set folder $XDG_CONFIG_HOME
    command ls $folder/choros/sites 2>/dev/null | string replace -rf '\\.toml$' ''
end
function __choros_at
    set -l page ''
    set -l values 0
    for given in (commandline -opc)[2..-1]
        if test $values -gt 0
            set values (math $values - 1)
            continue
        end
        switch "$page $given"
%(steps)s
        end
    end
    test "$page" = "$argv[1]"
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

    pages = {name: command_parser(name) for name in COMMANDS}
    pages |= {f"{name} {action}": page for name in COMMANDS for action, page in pages[name].actions().items()}
    steps = _steps(pages)
    if shell == "fish":
        lines = [f"            case {' '.join(map(repr, some))}\n                {_set(what)}" for some, what in steps]
        return _FISH % {"steps": "\n".join(lines)} + "\n".join(_fish(pages, COMMANDS))
    lines = [f"            {'|'.join(map(_bash_pattern, some))}) {what} ;;" for some, what in steps]
    cases = [f'        "") words="{" ".join([*COMMANDS, *ALIASES, "--help", "--version"])}" ;;']
    values = []
    for path, page in pages.items():
        options = page.visible_options()
        words = " ".join([*page.values(), *(text for action in options for text in action.option_strings)])
        cases.append(f'        "{path}") words="{words}" ;;')
        for action in options:
            if action.nargs != 0:
                patterns = "|".join(f'"{path} {text}"' for text in action.option_strings)
                values.append(f"        {patterns}) {_bash_values(_known(path, action))} ;;")
    bash = _BASH % {"steps": "\n".join(lines), "words": "\n".join(cases), "values": "\n".join(values)}
    return _ZSH + bash if shell == "zsh" else bash


def _steps(pages: Mapping[str, Parser]) -> list[tuple[list[str], str]]:
    """Return the steps from a page and the next word to the next page: patterns of both, and an assignment of a shell.

    ``values`` is the number of words that follow an option as its values.
    """
    from choros.cli import ALIASES

    steps = [(["- *"], 'page="-"')]
    for path, page in pages.items():
        numbers = page.numbers_of_values()
        steps += [
            ([f"{path} {text}" for text in numbers if numbers[text] == number], f'values="{number}"')
            for number in sorted(set(numbers.values()))
        ]
    programs = [path for path, page in pages.items() if page.runs_program()]
    steps.append(([f"{path} --" for path in programs], 'page="-"'))
    steps.append((["* -*"], 'values="0"'))
    steps += [([f" {alias}"], f'page="{name}"') for alias, name in ALIASES.items()]
    steps.append(([" *"], 'page="$given"'))
    steps += [([path], f'page="{path}"') for path in pages if " " in path]
    steps.append(([f"{path} *" for path in programs], 'page="-"'))
    return steps


def _bash_pattern(pattern: str) -> str:
    """Return a pattern of ``case`` in bash and zsh, in which only ``*`` is not quoted."""
    return "*".join(f'"{part}"' if part else "" for part in pattern.split("*"))


def _set(assignment: str) -> str:
    """Return an assignment of bash as a command of fish."""
    return f"set {assignment.replace('=', ' ', 1)}"


def _known(path: str, action: argparse.Action) -> Known:
    """Return the values of an option that a shell completes."""
    command = path.partition(" ")[0]
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


def _fish(pages: Mapping[str, Parser], texts: Mapping[str, str]) -> list[str]:
    """Return the lines of a script for fish."""
    lines = [
        f"complete -c choros -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}" for name, text in texts.items()
    ]
    for path, page in pages.items():
        condition = f'complete -c choros -n "__choros_at {shlex.quote(path)}"'
        lines += [f"{condition} -a {value}" for value in page.values()]
        for action in page.visible_options():
            options = [
                f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" if len(text) == 2 else f"-o {text[1:]}"
                for text in action.option_strings
            ]
            values = _fish_values(_known(path, action)) if action.nargs != 0 else ""
            lines.append(f"{condition} {' '.join(options)}{values}")
    return lines
