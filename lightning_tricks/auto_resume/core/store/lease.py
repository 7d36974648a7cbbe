"""One writer for a place in an object store, which has no locks."""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_tricks._shared.file_locks import has_exited, this_process
from lightning_tricks.auto_resume.core.store.object_store import ObjectStore, StoreError

SECONDS_ALIVE = 30.0  # for which a record counts as a sign of life
# As s3rver, gcp-storage-emulator and some proxies do; S3, GCS and Azure refuse the second one.
_SECONDS_UNTIL_VISIBLE = 0.5  # after which a store that ignores "create only" shows whose record is there
_RECORD = re.compile(r"owner-(\d{6,})\.json")


class LeaseLostError(StoreError):
    """Another process has become the owner meanwhile."""


class Lease:
    """The right to write to a store: it belongs to the process with the newest of the records `owner-000001.json`.

    Each start creates the next record, only if it is absent, once the newest one is released, its process has exited,
    or it has not been renewed for 30 seconds by the clock of the store, or while this process watched. One that sends
    what a run has left, whose process has ended, is waited for: `timeout` and 30 seconds. A process that was suspended
    and lost its lease finds a newer record.

    Args:
        store: The objects.
        folder: Where the records are, such as ".auto_resume/".
        worker: The id of the process that trains.
        timeout: Seconds that a process may send after the one that trains has ended.
    """

    def __init__(self, store: ObjectStore, folder: str, worker: int, timeout: float) -> None:
        self._store, self._folder, self._worker, self._timeout = store, folder, worker, timeout
        self.number = 0
        # It sends what a run has left, and ends; the process that trains has ended.
        self.is_finishing = self.is_alone = False
        self._loss: LeaseLostError | None = None
        self._renewed_at = time.monotonic()
        # Two threads renew: without the lock, a sign of life could be written over the record that releases.
        self._is_released, self._lock = threading.Event(), threading.Lock()

    def acquire(self, say: Callable[[str], object]) -> int:
        """Become the owner; return the number of the owner before, 0 if there was none.

        Raises:
            StoreError: If another process is the owner and shows signs of life.
        """
        said, seen, signs, since, until = "", (0, None), 0, 0.0, math.inf
        while True:
            number, record = self._newest()
            now, sign = time.monotonic(), (number, record.get("sign"))
            if sign != seen:
                seen, signs, since = sign, signs + 1, now
            # The process that sends outlives the one that trains.
            is_alone = record.get("alone") or has_exited({**record, "pid": record.get("worker")})
            # By this clock as well: the record may be from the future, of a clock that was wrong.
            is_over = now - since > SECONDS_ALIVE or (is_alone and now > until)
            if not number or is_over or self._is_over(number, record):
                if self._create(number + 1):
                    self.number, self._renewed_at = number + 1, time.monotonic()
                    # After the new one is there: without any, two starts would both take number 1.
                    self._store.remove(self._name(old) for old in self._numbers() if old < self.number)
                    # Sending a large file takes longer than a record counts as a sign of life.
                    threading.Thread(target=self._keep, name="AutoResume-lease", daemon=True).start()
                    return number
                continue
            owner, words = f"process {record.get('worker')} on {record.get('host')}", ""
            if is_alone or record.get("finishing"):
                until = min(until, now + self._timeout + SECONDS_ALIVE)
                words = (
                    f"waiting up to {self._timeout + SECONDS_ALIVE:g} s for {owner}, which sends its last checkpoint"
                )
                words += f", by process {record.get('pid')} there: end that one to wait no longer"
            elif signs == 1:
                words = f"waiting up to {SECONDS_ALIVE:g} s to see whether {owner} still runs"
            if not words or now > until:
                raise StoreError(
                    f"{self._store.address} is in use by {owner}: two runs would overwrite each other's checkpoints. "
                    "Wait until it ends, or choose another address."
                )
            if words != said:
                say(words)
                said = words
            time.sleep(SECONDS_ALIVE / 15)

    def check(self) -> None:
        """Raise an error if another process has become the owner, as far as that is known.

        Raises:
            LeaseLostError: If one has.
        """
        if self.number and time.monotonic() - self._renewed_at > SECONDS_ALIVE:  # it may have been suspended
            with suppress(StoreError):
                self.renew()
        if self._loss is not None:
            raise self._loss

    def newest_number(self) -> int:
        """Return the number of the owner, or of the last one."""
        return max(self._numbers(), default=0)

    def lost(self) -> LeaseLostError:
        """Return the error of a process that is not the owner any more."""
        return LeaseLostError(
            f"another process has taken over {self._store.address}, as this one showed no sign of life for "
            f"{SECONDS_ALIVE:g} s. Nothing more is sent there."
        )

    def renew(self) -> None:
        """Show a sign of life.

        Raises:
            LeaseLostError: If another process has become the owner.
        """
        with self._lock:  # a thread renews it as well
            if self.newest_number() != self.number:
                self._loss = self.lost()
            if self._loss is not None:
                raise self._loss
            released = self._is_released.is_set()
            record = self._record(finishing=self.is_finishing, alone=self.is_alone, released=released)
            self._store.write(self._name(self.number), record)
            self._renewed_at = time.monotonic()

    def release(self) -> None:
        """Let the next process start at once."""
        self._is_released.set()
        self.renew()

    def _keep(self) -> None:
        while not self._is_released.wait(SECONDS_ALIVE / 3) and self._loss is None:
            with suppress(StoreError):  # the store may answer again in time
                self.renew()

    def _newest(self) -> tuple[int, dict[str, Any]]:
        while number := self.newest_number():
            try:
                record = json.loads(self._store.read(self._name(number)))
                return number, record if isinstance(record, dict) else {}
            except FileNotFoundError:
                continue  # it was removed for a newer one
            except ValueError:
                # What wrote it holds the number all the same: an unreadable record lasts until its age ends it.
                return number, {}
        return 0, {}

    def _numbers(self) -> list[int]:
        names = (name.removeprefix(self._folder) for name in self._store.sizes() if name.startswith(self._folder))
        return [int(found[1]) for name in names if (found := _RECORD.fullmatch(name))]

    def _is_over(self, number: int, record: dict[str, Any]) -> bool:
        if record.get("released") or has_exited(record):
            return True
        # Clocks of machines may differ by more than a lease lasts: the times of two objects are both of the store.
        probe = f"{self._folder}clock-{secrets.token_hex(4)}"
        self._store.write(probe, b"")
        try:
            return self._store.seconds_between(self._name(number), probe) > SECONDS_ALIVE
        except FileNotFoundError:
            return False
        finally:
            self._store.remove([probe])

    def _create(self, number: int) -> bool:
        record = self._record()
        self._store.create(self._name(number), record)
        # Two starts that both wrote see the same record then, which is that of one of them.
        time.sleep(_SECONDS_UNTIL_VISIBLE)
        return self._store.read(self._name(number)) == record

    def _name(self, number: int) -> str:
        return f"{self._folder}owner-{number:06d}.json"

    def _record(self, **more: object) -> bytes:
        # Random, so that each renewal can be told from the one before, and one process from another.
        values = {**this_process(), "worker": self._worker, "sign": secrets.token_hex(8), **more}
        return json.dumps(values).encode()
