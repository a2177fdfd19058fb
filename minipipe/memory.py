"""What autograd really keeps: bytes of saved tensors, counted when saved and when freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """A tensor that autograd saved; its going away is what frees it."""

    __slots__ = ("tensor", "version", "meter", "key")

    def __init__(self, tensor: torch.Tensor, meter: Meter, key):
        self.tensor, self.version, self.meter, self.key = tensor, tensor._version, meter, key

    def __del__(self):
        self.meter.release(self.key)


class Meter:
    """Counts the bytes of activations that a rank keeps for its backward passes.

    Each storage counts once, however many operations saved it; parameters and buffers of the
    model don't count. A micro-batch that is a view of the user's batch counts with its own bytes.
    level: bytes kept now. high: the most since `high` was last set to `level`.
    """

    def __init__(self, owned: Iterable[torch.Tensor] = ()):
        self._owned = {t.untyped_storage().data_ptr() for t in owned}
        self._batch: set[int] = set()
        self._count: dict = {}
        self._bytes: dict = {}
        self.level = self.high = 0

    def batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors are the user's batch, of which stages see a micro-batch at a time."""
        self._batch = {t.untyped_storage().data_ptr() for t in tensors
                       if isinstance(t, torch.Tensor)}  # fmt: skip

    def watch(self) -> saved_tensors_hooks:
        """Count what autograd saves within this context."""
        return saved_tensors_hooks(self._pack, _unpack)

    @contextmanager
    def exempt(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Do not count these tensors within this context: they are the model's. Afterwards their
        memory may become an activation's."""
        new = {t.untyped_storage().data_ptr() for t in tensors} - self._owned
        self._owned |= new
        try:
            yield
        finally:
            self._owned -= new

    def hold(self, tensor: torch.Tensor) -> _Saved | None:
        """Count a tensor that a stage itself keeps, until the returned object goes away."""
        saved = self._pack(tensor)
        return saved if isinstance(saved, _Saved) else None

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer in self._owned or not pointer:
            return tensor
        if pointer in self._batch:
            key, size = (pointer, tensor.storage_offset()), tensor.numel() * tensor.element_size()
        else:
            key, size = pointer, storage.nbytes()
        count = self._count.get(key, 0)
        self._count[key] = count + 1
        if not count:
            self._bytes[key] = size
            self.level += size
            self.high = max(self.high, self.level)
        return _Saved(tensor, self, key)

    def release(self, key) -> None:
        """One holder of the tensor under this key is gone."""
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]
            self.level -= self._bytes.pop(key)


def _unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    if saved.tensor._version != saved.version:  # with hooks, torch itself does not look
        raise RuntimeError("a value needed for the backward pass, of shape "
                           f"{tuple(saved.tensor.shape)}, was modified by an inplace operation")
    return saved.tensor
