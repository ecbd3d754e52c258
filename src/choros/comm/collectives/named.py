"""Collectives by name: every rank first says what it is about to do, so that a difference is an error, not a hang."""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from choros.comm.collectives.object_codec import decode, encode, name_of
from choros.comm.collectives.reduce_ops import AVERAGE, SUM, Op, reduced, refusal
from choros.comm.group import Group
from choros.errors import InvalidInputError, RankMismatchError
from choros.types import Array, dtype_of

_JOIN = {"call": "join"}
_KEPT = 256  # spelled calls that are remembered
_FEW = 4096  # bytes that travel with what is said of them, so that the ranks meet once
Call = dict[str, Any]
Given = ParamSpec("Given")
Result = TypeVar("Result")


def _told(
    method: Callable[Concatenate[Collectives, Given], Result],
) -> Callable[Concatenate[Collectives, Given], Result]:
    """Let the group's trace take a call down, by the words that ``_agree`` finds for it, and end what it is about."""

    @functools.wraps(method)
    def call(self: Collectives, /, *given: Given.args, **named: Given.kwargs) -> Result:
        group = self.group
        begin = 0 if group.trace is None else time.monotonic_ns()
        try:
            return method(self, *given, **named)
        finally:
            if begin and group.trace is not None:
                weighs = getattr(given[0], "nbytes", -1) if given else -1
                group.trace(("call", group.doing or method.__name__, begin, time.monotonic_ns(), weighs))
            group.doing = ""

    return call


