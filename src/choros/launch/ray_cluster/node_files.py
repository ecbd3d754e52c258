"""The files and the working directory of a job on a node that does not share them with the caller."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from choros.launch.private_file import create_private


class NodeFiles:
    """Files and directories that were created on this node. ``remove`` removes them, and nothing else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path, files = f"{folder}/project/code/0", NodeFiles()
        ...     files.missing(f"{folder}/project", [path])
        ...     files.write({path: b"code"})
        ...     files.remove()
        ...     os.listdir(folder)
        [0]
        []
    """

    def __init__(self) -> None:
        self._files: list[str] = []
        self._directories: list[str] = []

    def missing(self, directory: str, paths: Sequence[str]) -> list[int]:
        """Create the working directory if it does not exist. Return the positions of the paths that do not exist.

        Args:
            directory: the working directory of the job.
            paths: the files that its ranks read.

        Raises:
            OSError: the directory cannot be created.
        """
        self._create(directory)
        return [number for number, path in enumerate(paths) if not os.path.exists(path)]

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write files that only this user can read, and their directories. Existing files are left as they are.

        Args:
            contents: the content of each path.

        Raises:
            OSError: a file cannot be written.
        """
        for path, content in contents.items():
            self._create(os.path.dirname(path))
            if os.path.exists(path):
                continue
            # Under another name first: nodes that share the directory may write the same file at the same time, and
            # their ranks must not read a part of it.
            part = f"{path}.{os.uname().nodename}.{os.getpid()}"
            with open(create_private(part), "wb") as file:
                file.write(content)
            os.replace(part, path)
            self._files.append(path)

    def remove(self) -> None:
        """Remove the files that were written, then the directories that were created and are empty."""
        for path in self._files:
            with suppress(OSError):
                os.remove(path)
        for path in reversed(self._directories):
            with suppress(OSError):
                os.rmdir(path)
        self._files, self._directories = [], []

    def _create(self, directory: str) -> None:
        """Create a private directory and its parents, from the first that does not exist."""
        missing = []
        while not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        for path in reversed(missing):
            with suppress(FileExistsError):  # another node that shares it was first
                os.mkdir(path, 0o700)
                self._directories.append(path)
