"""The times of a run, and what its timeline says."""

import json

import pytest

from choros.tools.demo.measurement import read_timeline, steady


def event(pid, kind, name, begin, end, nbytes=None):
    args = {} if nbytes is None else {"bytes": nbytes}
    return {
        "ph": "X",
        "pid": pid,
        "cat": kind,
        "name": name,
        "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
        "args": args,
    }


def worker(pid, begin, step=0.1, exchange=0.02):
    """Two epochs of two steps, each with data, a step and an exchange of 100 bytes; the first compiles for 1 s."""
    events = []
    for number in range(4):
        ready = begin + step * number + (number > 0)
        events.append(event(pid, "data", "next batch", ready, ready + 0.01))
        end = ready + step - exchange + (number == 0)
        events.append(event(pid, "compute", "step", ready + 0.01, end))
        events.append(event(pid, "exchange", "weights", end, end + exchange, 100))
    return events


@pytest.fixture
def timeline(tmp_path):
    path = tmp_path / "timeline.json"
    marks = [{"ph": "M", "pid": 1, "name": "process_name", "args": {}}]
    path.write_text(json.dumps({"traceEvents": marks + worker(1, 5.0) + worker(2, 5.05)}))
    return path


def test_the_first_epoch_counts_as_the_others_and_the_rest_is_start_up():
    assert steady([3.0, 4.0, 5.0, 9.0]) == ([1.0, 2.0, 3.0, 7.0], 2.0)
    assert steady([0.5, 1.5, 2.5]) == ([0.5, 1.5, 2.5], 0.0)  # a short first epoch is left as it is
    assert steady([]) == ([], 0.0)


def test_shares_are_those_after_the_first_epoch(timeline):
    result = read_timeline(timeline, 2, asynchronous=True)
    assert result.exchanging == pytest.approx(0.2)  # without the second that compiles; with it, 0.06
    assert result.waiting == pytest.approx(0.1)


def test_bytes_are_those_at_each_epochs_end(timeline):
    assert read_timeline(timeline, 2, asynchronous=True).sent == (400, 800)


def test_staleness_counts_the_exchanges_by_others_between_two_of_a_worker(timeline):
    # Both exchange by turns: the first exchange of worker 0 comes before all others.
    assert read_timeline(timeline, 2, asynchronous=True).staleness == (1, 7)
    assert read_timeline(timeline, 2, asynchronous=False).staleness == ()


def test_lanes_begin_after_the_first_epoch(timeline):
    first, second = read_timeline(timeline, 2, asynchronous=True).lanes
    assert {kind for kind, _, _ in first} == {"compute", "data", "exchange"}
    assert min(begin for _, begin, _ in (*first, *second)) >= 0
    assert max(end for _, _, end in second) == pytest.approx(0.2, abs=0.011)
    assert [kind for kind, _, _ in first] == sorted(
        (kind for kind, _, _ in first), key=("compute", "data", "exchange").index
    )