class Collectives:
    """Collectives of one set of ranks.

    Each call is made by every rank in the same order. What must be equal (call, name, type, shape, operation, root) is
    compared before any value is used; where it differs every rank raises ``RankMismatchError`` and the next call works.
    Input is never changed; results are new arrays.

    Args:
        group: transport.Group. Everyone who takes part.
        ranks: list of int. What roots and errors call them. Defaults to their numbers in the group.

    Attributes:
        group: as given. rank, size: int, within the group. met: int. Calls that this process compared, in all sets.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> alone = Collectives(SingleRankGroup())
        >>> alone.allreduce(np.array([1.0, 2.0]), SUM, name="x").tolist()
        [1.0, 2.0]
    """

    met = 0

    def __init__(self, group: Group, ranks: Sequence[int] = ()) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.ranks = list(ranks) or list(range(group.size))
        for told, nothing in (("doing", ""), ("warn_after", math.inf), ("trace", None)):
            if not hasattr(group, told):  # a group from elsewhere need not tell what takes long
                setattr(group, told, nothing)
        self._numbers: dict[str, int] = {}
        self._spelled: dict[bytes, str] = {}

    @_told
    def allreduce(
        self, x: Array, op: Op = AVERAGE, *, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0
    ) -> Array:
        """Return the reduction of all ranks' arrays, of ``x``'s type and shape.

        Args:
            x: the same type and shape on every rank.
            op: Op.
            name: str. What errors call it; the ranks' names must be equal.
            prescale: float. Factor before. Defaults to 1.
            postscale: float. Factor after. Defaults to 1.

        Raises:
            RankMismatchError: the ranks' calls differ, or one of them cannot be made.
        """
        factors = {"prescale": float(prescale), "postscale": float(postscale)}
        same = self._same("allreduce", name, x, op=int(op), **factors)
        problem = refusal(op, x.dtype, self.size)
        if x.nbytes <= _FEW and not problem:
            return reduced(_Once(self, same), x, op, prescale, postscale)
        self._agree(same, problem)
        return reduced(self.group, x, op, prescale, postscale)

    def allgather(self, x: Array, *, name: str | None = None) -> Array:
        """Return all ranks' rows, in the order of the ranks; the first dimension may differ, also be 0."""
        return self.allgather_counted(x, name=name)[0]

    @_told
    def allgather_counted(self, x: Array, *, name: str | None = None) -> tuple[Array, list[int]]:
        """Return what ``allgather`` does, and how many rows each rank gave."""
        said = self._agree(self._rows("allgather", name, x), _needs_rows(x), rows=len(x) if x.ndim else 0)
        return self._gathered(x, said), [own.get("rows", 0) for _, own in said]

    @_told
    def broadcast(self, x: Array, root: int | None = None, *, name: str | None = None) -> Array:
        """Return the root's array, by default the first rank's; ``x`` has its type and shape on every rank."""
        root = self.ranks[0] if root is None else as_root(root)
        self._agree(self._same("broadcast", name, x, root=root), self._no_root(root))
        return self.group.broadcast(x, self.ranks.index(root))

    @_told
    def alltoall(self, x: Array, splits: Array | None = None, *, name: str | None = None) -> tuple[Array, Array]:
        """Send ``splits[r]`` rows to each rank r; return the rows received and how many came from each rank.

        Args:
            x: rows in the order of the ranks that get them.
            splits: (size,) whole numbers. Defaults to equal parts.
            name: str. What errors call it.
        """
        problem, parts = _needs_rows(x), [0] * self.size
        if not problem:
            problem, parts = _parts(x, splits, self.size)
        said = self._agree(self._rows("alltoall", name, x), problem, rows=len(x) if x.ndim else 0, splits=parts)
        everything = self._gathered(x, said)
        begins = np.cumsum([0, *(own.get("rows", 0) for _, own in said)])
        pieces, received = [], []
        for begin, (_, own) in zip(begins, said, strict=False):
            sent = own.get("splits", [0] * self.size)
            first = int(begin) + sum(sent[: self.rank])
            pieces.append(everything[first : first + sent[self.rank]])
            received.append(sent[self.rank])
        return np.concatenate(pieces), np.array(received, np.int32)

    @_told
    def reducescatter(
        self, x: Array, op: Op = AVERAGE, *, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0
    ) -> Array:
        """Return this rank's rows of the reduction; of rows that do not divide the first ranks have one more."""
        same = self._same("reducescatter", name, x, op=int(op), prescale=prescale, postscale=postscale)
        self._agree(same, _needs_rows(x) or refusal(op, x.dtype, self.size))
        whole = reduced(self.group, x, op, prescale, postscale)
        each, more = divmod(len(x), self.size)
        begin = self.rank * each + min(self.rank, more)
        return whole[begin : begin + each + (self.rank < more)].copy()

    @_told
    def broadcast_object(self, value: Any, root: int | None = None, *, name: str | None = None) -> Any:
        """Return the root's object, by default the first rank's; see ``collectives.encode`` for what can travel."""
        root = self.ranks[0] if root is None else as_root(root)
        problem, data = self._no_root(root), b""
        if self.ranks[self.rank] == root:
            try:
                data = encode(value)
            except InvalidInputError as error:
                problem = str(error)
        self._agree({"call": "broadcast_object", "name": self._name("broadcast_object", name), "root": root}, problem)
        return decode(self.group.gather(data)[self.ranks.index(root)])

    @_told
    def allgather_object(self, value: Any, *, name: str | None = None) -> list[Any]:
        """Return every rank's object, in the order of the ranks."""
        problem, data = "", b""
        try:
            data = encode(value)
        except InvalidInputError as error:
            problem = str(error)
        self._agree({"call": "allgather_object", "name": self._name("allgather_object", name)}, problem)
        return [decode(part) for part in self.group.gather(data) if part]

    @_told
    def barrier(self) -> None:
        """Return when every rank has come."""
        self._agree({"call": "barrier"})

    def announce(self, name: str, size: int, dtype: Any) -> None:
        """Say that this rank's slot of ``size`` values is to be summed next, by ``group.sum_slots``.

        A rank that has joined takes part in that with zeros.

        Raises:
            RankMismatchError: the ranks' calls differ.
        """
        self._agree({"call": "reduction", "name": name, "dtype": name_of(np.dtype(dtype)), "shape": [size]})

    @_told
    def join(self) -> int:
        """Say that this rank has no more data; take part in what the others do with zeros until all have joined.

        Returns:
            The rank that joined last. A mean still divides by all ranks.
        """
        turns = 0
        while True:
            said = self._agree(_JOIN, turns=turns)
            going = [same for same, _ in said if same != _JOIN]
            if not going:
                return min(range(self.size), key=lambda rank: (said[rank][1]["turns"], -rank))
            self._follow(going[0])
            turns += 1

    # -- what all of them share
    def _follow(self, same: Call) -> None:
        """As one that has joined, take part in a call of the others with nothing to give."""
        call = same["call"]
        kind, _, number = str(same.get("name", "")).rpartition(".")
        if kind == call and number.isdecimal():  # a call without a name: the next one has the same number everywhere
            self._numbers[call] = int(number)
        if call in ("allreduce", "reducescatter"):
            nothing = np.zeros(same["shape"], dtype_of(same["dtype"]))
            if call == "reducescatter" or nothing.nbytes > _FEW:
                reduced(self.group, nothing, Op(same["op"]))
        elif call == "broadcast":
            self.group.broadcast(np.zeros(same["shape"], dtype_of(same["dtype"])), self.ranks.index(same["root"]))
        elif call == "reduction":
            size, dtype = same["shape"][0], dtype_of(same["dtype"])
            self.group.slot(size, dtype)[:] = 0
            self.group.sum_slots(size, dtype)
        elif call != "barrier":
            self.group.gather(b"")

    def refuse(self, doing: str, problem: str = "") -> None:
        """Meet the others in nothing they do, so that none of them waits for this rank.

        Args:
            doing: str. What this rank does instead, or the call that it cannot make.
            problem: str. Why it cannot.

        Raises:
            RankMismatchError: on every rank.
        """
        self._agree({"call": doing}, problem)

    def _no_root(self, root: Any) -> str:
        if root in self.ranks:
            return ""
        whole = self.ranks == list(range(self.size))
        return f"root {root} is none of {f'{self.size} ranks' if whole else f'the ranks {self.ranks}'}"

    def _name(self, call: str, name: str | None) -> str:
        if isinstance(name, str):
            return name
        if name is not None:
            raise TypeError(f"name={name!r}: give text.")
        self._numbers[call] = self._numbers.get(call, 0) + 1
        return f"{call}.{self._numbers[call]}"

    def _same(self, call: str, name: str | None, x: Array, **more: Any) -> Call:
        return {"call": call, "name": self._name(call, name), "dtype": name_of(x.dtype), "shape": list(x.shape), **more}

    def _rows(self, call: str, name: str | None, x: Array) -> Call:
        return {**self._same(call, name, x), "shape": ["any", *x.shape[1:]]}

    def _gathered(self, x: Array, said: list[tuple[Call, Call]]) -> Array:
        parts = self.group.gather(np.ascontiguousarray(x).tobytes())
        rows = [own.get("rows", 0) for _, own in said]
        arrays = [np.frombuffer(p, x.dtype).reshape(n, *x.shape[1:]) for p, n in zip(parts, rows, strict=True)]
        return np.concatenate(arrays)

    def _agree(self, same: Call, problem: str = "", body: bytes = b"", **own: Any) -> list[tuple[Call, Call]]:
        """Tell all what this rank is about to do; return what each said (what must be equal, and what is its own).

        A rank's ``body`` is what it has beside these words; it comes back as its own too.

        Raises:
            RankMismatchError: on every rank alike (those that have joined only wait).
        """
        Collectives.met += 1
        if problem:
            own["problem"] = problem
        mine = json.dumps([same, own]).encode()
        if mine not in self._spelled:
            if len(self._spelled) >= _KEPT:
                self._spelled.clear()
            self._spelled[mine] = _spell(same)
        self.group.doing = self._spelled[mine]
        parts = [text.partition(b"\n") for text in self.group.gather(b"%b\n%b" % (mine, body) if body else mine)]
        # as nearly always all say the same: then nothing needs to be read
        said = [(same, own) if text == mine else tuple(json.loads(text)) for text, _, _ in parts]
        if body:
            said = [
                (theirs, {**more, "body": given}) for (theirs, more), (_, _, given) in zip(said, parts, strict=True)
            ]
        going = [rank for rank, (theirs, _) in enumerate(said) if theirs != _JOIN]
        if not going:
            return said
        refused = _refused(said, going, self.ranks)
        if not refused:
            return said
        self._numbers.clear()  # on every rank: calls without a name have one number again
        if same == _JOIN:
            return self._agree(same, **own)
        raise RankMismatchError(refused)


