"""The layout of a center's segment.

The head (``choros.comm.shm.group_header``) has the sizes, the commit word and the lock's two words. Then come two
headers of 64-bit words, of which the commit word's last bit chooses one: the clock; how often the centre was set; for
the centre, the moving statistics and each memory vector, which of its two buffers counts; the clock that each rank last
saw; how often each rank contributed; where each rank was then. Then the vectors, two buffers each, on pages of their
own. Last, for each rank, what it has yet to bring (``SharedMemoryParameterServer.leave``): a few words, then a message
and the moving statistics, which take memory only once they are written.
"""

from __future__ import annotations

from typing import NamedTuple

from choros.comm.shm.group_header import FREE, LINES
from choros.comm.shm.segment import align

_PAGE = 4096
WORKERS, COUNT, OTHERS, MEMORIES, DTYPE, DTYPE_OTHERS = *range(FREE, FREE + 5), FREE + 6
COMMIT, RELEASED, HELD = 32, 40, 41
CLOCK, SET, ACTIVE = 0, 1, 2
LEFT = 8  # words of what a rank has yet to bring: a turn, odd while it is written, then the next three
LEFT_SENT, LEFT_SET, LEFT_SEEN = 1, 2, 3  # its contributions before it, how often the centre was set, the clock it saw


class Layout(NamedTuple):
    """The layout: derived from five numbers, by the creator and by each process that attaches."""

    headers: tuple[int, int]
    header_words: int
    areas: list[tuple[int, int]]
    pending: int
    messages: list[tuple[int, int]]
    total: int

    @classmethod
    def of(cls, workers: int, sizes: list[int]) -> Layout:
        """Lay out two headers and, for each vector of so many bytes, two buffers."""
        header = ACTIVE + len(sizes) + 3 * workers
        first = 8 * LINES
        second = first + align(8 * header)
        at = align(second + align(8 * header), _PAGE)
        areas = []
        for size in sizes:
            room = align(size, _PAGE)
            areas.append((at, at + room))
            at += 2 * room
        pending, messages = at, []
        at = align(at + LEFT * 8 * workers, _PAGE)
        for _ in range(workers):
            messages.append((at, at + align(sizes[0], _PAGE)))
            at = messages[-1][1] + align(sizes[1], _PAGE)
        return cls((first, second), header, areas, pending, messages, at)
