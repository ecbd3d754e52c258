"""A rule that is followed gives, to the last bit, what it gives when it is called."""

import numpy as np
import pytest

from choros.param_server.fused_update import trace_rule
from choros.param_server.layout import ACTIVE
from choros.param_server.rule_blocks import BLOCK
from choros.param_server.shared_memory import ExchangeInfo, SharedMemoryParameterServer

NONE = np.zeros(0)


class Rule:
    shows, elementwise = "after", True

    def propose(self, local, seen, window):
        return local - seen

    def merge(self, center, message, info, memory):
        return center + info.workers * message, memory

    def adopt(self, local, shown):
        return shown


class Elastic(Rule):
    shows = "before"

    def propose(self, local, seen, window):
        return local

    def merge(self, center, message, info, memory):
        return center + (info.workers * 0.3) * (message - center), memory

    def adopt(self, local, shown):
        return local - 0.3 * (local - shown)


class ElasticAfter(Elastic):
    shows = "after"


class Adagrad(Rule):
    def merge(self, center, message, info, memory):
        squares = memory[0] + message**2
        return center + 0.01 * message / (squares + 1e-8) ** 0.5, (squares, memory[1])


class DynSGD(Rule):
    def merge(self, center, message, info, memory):
        return center + message / (info.staleness + 1), memory


class Nesterov(Rule):
    def propose(self, local, seen, window):
        return (local - seen) / window

    def merge(self, center, message, info, memory):
        speed = 0.9 * memory[1] + message
        return center + 0.7 * (message + 0.9 * speed), (memory[0], speed)


class Takes(Rule):
    """The center becomes the worker's vector, which the worker then scales: reads after a write would be wrong."""

    def propose(self, local, seen, window):
        return local

    def merge(self, center, message, info, memory):
        return message, (message, center)

    def adopt(self, local, shown):
        return -shown * 2 + local**3 - 1 / (local**-1 + 7) + 2 * local / 1


class Swaps(Rule):
    """Everything ends elsewhere, and nothing is computed."""

    def propose(self, local, seen, window):
        return seen

    def merge(self, center, message, info, memory):
        return message, (memory[1], memory[0])

    def adopt(self, local, shown):
        return local


class ToSeen(Rule):
    """The worker goes back to what it saw; both memories become one result, and so does the center."""

    shows = "before"

    def merge(self, center, message, info, memory):
        both = memory[0] * memory[1] - center
        return both, (both, both)

    def propose(self, local, seen, window):
        self.seen = seen
        return local

    def adopt(self, local, shown):
        return self.seen


class Squares(Rule):
    def adopt(self, local, shown):
        return (3 - shown) * 1 + (1 + local) ** 2 + 0.5


class SeenToo(Elastic):
    uses_seen = True


class SeenNever(Rule):
    uses_seen = False


RULES = [Rule, Elastic, ElasticAfter, Adagrad, DynSGD, Nesterov, Takes, Swaps, ToSeen, Squares, SeenToo, SeenNever]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", RULES)
def test_followed_equals_called(kind, dtype, monkeypatch):
    rng, count = np.random.default_rng(1), BLOCK + 321
    start, memory = rng.random(count).astype(dtype), tuple(rng.random(count).astype(dtype) for _ in range(2))
    assert trace_rule(kind(), 5, ExchangeInfo(), 2) is not None
    ends = []
    for followed in (True, False):
        if not followed:
            monkeypatch.setattr("choros.param_server.shared_memory.trace_rule", lambda *_: None)
        rng = np.random.default_rng(2)
        with SharedMemoryParameterServer.create(start, NONE, memory, 3) as segment:
            clients = [SharedMemoryParameterServer(segment, kind(), rank, 3) for rank in range(3)]
            vectors = [(rng.random(count).astype(dtype), start.copy()) for _ in range(3)]
            for rank in (0, 1, 2, 1, 1, 0):
                clients[rank].exchange(*vectors[rank], 5, NONE)
            header = clients[0]._header()
            active = np.delete(header[ACTIVE : ACTIVE + 4], 1)
            held = [clients[0]._buffers[i][a].copy() for i, a in zip((0, 2, 3), active, strict=True)]
            ends.append((*held, *(local for local, _ in vectors), active, [seen for _, seen in vectors]))
    (*first, flags, seen), (*two, others, seen_called) = ends
    for a, b in zip(first, two, strict=True):
        assert a.tobytes() == b.tobytes()
    assert flags.tolist() == others.tolist()
    reads = trace_rule(kind(), 5, ExchangeInfo(), 2).reads_seen
    if getattr(kind, "uses_seen", reads):
        assert [a.tobytes() for a in seen] == [b.tobytes() for b in seen_called]
    else:
        assert all(np.array_equal(a, start) for a in seen)  # left as it was: nobody looks at it


def test_what_is_computed_twice_is_computed_once_and_written_in_place():
    program = trace_rule(Elastic(), 1, ExchangeInfo(), 0)
    assert [step[0] for step in program._steps] == [np.subtract, np.multiply, np.add, np.subtract]
    assert program._scratch == 1
    assert not program.reads_seen
    downpour = trace_rule(Rule(), 1, ExchangeInfo(), 0)
    assert [step[0] for step in downpour._steps] == [np.subtract, np.add, np.copyto, np.copyto]
    assert downpour.reads_seen


@pytest.mark.parametrize(
    "merge",
    [
        lambda self, center, message, info, memory: (np.sign(message), memory),
        lambda self, center, message, info, memory: (center + message / message.sum(), memory),
        lambda self, center, message, info, memory: (center if message else message, memory),
        lambda self, center, message, info, memory: (center if message == 0 else message, memory),
        lambda self, center, message, info, memory: (center * np.float64(2), memory),
        lambda self, center, message, info, memory: (center * np.ones(5), memory),
        lambda self, center, message, info, memory: (center[:3], memory),
        lambda self, center, message, info, memory: (1.0, memory),
        lambda self, center, message, info, memory: (center, ()),
        lambda self, center, message, info, memory: 1 / 0,
    ],
)
def test_what_cannot_be_followed_is_left_to_be_called(merge):
    rule = type("Odd", (Rule,), {"merge": merge})()
    assert trace_rule(rule, 1, ExchangeInfo(), 1) is None


def test_what_cannot_be_followed_is_called(monkeypatch):
    class Signs(Rule):
        def merge(self, center, message, info, memory):
            return center + np.sign(message), memory

    class Fails(Rule):
        def adopt(self, local, shown):
            raise RuntimeError("adopt failed")

    class Forgets(Rule):
        def merge(self, center, message, info, memory):
            return center, ()

    with SharedMemoryParameterServer.create(np.zeros(4), NONE, (np.zeros(4),), 1) as segment:
        local = np.array([3.0, -2.0, 0.0, 9.0])
        client = SharedMemoryParameterServer(segment, Signs(), 0)
        client.exchange(local, np.zeros(4), 1, NONE)
        assert local.tolist() == [1, -1, 0, 1]
        with pytest.raises(RuntimeError, match="adopt failed"):
            SharedMemoryParameterServer(segment, Fails(), 0).exchange(local, np.zeros(4), 1, NONE)
        with pytest.raises(ValueError, match="returned 0 memory vectors and was given 1"):
            SharedMemoryParameterServer(segment, Forgets(), 0).exchange(local, np.zeros(4), 1, NONE)
        assert client.clock == 1
