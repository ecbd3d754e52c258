"""The ranks of an elastic job and its settings, calculated without starting any."""

import pytest

from choros.cli import main
from choros.errors import InvalidInputError
from choros.launch.elastic.host_discovery import parse_found, script_of
from choros.launch.elastic.members import LEAVING, Blacklist, Member, ordered, places, surplus, vacancies
from choros.launch.elastic.settings import ElasticSettings, terms_of


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ()),
        ("localhost", (("localhost", 3),)),
        ("n1:4\r\n\n  n2.site-a.org : 2  \nn3\n", (("n1", 4), ("n2.site-a.org", 2), ("n3", 3))),
        ("n1:0\nn2:1", (("n2", 1),)),
    ],
)
def test_what_a_discovery_script_prints(text, result):
    assert parse_found(text, each=3) == result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1:four", "line 1 is 'n1:four', not of the form host or host:slots"),
        ("n1\nn2 slots=4", "line 2 is 'n2 slots=4'"),
        ("n1:-1", "line 1"),
        ("n1:2\nn1:3", "line 2 names n1 a second time"),
        ("$(reboot)", "line 1"),
        ("n1:1234567", "line 1"),
    ],
)
def test_what_a_discovery_script_must_not_print(text, message):
    with pytest.raises(InvalidInputError) as caught:
        parse_found(text)
    assert message in str(caught.value)


def test_a_script_that_cannot_be_run(tmp_path):
    (tmp_path / "hosts").write_text("echo localhost")
    for text, message in (
        (str(tmp_path / "hosts"), "may not be run: chmod [+]x it"),
        (str(tmp_path / "none"), "is not there"),
        ("'", "cannot be read"),
        ("", "is not there"),
    ):
        with pytest.raises(InvalidInputError, match=f"^--host-discovery-script .*{message}"):
            script_of(text)


def members(*values):
    """Processes by host and last rank."""
    return [Member(number, host, 0, rank=rank) for number, (host, rank) in enumerate(values)]


def test_new_ranks_come_where_there_are_slots():
    some = members(("a", 0), ("a", 1), ("b", 2))
    assert vacancies((("a", 2), ("b", 2), ("c", 1)), some, set(), None) == ["b", "c"]
    assert vacancies((("a", 2), ("b", 2), ("c", 1)), some, set(), 4) == ["b"]
    assert vacancies((("a", 2), ("b", 2), ("c", 1)), some, {"b"}, 4) == ["c"]
    assert vacancies((("a", 1), ("b", 1)), some, set(), 9) == []
    assert vacancies((), some, set(), None) == []


def test_who_has_no_slot_any_more():
    some = members(("a", 1), ("a", -1), ("a", 0), ("b", 2))
    assert [member.number for member in surplus((("a", 3), ("b", 1)), some)] == []
    assert [member.number for member in surplus((("a", 1), ("b", 1)), some)] == [0, 1]
    assert [member.number for member in surplus((("a", 3),), some)] == [3]


def test_survivors_keep_their_order_and_come_before_new_ones():
    some = members(("b", 3), ("a", -1), ("a", 1), ("b", -1), ("b", 0))
    assert [member.number for member in ordered(some)] == [4, 2, 0, 1, 3]
    places_ = places(ordered(some))
    assert [place["rank"] for place in places_] == [0, 1, 2, 3, 4]
    assert {place["size"] for place in places_} == {5}
    assert [(p["node"], p["local_rank"], p["local_size"]) for p in places_] == [
        (0, 0, 3),
        (1, 0, 2),
        (0, 1, 3),
        (1, 1, 2),
        (0, 2, 3),
    ]


def test_names_of_this_machine_are_one_machine():
    places_ = places(members(("localhost", 0), ("127.0.0.1", 1), ("n1", 2)))
    assert [(p["node"], p["nodes"], p["local_rank"], p["local_size"]) for p in places_] == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 1),
    ]


