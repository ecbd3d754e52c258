"""One rank of ``choros.submit``: ``python -m choros.launch.job_entry FOLDER DIGEST``, which a job's launcher starts.

The folder holds the call, which all ranks read, and gets one file with the answer of each rank.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

from choros.cluster import Place
from choros.errors import InvalidInputError
from choros.launch.call_io import write_failure, write_value
from choros.launch.private_file import create_private, read_private
from choros.launch.process.failure_report import raised

CALL = "call"
logger = logging.getLogger("choros.launch.job_entry")  # __name__ is "__main__"


def answer_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's answer."""
    return Path(folder, f"answer.{rank}")


def main(folder: str, digest: str) -> int:
    """Make the call; write the returned value, or the exception, into the file of this rank.

    Args:
        folder: the folder of the job.
        digest: the digest of the call.

    Returns:
        The exit code: 0; 1 if the call raised.
    """
    rank = Place.here().rank
    path = answer_file(folder, rank)
    try:
        call = read_private(Path(folder, CALL), "choros.submit", digest)
    except OSError as error:
        logger.error(
            f"{os.uname().nodename} cannot read {Path(folder, CALL)} ({error.strerror}): call choros.submit in a "
            "directory that all hosts share"
        )
        return 1
    except InvalidInputError as error:
        logger.error(f"{error}")
        return 1
    path.unlink(missing_ok=True)  # of an earlier turn of this job
    partial = Path(f"{path}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # of a process of an earlier turn with the same id
    fd = create_private(partial)
    try:
        _answer(fd, rank, call)
        code = 0
    except SystemExit:
        # The end of this turn before the time limit: the job's next turn answers.
        partial.unlink()
        raise
    except Exception as error:
        traceback.print_exc()
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next.tb_next  # drop this module's frames
        write_failure(fd, raised(error))
        code = 1
    os.fsync(fd)
    os.close(fd)
    partial.replace(path)
    return code


def _answer(fd: int, rank: int, call: bytes) -> None:
    from choros.pickling import loads

    func, args, kwargs = loads(call)
    write_value(fd, rank, func(*args, **kwargs))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
