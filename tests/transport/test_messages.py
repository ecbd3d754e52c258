"""The codec of control messages: what it accepts, and the words of a refusal."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from choros.comm.messages import Done, Messages, Router, decode, encode
from choros.errors import InvalidInputError
from choros.types import Array


@dataclass(frozen=True)
class Rate:
    value: float | None = None


@dataclass(frozen=True)
class Report:
    epoch: int
    logs: dict[str, float]
    position: tuple[int, int]
    final: bool
    state: Array
    rate: Rate = field(default_factory=Rate)
    hosts: list[str] = field(default_factory=list)


REPORT = Report(1, {"loss": 0.5}, (2, 3), True, np.arange(3.0), Rate(0.1), ["a"])
HEADER = {"op": "Report", "epoch": 1, "logs": {"loss": 0.5}, "position": [2, 3], "final": True}


def test_a_message_arrives_as_it_was_sent():
    header, arrays = encode(REPORT)
    assert header == {**HEADER, "rate": {"value": 0.1}, "hosts": ["a"]}
    received = Messages(Report).decode(header, arrays)
    assert received.state is REPORT.state
    assert vars(received) == vars(REPORT)
    assert decode(Report, HEADER, arrays).rate == Rate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "Reports"}, "Unknown message 'Reports': one of Report"),
        ({"op": ["Report"]}, "Unknown message"),
        ({"epoch": "1"}, "Message Report: field epoch must be int, and is '1'"),
        ({"epoch": True}, "field epoch must be int, and is True"),
        ({"epoch": None}, "field epoch must be int"),
        ({"final": 1}, "field final must be bool, and is 1"),
        ({"logs": {"loss": "nan"}}, r"field logs\['loss'\] must be float, and is 'nan'"),
        ({"logs": [1]}, "field logs must be dict"),
        ({"position": [1]}, r"field position must be .*tuple.*, and is \[1\]"),
        ({"rate": {"value": []}}, "field rate: field value must be"),
        ({"rate": {"slots": 1}}, "field rate has no field 'slots'"),
        ({"rate": 1}, "field rate must be an object of fields"),
        ({"state": [1.0]}, "Message Report has no field 'state'"),
        ({"__class__": "os.system"}, "Message Report has no field '__class__'"),
    ],
)
def test_a_wrong_message_is_refused_by_name(change, message):
    with pytest.raises(InvalidInputError, match=message):
        Messages(Report).decode({**HEADER, **change}, [np.zeros(1)])


def test_a_missing_field_or_array_is_refused():
    with pytest.raises(InvalidInputError, match="Message Report lacks the field epoch"):
        decode(Report, {name: value for name, value in HEADER.items() if name != "epoch"}, [np.zeros(1)])
    with pytest.raises(InvalidInputError, match="Message Report has 0 arrays, and must have 1"):
        decode(Report, HEADER, [])
    with pytest.raises(InvalidInputError, match="Message 'Report' in place of Rate"):
        decode(Rate, HEADER, [])


@dataclass(frozen=True)
class State:
    header: Array
    vectors: list[Array]


def test_a_list_of_arrays_follows_the_other_arrays():
    arrays = [np.zeros(1), np.ones(2), np.ones(3)]
    for count in (1, 3):
        header, encoded = encode(State(arrays[0], arrays[1:count]))
        assert header == {"op": "State"}
        received = decode(State, header, encoded)
        assert received.header is arrays[0]
        assert [id(vector) for vector in received.vectors] == [id(vector) for vector in arrays[1:count]]
    with pytest.raises(InvalidInputError, match="Message State has 0 arrays, and must have at least 1"):
        decode(State, {"op": "State"}, [])


def test_a_router_passes_each_message_to_its_protocol():
    def reply(request):
        return Rate(2 * request.value)

    router = Router((Messages(Rate), reply), (Messages(State), lambda request: Done()))
    assert router.handle({"op": "Rate", "value": 2.0}, []) == ({"op": "Rate", "value": 4.0}, [])
    assert router.handle({"op": "State"}, [np.zeros(1)]) == ({"op": "Done"}, [])
    with pytest.raises(InvalidInputError, match="Unknown message 'Report': one of Rate, State"):
        router.handle({"op": "Report"}, [])
    with pytest.raises(InvalidInputError, match="the same name: Rate, Rate"):
        Router((Messages(Rate), reply), (Messages(Rate), reply))
