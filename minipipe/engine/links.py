"""Tensors between ranks: what is sent, in which order it is received, and when a send is over."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minipipe.lower import Message, Program
from minipipe.ranks.channels import Channels
from minipipe.ranks.failure import PipelineError, broken

_SCALARS = {int: torch.int64, float: torch.float64, bool: torch.bool}


class Item(NamedTuple):
    """One value that crosses a border: a tensor, a number sent as a tensor (`python`), or None."""

    shape: torch.Size | None
    dtype: torch.dtype | None
    needs_gradient: bool
    python: bool = False


class Payload:
    """The form of what goes from stage to stage, known on both sides: `items`, or one `single`.

    size: bytes of all tensors. plain: nothing but tensors. needs: which items want a gradient.
    """

    def __init__(self, items: tuple[Item, ...], single: bool):
        self.items, self.single = items, single
        self.plain = all(item.dtype is not None and not item.python for item in items)
        self.size = sum(item.shape.numel() * item.dtype.itemsize for item in items if item.dtype)
        self.needs = tuple(item.needs_gradient for item in items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Payload) and (self.items, self.single) == (other.items,
                                                                            other.single)

    def gradients(self) -> Payload:
        """The form of what comes back: one gradient for each value that needs one."""
        return Payload(tuple(item for item in self.items if item.needs_gradient), False)


def fits(payload: Payload, values: tuple) -> bool:
    """Whether values are tensors of this form, so that it need not be described again."""
    if not payload.plain or len(payload.items) != len(values):
        return False
    for value, (shape, dtype, needs_gradient, _) in zip(values, payload.items, strict=True):
        if (not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype != dtype
                or value.requires_grad != needs_gradient):  # fmt: skip
            return False
    return True


def describe(values: tuple, single: bool, stage: int) -> Payload:
    """The form of a stage's outputs; PipelineError names stage and type of what can't be sent."""
    items = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise PipelineError(
                    f"stage {stage} returns a tensor of layout {value.layout} on "
                    f"{value.device}, dtype {value.dtype}: only dense tensors can be sent"
                )
            items.append(Item(value.shape, value.dtype, value.requires_grad))
        elif value is None:
            items.append(Item(None, None, False))
        elif type(value) in _SCALARS:
            items.append(Item(torch.Size(()), _SCALARS[type(value)], False, True))
        else:
            raise PipelineError(
                f"stage {stage} returns {type(value).__name__}, which can't be sent: return a "
                "tensor or a flat tuple of tensors, None, int, float and bool"
            )
    return Payload(tuple(items), single)


class Links:
    """All messages of one rank's program.

    Receives of one ordered pair of ranks are posted in the order in which the other side sends.
    A send is over, and its tensor free again, as soon as a later message from the same rank shows
    that it has been received; the rest is waited for at the end of the step.
    """

    def __init__(self, program: Program, channels: Channels, device: torch.device):
        self.device, self._channels = device, channels
        rank = channels.rank
        self._where = device if channels.nccl else torch.device("cpu")  # gloo: through the host
        self._elsewhere = self._where != device
        # An emulated link: takes message, size and the posting of it, returns a handle.
        self.carry: Callable[[Message, int, Callable[[], list]], Any] | None = None
        self.bytes_sent = self.bytes_posted = 0
        peers = {m.source for s in program.steps(rank) for m in s.receives}
        peers |= {m.target for s in program.steps(rank) for m in s.sends}
        self._incoming = {peer: program.channel(peer, rank) for peer in sorted(peers)}
        steps = [step for r in range(program.schedule.ranks) for step in program.steps(r)]
        channels.connect(sorted({m[3:] for step in steps for m in step.sends}), self._where)
        self._settles = {peer: _settled(program, rank, peer) for peer in peers}
        self._outbox: dict[int, deque] = {peer: deque() for peer in peers}
        self._sent = dict.fromkeys(peers, 0)
        self._posted = dict.fromkeys(peers, 0)
        self._arriving: dict[Message, tuple] = {}
        self._number = {m: n for ms in self._incoming.values() for n, m in enumerate(ms)}

    def begin(self) -> None:
        """Start a step: nothing posted, nothing sent."""
        self.bytes_sent = 0
        self._sent = dict.fromkeys(self._sent, 0)
        self._posted = dict.fromkeys(self._posted, 0)

    def send(self, message: Message, values: tuple, payload: Payload, announce: bool) -> None:
        """Send values to the message's target, its form first where `announce`; never blocks."""
        if not payload.plain:
            values = [torch.tensor(v, dtype=item.dtype) if item.python else v
                      for v, item in zip(values, payload.items, strict=True)]  # fmt: skip
        tensors = [v.detach().contiguous() for v in values if v is not None]
        if self._elsewhere:
            tensors = [tensor.to(self._where) for tensor in tensors]
        self.bytes_sent += payload.size
        if announce:
            body = torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)
            tensors = [torch.tensor([body.numel()]).to(self._where), body.to(self._where), *tensors]
        target = message.target
        self._sent[target] += 1
        if self.carry is None:
            works = self._begin(self._channels.send, target, tensors)
        else:
            size = sum(t.numel() * t.element_size() for t in tensors)
            works = [self.carry(message, size,
                                lambda: self._begin(self._channels.send, target, tensors))]
        self._outbox[target].append(works)

    def _begin(self, way: Callable, peer: int, tensors: list[torch.Tensor]) -> list:
        """Begin to send or to receive; a handle for each tensor."""
        try:
            return [way(peer, tensor) for tensor in tensors]
        except RuntimeError as error:
            raise broken(error) from error

    def post(self, message: Message, payload_of: Callable[[Message], Payload]) -> None:
        """Post the receive of a message, after those that the same rank sends before it."""
        source, number = message.source, self._number[message]
        for place in range(self._posted[source], number + 1):
            following = self._incoming[source][place]
            payload = payload_of(following)
            buffers = [
                None if item.dtype is None
                else torch.empty(item.shape, dtype=item.dtype, device=self._where)
                for item in payload.items
            ]  # fmt: skip
            tensors = buffers if payload.plain else [b for b in buffers if b is not None]
            works = self._begin(self._channels.receive, source, tensors)
            self._arriving[following] = buffers, works, payload, self._settles[source][place]
            self._posted[source] = place + 1
            self.bytes_posted += payload.size

    def receive_announced(self, message: Message, payload_of: Callable[[Message], Payload]) -> None:
        """Post the receive of a message, after those before it, where an activation's form is
        not known yet and comes with it. The form of a gradient follows from its activation's."""
        source = message.source
        while self._posted[source] <= self._number[message]:
            following = self._incoming[source][self._posted[source]]
            if following.kind == "B":
                self.post(following, payload_of)
                continue
            size = torch.zeros(1, dtype=torch.int64, device=self._where)
            self._wait(self._begin(self._channels.receive, source, [size]))
            body = torch.empty(int(size), dtype=torch.uint8, device=self._where)
            self._wait(self._begin(self._channels.receive, source, [body]))
            payload = pickle.loads(body.cpu().numpy().tobytes())
            self.post(following, lambda _, payload=payload: payload)

    def take(self, message: Message) -> tuple[tuple, Payload]:
        """Wait for a posted message; its values, and their form."""
        buffers, works, payload, settled = self._arriving.pop(message)
        self.bytes_posted -= payload.size
        self._wait(works)
        self._settle(message.source, settled)
        if self._elsewhere:
            buffers = [b if b is None else b.to(self.device) for b in buffers]
        if not payload.plain:
            buffers = [b.item() if item.python else b
                       for b, item in zip(buffers, payload.items, strict=True)]  # fmt: skip
        return tuple(buffers), payload

    def _wait(self, works: list) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise broken(error) from error

    def _settle(self, target: int, until: int) -> None:
        """Let go of the first `until` sends of this step to a rank."""
        outbox = self._outbox[target]
        for _ in range(len(outbox) + until - self._sent[target]):
            self._wait(outbox.popleft())

    def finish(self) -> None:
        """Wait for every send that is still open."""
        for target in self._outbox:
            self._settle(target, self._sent[target])


def _settled(program: Program, rank: int, peer: int) -> list[int]:
    """For each message from a peer, how many sends to that peer are over once it is here.

    They are those that the peer had received before it sent that message; as messages of one
    direction overtake nobody, all earlier ones are over too.
    """
    mine = {m: n for n, m in enumerate(program.channel(rank, peer))}
    received, counts = 0, []
    for step in program.steps(peer):
        for message in step.receives:
            if message.source == rank:
                received = max(received, mine[message] + 1)
        counts += [received for message in step.sends if message.target == rank]
    return counts