def test_a_host_is_out_for_ever_or_for_a_time_that_grows():
    now = [0.0]
    ever = Blacklist(None, clock=lambda: now[0])
    assert ever.bar("n1") == float("inf")
    now[0] = 1e9
    assert ever.barred() == ever.barred(ever=True) == {"n1"}
    drawn = []
    black = Blacklist((10.0, 50.0), clock=lambda: now[0], draw=lambda low, high: drawn.append((low, high)) or low)
    assert [black.bar("n2") for _ in range(5)] == [10.0, 20.0, 40.0, 50.0, 50.0]
    assert drawn == [(10, 20), (20, 40), (40, 50), (50, 50), (50, 50)]
    black.bar("n3")
    assert black.barred() == {"n2", "n3"}
    assert black.barred(ever=True) == set()
    now[0] += 11
    assert black.barred() == {"n2"}
    now[0] += 40
    assert black.barred() == set()
    for _ in range(2000):  # no number is too large
        black.bar("n2")


def test_what_was_asked_for():
    assert terms_of(4, None, None, ()) is None
    assert terms_of(4, 2, None, ()) == ElasticSettings(4, 2, None, (), (("localhost", 4),))
    assert terms_of(None, 2, 3, ()).hosts == (("localhost", 3),)
    assert terms_of(2, 2, None, (("n1", 2), ("n2", 2))).here is False
    result = terms_of(2, None, 5, (), script="true", each=2, timeout=9.0, resets=0, cooldown=(1.0, 2.0))
    assert (result.first, result.least, result.most, result.each, result.timeout) == (2, 2, 5, 2, 9.0)
    assert (result.resets, result.cooldown, result.here) == (0, (1.0, 2.0), False)
    assert LEAVING not in ("starting", "ready", "in")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2 --min-np 3", "--min-np 3 is more than the 2 ranks of -n"),
        ("-n 2 --min-np 1 --max-np 1", "--max-np 1 is less than the 2 ranks of -n"),
        ("-n 2 --max-num-proc 3", "--max-np is for an elastic job: give --min-np or --host-discovery-script too"),
        ("-n 2 --reset-limit 0", "--reset-limit is for an elastic job"),
        ("-n 2 --elastic-timeout 5", "--elastic-timeout is for an elastic job"),
        ("-n 2 --blacklist-cooldown-range 1 2", "--blacklist-cooldown-range is for an elastic job"),
        ("-n 2 --min-num-proc 1 --slots-per-host 2", "--slots-per-host is for hosts that"),
        ("-n 2 --min-np 1 --blacklist-cooldown-range 3 2", "--blacklist-cooldown-range 3 2: give 0 < MIN <= MAX"),
        ("-n 2 -H localhost:2 --host-discovery-script true", "give one"),
        ("-n 3 -H localhost:2 --min-np 1", "3 ranks were asked for, but the hosts have 2 slots"),
        ("-n 2 --host-discovery-script ./no/such", "the program is not there"),
        ("--host-discovery-script true", "give the number of ranks: -n N, or --min-np N"),
        ("-n 2 --min-np 1 --launcher srun", "not by --launcher srun"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(arguments, message, capsys):
    assert main(["run", *arguments.split(), "no_such_script.py"]) == 2
    assert message in capsys.readouterr().err


def test_another_group_is_refused(monkeypatch):
    monkeypatch.setenv("CHOROS_COMM", "torch")
    with pytest.raises(InvalidInputError, match="CHOROS_COMM=torch: .*; unset it"):
        terms_of(2, 1, None, ())


@pytest.mark.parametrize("value", ["soon", "1", "nan", "-3"])
def test_what_is_no_pulse(value, monkeypatch):
    monkeypatch.setenv("CHOROS_PULSE", value)
    with pytest.raises(InvalidInputError, match="CHOROS_PULSE='.*' is not a number of seconds of 2 or more"):
        terms_of(2, 1, None, ())
