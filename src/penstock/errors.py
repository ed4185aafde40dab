"""Exceptions raised by penstock, with their HTTP status codes."""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all errors that penstock raises deliberately."""

    status = 500


class ModelError(PenstockError):
    """The model is missing, damaged, or not supported."""

    status = 400


class SettingError(PenstockError, ValueError):
    """A setting is out of its range, or two settings contradict each other."""

    status = 400


class WrongType(SettingError, TypeError):
    """A setting has the wrong type."""


class CacheFileError(PenstockError, ValueError):
    """A file does not hold a prompt cache that this version can read."""

    status = 400


class PoolFull(PenstockError, MemoryError):
    """No slot of the pool is free."""

    status = 503

    def __init__(self, slots: int) -> None:
        super().__init__(
            f"all {slots} slots of the pool are taken; release a sequence first "
            f"or construct the pool with a larger max_batch_size"
        )


class QueueFull(PenstockError):
    """The request does not fit in the queue of waiting sequences."""

    status = 429

    def __init__(self, waiting: int, added: int, max_queue: int) -> None:
        super().__init__(
            f"the queue is full: {waiting} waiting, {added} more requested, max_queue {max_queue}; "
            f"try again later, or raise max_queue"
        )
        self.waiting = waiting
        self.added = added
        self.max_queue = max_queue


class Displaced(QueueFull):
    """A waiting request was removed from the queue for a client with fewer waiting requests."""

    def __init__(self, waiting: int, max_queue: int) -> None:
        super().__init__(waiting, 0, max_queue)
        self.args = (
            f"the queue is full (max_queue {max_queue}), and this request's client has the most in "
            f"it ({waiting} waiting): it was removed for another client; try again later",
        )


class SequenceOverflow(PenstockError, ValueError):
    """A sequence would exceed its `max_len`."""

    status = 400

    def __init__(self, seq_id: int, length: int, added: int, max_len: int) -> None:
        super().__init__(
            f"sequence {seq_id} holds {length} tokens; {added} more do not fit in its {max_len}; "
            f"allocate it with a larger max_len"
        )


class UnknownSequence(PenstockError, KeyError):
    """The id was never allocated, or was released."""

    status = 404

    def __init__(self, seq_id: int, active: int) -> None:
        super().__init__(f"sequence {seq_id} is not one of the {active} active sequences")

    def __str__(self) -> str:  # KeyError would print the repr, quotes included
        return str(self.args[0])


class EngineStopped(PenstockError, RuntimeError):
    """The engine was closed, or its thread has died."""

    status = 503


class SpilledLost(Exception):
    """Keys and values in a cold tier are lost and will be recomputed; handled internally."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(
            f"{len(places)} blocks of keys and values are damaged, missing or late in the cold "
            f"tier; they are computed again from their tokens"
        )
        self.places = places


class StepFailed(PenstockError, RuntimeError):
    """A step of the model raised; the requests in it fail, all others continue."""

    status = 500


class GrammarFailed(StepFailed):
    """A grammar is too complex to continue, or has no valid next token; retrying does not help."""

    status = 400


class LedgerFull(PenstockError, MemoryError):
    """Bytes do not fit within the memory limit now; they may fit once others are released."""

    status = 503

    def __init__(self, message: str, needed_bytes: int, free_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.limit_bytes = limit_bytes


class NeverFits(PenstockError, ValueError):
    """Bytes would not fit within the memory limit even if everything else were evicted."""

    status = 413

    def __init__(self, message: str, needed_bytes: int, room_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.room_bytes = room_bytes
        self.limit_bytes = limit_bytes

    @property
    def wanted_limit_bytes(self) -> int:
        """Smallest memory limit within which the bytes would have fitted."""
        return self.limit_bytes + self.needed_bytes - self.room_bytes


class StepTooLarge(NeverFits):
    """One step of the configured size would exceed the memory limit."""
