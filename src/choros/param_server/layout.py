"""Layout of the shared segment of a parameter server.

1. The segment's header (``choros.comm.shm.group_header``): sizes, the commit word, and the lock's two words.
2. Two center headers of 64-bit words. The last bit of the commit word selects one. A center header has: the clock; the
   number of times that a controller set the center; the index of the valid buffer for the center, for the moving
   statistics and for each memory vector; and for each rank the clock that it saw last, the number of its contributions,
   and its position.
3. The vectors, with two buffers each, on separate pages.
4. For each rank a pending message (``SharedMemoryParameterServer.publish_pending``): words, a message, and moving
   statistics. These pages take memory at their first write.
"""

from __future__ import annotations

from typing import NamedTuple

from choros.comm.shm.group_header import FIRST_FREE_WORD, RECORDS
from choros.comm.shm.segment import align

_PAGE = 4096
# A dtype has two words (``dtype_code``). The commit word and the lock's words are on separate cache lines: readers poll
# the first while waiters poll the others.
WORKERS, COUNT, STATISTICS, MEMORIES, DTYPE, DTYPE_STATISTICS = (
    *range(FIRST_FREE_WORD, FIRST_FREE_WORD + 5),
    FIRST_FREE_WORD + 6,
)
COMMIT, RELEASED, HOLDER = 32, 40, 41
CLOCK, TIMES_SET, ACTIVE = 0, 1, 2
# Words of a pending record: a version, which is odd during a write, then the rank's contributions before the message,
# the number of times that the center was set, and the clock that the rank saw last. One cache line for each rank.
PENDING_WORDS = 8
PENDING_CONTRIBUTIONS, PENDING_TIMES_SET, PENDING_CLOCK = range(1, 4)


class Layout(NamedTuple):
    """Offsets in bytes. The creator and each process that attaches compute them from the same numbers.

    Attributes:
        headers: the offsets of both center headers.
        header_words: int. The number of 64-bit words of a center header.
        areas: for each vector the offsets of its two buffers.
        pending: int. The offset of the records of pending messages, which follow the buffers.
        messages: for each rank the offsets of its pending message and of its moving statistics.
        total: int. The length of the segment.
    """

    headers: tuple[int, int]
    header_words: int
    areas: list[tuple[int, int]]
    pending: int
    messages: list[tuple[int, int]]
    total: int

    @classmethod
    def of(cls, workers: int, sizes: list[int]) -> Layout:
        """Return the layout for a number of workers and vectors of ``sizes`` bytes."""
        header_words = ACTIVE + len(sizes) + 3 * workers
        first_header = 8 * RECORDS
        second_header = first_header + align(8 * header_words)
        offset = align(second_header + align(8 * header_words), _PAGE)
        areas = []
        for size in sizes:
            # Whole pages: a page of a buffer belongs to no other area, so unused areas take no memory.
            buffer_bytes = align(size, _PAGE)
            areas.append((offset, offset + buffer_bytes))
            offset += 2 * buffer_bytes
        pending, messages = offset, []
        offset = align(offset + PENDING_WORDS * 8 * workers, _PAGE)
        for _ in range(workers):
            messages.append((offset, offset + align(sizes[0], _PAGE)))
            offset = messages[-1][1] + align(sizes[1], _PAGE)
        return cls((first_header, second_header), header_words, areas, pending, messages, offset)