class _Once:
    """A group for one reduction of few values, which go with the words that are compared."""

    def __init__(self, calls: Collectives, same: Call) -> None:
        self._calls, self._same = calls, same
        self.size, self.trace = calls.size, calls.group.trace

    def gather(self, x: bytes) -> list[bytes]:
        """Return what each rank gave; zeros for a rank that has joined."""
        return [own.get("body") or bytes(len(x)) for _, own in self._calls._agree(self._same, body=x)]

    def sum(self, x: Array) -> Array:
        """The sum, in the order of the ranks."""
        kind = x.dtype.newbyteorder("=")
        parts = [
            np.frombuffer(part, kind).reshape(x.shape) for part in self.gather(x.astype(kind, copy=False).tobytes())
        ]
        begin = time.monotonic_ns()
        with np.errstate(all="ignore"):
            total = np.asarray(functools.reduce(np.add, parts[1:], parts[0].copy()))
        if self.trace is not None:
            self.trace(("reduce", "reduce", begin, time.monotonic_ns(), x.nbytes))
        return total


def _refused(said: list[tuple[Call, Call]], going: list[int], ranks: list[int]) -> str:
    """Return why the ranks' calls cannot be carried out, or ""; the same text on every rank."""
    same = said[going[0]][0]
    if any(said[rank][0] != same for rank in going):
        told = "; ".join(f"rank {ranks[rank]}: {_spell(theirs)}" for rank, (theirs, _) in enumerate(said))
        return f"The ranks do not make the same call, so nothing was done. {told}."
    bad = [f"rank {ranks[rank]}: {said[rank][1]['problem']}" for rank in going if "problem" in said[rank][1]]
    if bad:
        return f"{_spell(same)} cannot be done, so nothing was done. {'; '.join(bad).rstrip('.')}."
    if len(going) < len(said) and same.get("op", SUM) not in (AVERAGE, SUM):
        return f"{_spell(same)}: only sums and averages have a meaning where a rank has joined."
    if same.get("root", ranks[going[0]]) not in [ranks[rank] for rank in going]:
        return f"{_spell(same)}: that rank has joined and has nothing to send."
    return ""


