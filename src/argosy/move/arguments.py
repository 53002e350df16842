"""From torch's arguments to calls: checks tensors, cuts parts, keeps copies for tensors that are no single piece of memory.

groups.py asks for a `Request` per collective and hands its calls to a route. Nothing is sent from here, and nothing is written: a
refused argument leaves all tensors as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from argosy.errors import ConfigError, NoRoute
from argosy.move import counters, mapping
from argosy.move.calls import REDUCING, Call, Kind, Operation, can_gloo_reduce, can_reduce


@dataclass(slots=True)
class Request:
    """Calls in order; then what must be copied back; `result` is what a Work gives."""

    calls: list[Call]
    result: list[Any]
    copies_back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def is_beneath(self) -> bool:
        """Whether Gloo does the work, or a part of it."""
        return any(call.is_beneath for call in self.calls)

    @property
    def beneath(self) -> list[Call]:
        """What Gloo does: one after the other, since it has no coalesced forms, and to it a list is one tensor on several devices."""
        return [call for call in self.calls if call.is_beneath]

    def finish(self) -> None:
        """Copy back what was exchanged in copies."""
        if not self.copies_back:
            return
        # In whichever thread this runs: the caller's tensors may be of its inference mode.
        with torch.inference_mode():
            for target, source in self.copies_back:
                target.copy_(source)
                counters.own.copied(source.nbytes)


def in_place(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    operation: tuple[Operation, float] = (Operation.SUM, 1.0),
    root: int = 0,
) -> Request:
    """All-reduce, reduce and broadcast: each tensor is input and output."""
    request = Request([], list(tensors))
    for tensor in tensors:
        check(tensor, "tensor", may_be_sparse=kind is Kind.ALL_REDUCE)
        call = Call(kind, tensor.dtype, tensor.numel(), operation=operation[0], root=root)
        call.factor = operation[1]
        is_sparse = tensor.layout != torch.strided
        if kind in REDUCING:
            call.is_beneath = _is_beneath(kind, tensor.dtype, operation[0], is_sparse=is_sparse)
        memory = tensor if is_sparse else _writable(tensor, "tensor", request)
        call.inputs, call.outputs = [memory], [memory]
        request.calls.append(call)
    return request


def pairs(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Outputs with their inputs, of a coalesced call."""
    if len(outputs) != len(inputs):
        raise ConfigError(
            f"{len(inputs)} inputs and {len(outputs)} outputs in one call",
            fix="give one output for each input",
        )
    return list(zip(outputs, inputs, strict=True))


def gather_single(output: torch.Tensor, given: torch.Tensor, size: int) -> Request:
    """All-gather into one tensor."""
    check(output, "output")
    check(given, "input")
    _same_dtype([output, given])
    if output.numel() != given.numel() * size:
        raise ConfigError(
            f"all_gather: output has {output.numel()} elements, the inputs of {size} ranks {given.numel()} each",
            fix=f"give an output of {given.numel() * size} elements",
        )
    request = Request([], [output])
    memory = _writable(output, "output", request)
    count = given.numel()
    outputs = parts(memory, [count] * size)
    call = Call(Kind.ALL_GATHER, given.dtype, count, _aligned([_readable(given)], outputs), outputs)
    request.calls.append(call)
    return request


def gather_list(
    kind: Kind, outputs: Sequence[torch.Tensor], given: torch.Tensor, size: int, root: int = 0
) -> Request:
    """All-gather or gather into a list; `size` is 0 where nothing arrives."""
    check(given, "input")
    request = Request([], list(outputs))
    if len(outputs) != size:
        raise ConfigError(
            f"{len(outputs)} output tensors for {size} ranks", fix="give one for each rank"
        )
    for index, output in enumerate(outputs):
        check(output, f"output {index}")
        _same_count(output, given.numel(), f"output {index}")
    _same_dtype([given, *outputs])
    _distinct(outputs)
    room = [_writable(output, f"output {index}", request) for index, output in enumerate(outputs)]
    inputs = _aligned([_readable(given)], room)
    call = Call(kind, given.dtype, given.numel(), inputs, room, root=root)
    request.calls.append(call)
    return request


def scatter_single(
    output: torch.Tensor, given: torch.Tensor, operation: tuple[Operation, float], size: int
) -> Request:
    """Reduce-scatter of one tensor."""
    check(output, "output")
    check(given, "input")
    if given.numel() != output.numel() * size:
        raise ConfigError(
            f"reduce_scatter: input has {given.numel()} elements, {size} ranks take {output.numel()} each",
            fix=f"give an input of {output.numel() * size} elements",
        )
    return _scattered(output, parts(_readable(given), [output.numel()] * size), operation)


def scatter_list(
    output: torch.Tensor,
    given: Sequence[torch.Tensor],
    operation: tuple[Operation, float],
    size: int,
) -> Request:
    """Reduce-scatter of a list."""
    check(output, "output")
    if len(given) != size:
        raise ConfigError(
            f"{len(given)} input tensors for {size} ranks", fix="give one for each rank"
        )
    for index, tensor in enumerate(given):
        check(tensor, f"input {index}")
        _same_count(tensor, output.numel(), f"input {index}")
    return _scattered(output, [_readable(tensor) for tensor in given], operation)


