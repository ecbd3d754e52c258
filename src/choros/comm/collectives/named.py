"""Named collectives: the ranks first exchange signatures of their calls, so a difference is an error and not a hang."""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from choros.comm.collectives.object_codec import decode, encode, name_of
from choros.comm.collectives.reduce_ops import AVERAGE, SUM, Op, reduced, refusal
from choros.comm.group import Group
from choros.errors import InvalidInputError, RankMismatchError, counted
from choros.types import Array, dtype_of

_JOIN = {"call": "join"}
_MAX_DESCRIPTIONS = 256  # entries of the cache of call descriptions
_INLINE_BYTES = 4096  # data up to this size travel with the signature: one exchange instead of two
Signature = dict[str, Any]  # equal on all ranks
Details = dict[str, Any]  # may differ between ranks
Params = ParamSpec("Params")
Result = TypeVar("Result")


def _traced(
    method: Callable[Concatenate[Collectives, Params], Result],
) -> Callable[Concatenate[Collectives, Params], Result]:
    """Decorate a call: record it in the group's trace under the description that ``_negotiate`` set, then clear it."""

    @functools.wraps(method)
    def call(self: Collectives, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        group = self.group
        begin = 0 if group.trace is None else time.monotonic_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            if begin and group.trace is not None:
                nbytes = getattr(args[0], "nbytes", -1) if args else -1
                group.trace(("call", group.doing or method.__name__, begin, time.monotonic_ns(), nbytes))
            group.doing = ""

    return call


class Collectives:
    """Collectives of one set of ranks.

    Every rank makes the same calls in the same order. The ranks compare the signatures (call, name, type, shape,
    operation, root) before they use any value. If they differ, every rank raises ``RankMismatchError``, and the next
    call works. Inputs are never changed; results are new arrays.

    Args:
        group: Group. All ranks that take part.
        ranks: sequence of int. The ranks' numbers in roots and errors. Defaults to their numbers in the group.

    Attributes:
        group: Group. rank, size: int, within the group.
        negotiations: int. Comparisons of calls in this process, over all objects of the class.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> collectives = Collectives(SingleRankGroup())
        >>> collectives.allreduce(np.array([1.0, 2.0]), SUM, name="x").tolist()
        [1.0, 2.0]
    """

    negotiations = 0

    def __init__(self, group: Group, ranks: Sequence[int] = ()) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.ranks = list(ranks) or list(range(group.size))
        for attribute, default in (("doing", ""), ("warn_after", math.inf), ("trace", None)):
            if not hasattr(group, attribute):  # a group of another package need not report long waits
                setattr(group, attribute, default)
        self._call_numbers: dict[str, int] = {}
        self._descriptions: dict[bytes, str] = {}

    @_traced
    def allreduce(
        self, x: Array, op: Op = AVERAGE, *, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0
    ) -> Array:
        """Return the reduction of all ranks' arrays, with the dtype and shape of ``x``.

        Args:
            x: array of the same dtype and shape on every rank.
            op: Op. Defaults to AVERAGE.
            name: str. Name of the call in errors, equal on all ranks. Defaults to a number that counts such calls.
            prescale: float. Factor before the reduction. Defaults to 1.
            postscale: float. Factor after the reduction. Defaults to 1.

        Raises:
            RankMismatchError: the ranks' calls differ, or a rank cannot make its call.
        """
        factors = {"prescale": float(prescale), "postscale": float(postscale)}
        signature = self._signature("allreduce", name, x, op=int(op), **factors)
        problem = refusal(op, x.dtype, self.size)
        # A rank with a problem takes the other path, and still sends the same signature with the problem in its
        # details. So the others, which send inline, get its text instead of a hang.
        if x.nbytes <= _INLINE_BYTES and not problem:
            return reduced(_InlineReduction(self, signature), x, op, prescale, postscale)
        self._negotiate(signature, problem)
        return reduced(self.group, x, op, prescale, postscale)

    def allgather(self, x: Array, *, name: str | None = None) -> Array:
        """Return all ranks' rows, in the order of the ranks; the first dimension may differ and may be 0."""
        return self.allgather_counted(x, name=name)[0]

    @_traced
    def allgather_counted(self, x: Array, *, name: str | None = None) -> tuple[Array, list[int]]:
        """Return the result of ``allgather`` and each rank's number of rows."""
        replies = self._negotiate(
            self._row_signature("allgather", name, x), _needs_rows(x), rows=len(x) if x.ndim else 0
        )
        return self._gather_rows(x, replies), [details.get("rows", 0) for _, details in replies]

    @_traced
    def broadcast(self, x: Array, root: int | None = None, *, name: str | None = None) -> Array:
        """Return the root's array; the default root is the first rank. Dtype and shape must be equal on all ranks."""
        root_rank = self.ranks[0] if root is None else as_root(root)
        self._negotiate(self._signature("broadcast", name, x, root=root_rank), self._root_problem(root_rank))
        return self.group.broadcast(x, self.ranks.index(root_rank))

    @_traced
    def alltoall(self, x: Array, splits: Array | None = None, *, name: str | None = None) -> tuple[Array, Array]:
        """Send ``splits[r]`` rows to each rank r; return the rows received and how many came from each rank.

        Args:
            x: array of rows, in the order of the ranks that receive them.
            splits: integers of shape (size,). Defaults to equal parts.
            name: str. Name of the call in errors.

        Returns:
            The received rows, and an int32 array of shape (size,): the number of rows from each rank.
        """
        problem, parts = _needs_rows(x), [0] * self.size
        if not problem:
            problem, parts = _split_rows(x, splits, self.size)
        replies = self._negotiate(
            self._row_signature("alltoall", name, x), problem, rows=len(x) if x.ndim else 0, splits=parts
        )
        all_rows = self._gather_rows(x, replies)
        begins = np.cumsum([0, *(details.get("rows", 0) for _, details in replies)])
        pieces, received = [], []
        for begin, (_, details) in zip(begins, replies, strict=False):
            peer_splits = details.get("splits", [0] * self.size)
            first = int(begin) + sum(peer_splits[: self.rank])
            pieces.append(all_rows[first : first + peer_splits[self.rank]])
            received.append(peer_splits[self.rank])
        return np.concatenate(pieces), np.array(received, np.int32)

    @_traced
    def reducescatter(
        self, x: Array, op: Op = AVERAGE, *, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0
    ) -> Array:
        """Return this rank's rows of the reduction; if the rows do not divide evenly, the first ranks have one more."""
        signature = self._signature("reducescatter", name, x, op=int(op), prescale=prescale, postscale=postscale)
        self._negotiate(signature, _needs_rows(x) or refusal(op, x.dtype, self.size))
        total = reduced(self.group, x, op, prescale, postscale)
        rows_per_rank, remainder = divmod(len(x), self.size)
        begin = self.rank * rows_per_rank + min(self.rank, remainder)
        return total[begin : begin + rows_per_rank + (self.rank < remainder)].copy()

    @_traced
    def broadcast_object(self, value: object, root: int | None = None, *, name: str | None = None) -> Any:
        """Return the root's object; the default root is the first rank. ``encode`` lists the supported types."""
        root_rank = self.ranks[0] if root is None else as_root(root)
        problem, data = self._root_problem(root_rank), b""
        if self.ranks[self.rank] == root_rank:
            try:
                data = encode(value)
            except InvalidInputError as error:
                problem = str(error)
        self._negotiate(
            {"call": "broadcast_object", "name": self._name("broadcast_object", name), "root": root_rank}, problem
        )
        return decode(self.group.gather(data)[self.ranks.index(root_rank)])

    @_traced
    def allgather_object(self, value: object, *, name: str | None = None) -> list[Any]:
        """Return every rank's object, in the order of the ranks."""
        problem, data = "", b""
        try:
            data = encode(value)
        except InvalidInputError as error:
            problem = str(error)
        self._negotiate({"call": "allgather_object", "name": self._name("allgather_object", name)}, problem)
        return [decode(blob) for blob in self.group.gather(data) if blob]

    @_traced
    def barrier(self) -> None:
        """Return when every rank has called this."""
        self._negotiate({"call": "barrier"})

    def announce(self, name: str, size: int, dtype: DTypeLike) -> None:
        """Announce that ``group.sum_slots`` with ``size`` values follows.

        A rank that has joined then contributes zeros.

        Raises:
            RankMismatchError: the ranks' calls differ.
        """
        self._negotiate({"call": "reduction", "name": name, "dtype": name_of(np.dtype(dtype)), "shape": [size]})

    @_traced
    def join(self) -> int:
        """Declare that this rank has no more data; contribute zeros to the others' calls until all ranks have joined.

        A mean still divides by the number of all ranks.

        Returns:
            int. The rank that joined last.
        """
        turns = 0
        while True:
            replies = self._negotiate(_JOIN, turns=turns)
            active = [signature for signature, _ in replies if signature != _JOIN]
            if not active:
                return min(range(self.size), key=lambda rank: (replies[rank][1]["turns"], -rank))
            self._contribute_zeros(active[0])
            turns += 1

    # -- negotiation
    def _contribute_zeros(self, signature: Signature) -> None:
        """Take part in a call of the other ranks with zeros or no rows, after this rank has joined."""
        call = signature["call"]
        kind, _, number = str(signature.get("name", "")).rpartition(".")
        if kind == call and number.isdecimal():  # a call without a name: keep the ranks' numbers equal
            self._call_numbers[call] = int(number)
        if call in ("allreduce", "reducescatter"):
            zeros = np.zeros(signature["shape"], dtype_of(signature["dtype"]))
            if call == "reducescatter" or zeros.nbytes > _INLINE_BYTES:
                reduced(self.group, zeros, Op(signature["op"]))
        elif call == "broadcast":
            self.group.broadcast(
                np.zeros(signature["shape"], dtype_of(signature["dtype"])), self.ranks.index(signature["root"])
            )
        elif call == "reduction":
            size, dtype = signature["shape"][0], dtype_of(signature["dtype"])
            self.group.slot(size, dtype)[:] = 0
            self.group.sum_slots(size, dtype)
        elif call != "barrier":
            self.group.gather(b"")

    def refuse(self, activity: str, problem: str = "") -> None:
        """Take part in the others' next comparison with a call that differs, so that no rank waits for this one.

        Args:
            activity: str. This rank's activity, or the call that it cannot make.
            problem: str. The reason why it cannot make the call. Defaults to "".

        Raises:
            RankMismatchError: on every rank.
        """
        self._negotiate({"call": activity}, problem)

    def _root_problem(self, root: object) -> str:
        if root in self.ranks:
            return ""
        is_world = self.ranks == list(range(self.size))
        return f"root {root} is none of {f'{self.size} ranks' if is_world else f'the ranks {self.ranks}'}"

    def _name(self, call: str, name: str | None) -> str:
        if isinstance(name, str):
            return name
        if name is not None:
            raise TypeError(f"name={name!r}: give text.")
        self._call_numbers[call] = self._call_numbers.get(call, 0) + 1
        return f"{call}.{self._call_numbers[call]}"

    def _signature(self, call: str, name: str | None, x: Array, **fields: Any) -> Signature:
        return {
            "call": call,
            "name": self._name(call, name),
            "dtype": name_of(x.dtype),
            "shape": list(x.shape),
            **fields,
        }

    def _row_signature(self, call: str, name: str | None, x: Array) -> Signature:
        return {**self._signature(call, name, x), "shape": ["any", *x.shape[1:]]}

    def _gather_rows(self, x: Array, replies: list[tuple[Signature, Details]]) -> Array:
        parts = self.group.gather(np.ascontiguousarray(x).tobytes())
        rows = [details.get("rows", 0) for _, details in replies]
        arrays = [
            np.frombuffer(part, x.dtype).reshape(count, *x.shape[1:]) for part, count in zip(parts, rows, strict=True)
        ]
        return np.concatenate(arrays)

    def _negotiate(
        self, signature: Signature, problem: str = "", body: bytes = b"", **details: Any
    ) -> list[tuple[Signature, Details]]:
        """Exchange the signatures of the ranks' calls; return each rank's signature and details.

        Args:
            signature: the part of the call that must be equal on all ranks.
            problem: the reason why this rank cannot make the call, or "".
            body: data of this rank that travel with the signature; each rank's are in its details.
            **details: the part of the call that may differ between ranks.

        Raises:
            RankMismatchError: on every rank that has not joined; ranks that have joined wait for the next call.
        """
        Collectives.negotiations += 1
        if problem:
            details["problem"] = problem
        message = json.dumps([signature, details]).encode()
        if message not in self._descriptions:
            if len(self._descriptions) >= _MAX_DESCRIPTIONS:
                self._descriptions.clear()
            self._descriptions[message] = _describe(signature)
        # The same text object for the same call: ``RankStatus.set`` compares by identity and then writes two words
        # only.
        self.group.doing = self._descriptions[message]
        parts = [text.partition(b"\n") for text in self.group.gather(b"%b\n%b" % (message, body) if body else message)]
        # Nearly always all ranks send the same text. Then no JSON needs to be parsed.
        replies = [(signature, details) if text == message else tuple(json.loads(text)) for text, _, _ in parts]
        if body:
            bodies = [peer_body for _, _, peer_body in parts]
            replies = [
                (peer_signature, {**peer_details, "body": peer_body})
                for (peer_signature, peer_details), peer_body in zip(replies, bodies, strict=True)
            ]
        active = [rank for rank, (peer_signature, _) in enumerate(replies) if peer_signature != _JOIN]
        if not active:
            return replies
        problem_text = _find_problem(replies, active, self.ranks)
        if not problem_text:
            return replies
        self._call_numbers.clear()  # on every rank: else calls without a name would have different numbers from now on
        # A rank that has joined makes no call that could be wrong. It waits for the others' next call.
        if signature == _JOIN:
            return self._negotiate(signature, **details)
        raise RankMismatchError(problem_text)


class _InlineReduction:
    """Stand-in for a group in a reduction of few values: it sends the values together with the signature."""

    def __init__(self, collectives: Collectives, signature: Signature) -> None:
        self._collectives, self._signature = collectives, signature
        self.size, self.trace = collectives.size, collectives.group.trace

    def gather(self, x: bytes) -> list[bytes]:
        """Return each rank's bytes; zeros for a rank that has joined."""
        # A rank that has joined sends no body; zeros do not change the sum.
        return [
            details.get("body") or bytes(len(x)) for _, details in self._collectives._negotiate(self._signature, body=x)
        ]

    def sum(self, x: Array) -> Array:
        """Return the sum, in the order of the ranks."""
        dtype = x.dtype.newbyteorder("=")
        parts = [
            np.frombuffer(part, dtype).reshape(x.shape) for part in self.gather(x.astype(dtype, copy=False).tobytes())
        ]
        begin = time.monotonic_ns()
        with np.errstate(all="ignore"):
            total = np.asarray(functools.reduce(np.add, parts[1:], parts[0].copy()))
        if self.trace is not None:
            self.trace(("reduce", "reduce", begin, time.monotonic_ns(), x.nbytes))
        return total


def _find_problem(replies: list[tuple[Signature, Details]], active: list[int], ranks: list[int]) -> str:
    """Return the reason why the ranks' calls cannot run, or ""; the same text on every rank."""
    signature = replies[active[0]][0]
    if any(replies[rank][0] != signature for rank in active):
        descriptions = "; ".join(
            f"rank {ranks[rank]}: {_describe(peer_signature)}" for rank, (peer_signature, _) in enumerate(replies)
        )
        return f"The ranks do not make the same call, so nothing was done. {descriptions}."
    problems = [
        f"rank {ranks[rank]}: {replies[rank][1]['problem']}" for rank in active if "problem" in replies[rank][1]
    ]
    if problems:
        return f"{_describe(signature)} cannot be done, so nothing was done. {'; '.join(problems).rstrip('.')}."
    if len(active) < len(replies) and signature.get("op", SUM) not in (AVERAGE, SUM):
        return f"{_describe(signature)}: only sums and averages have a meaning where a rank has joined."
    if signature.get("root", ranks[active[0]]) not in [ranks[rank] for rank in active]:
        return f"{_describe(signature)}: that rank has joined and has nothing to send."
    return ""


def as_root(root: Any) -> Any:
    """Return an integer of any library as int; for any other object its ``repr``, which equals no rank."""
    try:
        return operator.index(root)
    except TypeError:
        return repr(root)


def _needs_rows(x: Array) -> str:
    return "" if x.ndim else "a single number has no rows: give an array of one dimension or more"


def _split_rows(x: Array, splits: ArrayLike | None, size: int) -> tuple[str, list[int]]:
    """Return the reason why the rows cannot be split, or "", and the number of rows for each rank."""
    if splits is None:
        if len(x) % size:
            return f"{counted(len(x), 'row')} cannot be divided equally among {size} ranks: give splits", []
        return "", [len(x) // size] * size
    values = np.asarray(splits).reshape(-1)
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.trunc(values))).all():
        return f"splits={values.tolist()} are not whole numbers", []
    parts = [int(n) for n in values]
    if len(parts) != size or min(parts, default=0) < 0 or sum(parts) != len(x):
        return f"splits={parts} are not {size} parts of {counted(len(x), 'row')}", []
    return "", parts


def _describe(signature: Signature) -> str:
    """Return a description of a call."""
    text = f"{signature['call']} {signature['name']!r}" if "name" in signature else str(signature["call"])
    if "dtype" in signature:
        text += f" of {signature['dtype']} {tuple(signature['shape'])}".replace("'", "")
    if "root" in signature:
        text += f" from rank {signature['root']}"
    text += f" by {Op(signature['op']).name.capitalize()}" if "op" in signature else ""
    factors = [f"{key} {signature[key]}" for key in ("prescale", "postscale") if signature.get(key, 1.0) != 1.0]
    return f"{text} ({', '.join(factors)})" if factors else text