def as_root(root: Any) -> Any:
    """Return a whole number of any library as Python's; of anything else the words for it, which are no rank."""
    try:
        return operator.index(root)
    except TypeError:
        return repr(root)


def _needs_rows(x: Array) -> str:
    return "" if x.ndim else "a single number has no rows: give an array of one dimension or more"


def _parts(x: Array, splits: Any, size: int) -> tuple[str, list[int]]:
    """Return why the rows cannot be split, or ""; and the rows for each rank."""
    if splits is None:
        if len(x) % size:
            return f"{len(x)} rows do not divide among {size} ranks: give splits", []
        return "", [len(x) // size] * size
    given = np.asarray(splits).reshape(-1)
    if given.dtype.kind == "f" and not (np.isfinite(given) & (given == np.trunc(given))).all():
        return f"splits={given.tolist()} are no whole numbers", []
    parts = [int(n) for n in given]
    if len(parts) != size or min(parts, default=0) < 0 or sum(parts) != len(x):
        return f"splits={parts} are no {size} parts of {len(x)} rows", []
    return "", parts


def _spell(same: Call) -> str:
    """Say a call in words."""
    text = f"{same['call']} {same['name']!r}" if "name" in same else str(same["call"])
    if "dtype" in same:
        text += f" of {same['dtype']} {tuple(same['shape'])}".replace("'", "")
    if "root" in same:
        text += f" from rank {same['root']}"
    text += f" by {Op(same['op']).name.capitalize()}" if "op" in same else ""
    factors = [f"{what} {same[what]}" for what in ("prescale", "postscale") if same.get(what, 1.0) != 1.0]
    return f"{text} ({', '.join(factors)})" if factors else text