def _scattered(
    output: torch.Tensor, given: list[torch.Tensor], operation: tuple[Operation, float]
) -> Request:
    _same_dtype([output, *given])
    request = Request([], [output])
    room = _writable(output, "output", request)
    call = Call(Kind.REDUCE_SCATTER, output.dtype, output.numel(), _aligned(given, [room]), [room])
    call.operation, call.factor = operation
    call.is_beneath = _is_beneath(Kind.REDUCE_SCATTER, output.dtype, operation[0])
    request.calls.append(call)
    return request


def scatter(
    output: torch.Tensor, given: Sequence[torch.Tensor], *, root: int, is_root: bool, size: int
) -> Request:
    """Scatter from the root's list."""
    check(output, "output")
    request = Request([], [output])
    if len(given) != (size if is_root else 0):
        raise ConfigError(
            f"scatter from rank {root}: {len(given)} input tensors here",
            fix=f"give {size} tensors on rank {root} and none elsewhere",
        )
    _same_dtype([output, *given])
    for index, tensor in enumerate(given):
        check(tensor, f"input {index}")
        _same_count(tensor, output.numel(), f"input {index}")
    room = _writable(output, "output", request)
    inputs = _aligned([_readable(tensor) for tensor in given], [room], root)
    call = Call(Kind.SCATTER, output.dtype, output.numel(), inputs, [room], root=root)
    request.calls.append(call)
    return request


def exchange_single(
    output: torch.Tensor,
    given: torch.Tensor,
    splits: tuple[Sequence[int], Sequence[int]],
    size: int,
) -> Request:
    """All-to-all of one tensor; `splits` are rows for the output and the input, empty for equal parts."""
    check(output, "output")
    check(given, "input")
    _same_dtype([output, given])
    request = Request([], [output])
    memory = _writable(output, "output", request)
    call = Call(Kind.ALL_TO_ALL, given.dtype, 0)
    (source,) = _apart([_readable(given)], [output])
    call.inputs = parts(source, _split_counts(given, splits[1], size, "input"))
    call.outputs = parts(memory, _split_counts(output, splits[0], size, "output"))
    request.calls.append(call)
    return request


def exchange_list(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], size: int
) -> Request:
    """All-to-all of lists."""
    if len(outputs) != size or len(given) != size:
        raise ConfigError(
            f"all_to_all with {len(given)} inputs and {len(outputs)} outputs for {size} ranks",
            fix="give one of each for each rank",
        )
    for name, tensors in (("input", given), ("output", outputs)):
        for index, tensor in enumerate(tensors):
            check(tensor, f"{name} {index}")
    _same_dtype([*outputs, *given])
    _distinct(outputs)
    request = Request([], list(outputs))
    inputs = _apart([_readable(tensor) for tensor in given], outputs)
    call = Call(Kind.ALL_TO_ALL, given[0].dtype, 0, inputs)
    call.outputs = [
        _writable(tensor, f"output {index}", request) for index, tensor in enumerate(outputs)
    ]
    request.calls.append(call)
    return request


def outgoing(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a message sends, as one piece of memory."""
    return _readable(_only(tensors))


def incoming(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Request]:
    """Memory for a message, and a request that copies it where it belongs at its end."""
    tensor = _only(tensors)
    request = Request([], [tensor])
    return _writable(tensor, "tensor", request), request


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ConfigError(f"a message of {len(tensors)} tensors", fix="send one at a time")
    check(tensors[0], "tensor")
    return tensors[0]


def check(tensor: torch.Tensor, name: str, *, may_be_sparse: bool = False) -> None:
    """Refuse what no route takes."""
    if tensor.device.type != "cpu":
        raise NoRoute(
            f"{name} {tuple(tensor.shape)} is on {tensor.device}: this backend moves CPU memory",
            fix="move it to the CPU, or use a backend of that device for it",
        )
    if tensor.layout != torch.strided and not (may_be_sparse and tensor.is_sparse):
        raise NoRoute(
            f"{name} {tuple(tensor.shape)} is sparse ({tensor.layout})", fix="use .to_dense()"
        )


def _is_beneath(
    kind: Kind, dtype: torch.dtype, operation: Operation, *, is_sparse: bool = False
) -> bool:
    """Whether a reduction is Gloo's; refuses what it cannot do either."""
    if not is_sparse and can_reduce(dtype, operation):
        return False
    can_gloo = operation is Operation.SUM if is_sparse else can_gloo_reduce(dtype, operation)
    if not can_gloo:
        what = "sparse tensors" if is_sparse else str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"{kind.name.lower()}: there is no {operation.name.lower()} of {what}",
            fix="use another operation, or convert the tensor",
        )
    return True


