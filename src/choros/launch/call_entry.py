"""One rank of ``choros.run``: ``python -m choros.launch.call_entry``, started with its rank, cores and threads set.

``CHOROS_CALL`` holds two file descriptors: of the call, which all ranks read, and of the memory for this rank's reply.
"""

from __future__ import annotations

import os
import sys

from choros.launch.call_io import read_call, write_failure, write_value
from choros.launch.process.failure_report import raised


def main() -> int:
    """Make the call; write the returned value, or the exception, into this rank's memory.

    Returns:
        The exit code: 0; 1 if the call raised; 130 if it was interrupted.
    """
    call, answer = (int(number) for number in os.environ.pop("CHOROS_CALL").split(","))
    for fd in (call, answer):
        os.set_inheritable(fd, False)
    try:
        func, args, kwargs = read_call(call)
        write_value(answer, int(os.environ["CHOROS_RANK"]), func(*args, **kwargs))
    except KeyboardInterrupt:  # the caller was interrupted too and raises
        return 130
    except BaseException as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next  # drop this module's frame
        write_failure(answer, raised(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