def parts(memory: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """A contiguous tensor cut into pieces of so many elements."""
    return list(torch.split(memory.view(-1), list(counts)))


def in_one(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous pieces as one tensor: itself where it was cut into them, else a copy."""
    found = _uncut(pieces)
    if found is None:
        found = torch.cat([piece.view(-1) for piece in pieces])
        counters.own.copied(found.nbytes)
    return found


def room_for(pieces: Sequence[torch.Tensor], request: Request) -> torch.Tensor:
    """One tensor to be filled in place of the pieces; where it is not made of them the request copies it to them at its end."""
    found = _uncut(pieces)
    if found is not None:
        return found
    counts = [piece.numel() for piece in pieces]
    room = pieces[0].new_empty(sum(counts))
    request.copies_back += [
        (piece.view(-1), part) for piece, part in zip(pieces, parts(room, counts), strict=True)
    ]
    return room


def _uncut(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What the pieces were cut from, when they lie one after the other."""
    first, at = pieces[0], pieces[0].storage_offset()
    start = at
    for piece in pieces:
        is_same = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_same or piece.storage_offset() != at:
            return None
        at += piece.numel()
    return first.as_strided((at - start,), (1,))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy."""
    if _is_plain(tensor):
        return tensor.detach()
    counters.own.copied(tensor.nbytes)
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is what it says. A conjugate or a negative may be a mere flag."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _apart(inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, copied when they share memory with outputs: a part would be overwritten before it has been sent."""
    written = {tensor.untyped_storage().data_ptr() for tensor in outputs}
    if any(tensor.untyped_storage().data_ptr() in written for tensor in inputs):
        counters.own.copied(sum(tensor.nbytes for tensor in inputs))
        return [tensor.clone() for tensor in inputs]
    return inputs


def _aligned(
    inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor], own: int | None = None
) -> list[torch.Tensor]:
    """The inputs, copied when one shares a part of its memory with an output.

    Routes go through both from their beginnings, a chunk of the output after the same chunk of the input: the whole may be shared, of a scatter
    by the `own` part alone, since Gloo writes that before it sends the others.
    """
    written = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in outputs]
    for index, tensor in enumerate(inputs):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        shared = {begin for begin, end in written if start < end and begin < stop}
        if shared - {start} or (shared and own not in (None, index)):
            counters.own.copied(sum(one.nbytes for one in inputs))
            return [one.clone() for one in inputs]
    return inputs


def _writable(tensor: torch.Tensor, name: str, request: Request) -> torch.Tensor:
    """The tensor itself, or a copy that is copied back."""
    if _is_plain(tensor):
        return tensor.detach()
    if mapping.has_overlap(tensor.shape, tensor.stride()):
        raise ConfigError(
            f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: its elements share memory",
            fix="use .clone() instead of an expanded tensor",
        )
    copy = _readable(tensor)
    request.copies_back.append((tensor, copy))
    return copy


def _same_dtype(tensors: Sequence[torch.Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ConfigError(
            f"tensors of one call have dtypes {', '.join(sorted(map(str, dtypes)))}",
            fix="use one dtype",
        )


def _same_count(tensor: torch.Tensor, count: int, name: str) -> None:
    if tensor.numel() != count:
        raise ConfigError(
            f"{name} has {tensor.numel()} elements, the others {count}", fix="give equal sizes"
        )


def _distinct(outputs: Sequence[torch.Tensor]) -> None:
    """Two outputs that share memory would hold what came last."""
    spans = sorted((t.data_ptr(), _span_bytes(t), i) for i, t in enumerate(outputs) if t.numel())
    for (start, num_bytes, _), (following, _, _) in itertools.pairwise(spans):
        if start + num_bytes > following:
            break
    else:
        return
    # Columns of one matrix lie between each other and share nothing: only to mark every element tells.
    begin, size = spans[0][0], outputs[0].itemsize
    end = max(start + num_bytes for start, num_bytes, _ in spans)
    marks = torch.zeros((end - begin) // size + 1, dtype=torch.bool)
    for start, _, index in spans:
        shape, strides = outputs[index].shape, outputs[index].stride()
        marked = marks.as_strided(shape, strides, (start - begin) // size)
        if (start - begin) % size or marked.any():
            raise ConfigError(
                f"output {index} shares memory with another output",
                fix="give each rank's output its own memory",
            )
        marked.fill_(True)


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    return mapping.span_bytes(tensor.shape, tensor.stride(), tensor.dtype)


def _split_counts(tensor: torch.Tensor, rows: Sequence[int], size: int, name: str) -> list[int]:
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if num_rows % size:
            raise ConfigError(
                f"{name} has {num_rows} rows, which {size} ranks cannot share equally",
                fix="give split sizes",
            )
        return [tensor.numel() // size] * size
    if len(rows) != size or sum(rows) != num_rows or min(rows) < 0:
        raise ConfigError(
            f"{name} has {num_rows} rows, its split sizes are {list(rows)}",
            fix=f"give {size} sizes that add up to {num_rows}",
        )
    width = tensor.numel() // num_rows if num_rows else 0
    return [row * width for row in rows]
