"""Attributes that no state dict holds: what of them changed in a fit, as plain data.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a dataset
and a sampler do so as well. `AttributeTracker` records what they are when a fit starts, `AttributeTracker.changes`
returns what became of them, and `restore_changes` restores that in the same objects of a fresh process.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.attributes.attribute_access import attributes
from lightning_tricks.auto_resume.core.attributes.attribute_snapshots import (
    AttributeSnapshot,
    state_digest,
    take_snapshots,
)
from lightning_tricks.auto_resume.core.attributes.change_collector import (
    MAX_BYTES,
    AttributeChanges,
    ChangeCollector,
    too_large_reason,
)
from lightning_tricks.auto_resume.core.attributes.digests import IGNORED_TYPES
from lightning_tricks.auto_resume.core.attributes.drawable_values import CLOCK_NAME
from lightning_tricks.auto_resume.core.attributes.encoding import EncodeBudget, TooLargeError, encode
from lightning_tricks.auto_resume.core.attributes.generators import generator_state
from lightning_tricks.auto_resume.core.attributes.module_lists import find_template
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    AttributeSlot,
    ObjectWalk,
    SkippedNames,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.restoring import STATE_KEY
from lightning_tricks.auto_resume.core.attributes.unsaved_states import (
    InPlaceOptimizerState,
    UnsavedModuleState,
    get_state,
    has_own_state_dict,
)
from lightning_tricks.auto_resume.core.attributes.value_types import MISSING, function_name, is_subclass, type_name
from lightning_tricks.auto_resume.core.attributes.walkable_types import can_be_rebuilt

_CLOCKS = (time.time, time.monotonic, time.perf_counter)


class AttributeTracker:
    """Tracks the attributes of objects from its creation on.

    Modules are walked with all that they register; their parameters, buffers and modes are no attributes, and what
    aliases them is left alone. Objects of classes in Python are walked by their attributes, also those in lists, tuples
    and dicts: each once, at most 20,000, at most 40 deep, in containers of at most 10,000 entries. Objects of the
    standard library, of torch (except datasets, samplers and distributions), NumPy, Lightning, loggers and the like,
    DataLoaders, optimizers and schedulers are not walked: of them only the identity is compared, and the position of
    an iterator.

    Saved are numbers, strings, bytes, tensors, arrays, dates, paths, enums, what `PART_KINDS` lists, such as pandas
    tables, containers of all of these, random generators, and the state of an object with a `state_dict` and a
    `load_state_dict`. A value that was the same at all calls is not saved, so that an edit of code or arguments between
    two starts takes effect. Tensors over 256 KiB, arrays over 16 MiB, what a value holds beyond 16 MiB in all, and
    containers of more than 10,000 entries are compared
    by identity, size, version and a sample: a change in place outside the sample is found in tensors alone, and not if
    it was made through `data`.

    Args:
        roots: Objects by name, or a function that returns them.
        skipped: Returns the names of attributes to leave out of an object; `"state_dict"` among them leaves out its
            state.
        with_code: Whether to track what functions of the user's code keep values in as well: bound objects, closures,
            default arguments, and the global variables that they name.
        with_generators: Whether to save random generators that did not change as well, as they may have no seed.

    Examples:
        >>> from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
        >>> class Meter:
        ...     def __init__(self):
        ...         self.seen = []
        >>> meter, fresh = Meter(), Meter()
        >>> tracker = AttributeTracker({"meter": meter})
        >>> meter.seen.append(3)
        >>> changes = tracker.changes()
        >>> sorted(changes["values"]), restore_changes({"meter": fresh}, changes), fresh.seen
        (['meter.seen'], {}, [3])
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
        *,
        skipped: SkippedNames = nothing_skipped,
        with_code: bool = True,
        with_generators: bool = False,
    ) -> None:
        self._roots, self._skipped, self._with_code = roots, skipped, with_code
        self._with_generators = with_generators
        self._clocks = [clock() for clock in _CLOCKS]
        walk = self._walk()
        self._snapshots = dict(take_snapshots(walk, dict(walk.paths)))
        self._state_digests = {path: state_digest(value) for path, value in walk.stateful.items()}
        self._owners = {path: type_name(type(owner)) for path, owner in walk.owners.items()}
        self._modules, self._truncated = set(walk.modules), frozenset(walk.truncated)
        self._made_by_hooks: dict[str, AttributeSnapshot] | None = None
        self._seen_changed = dict[str, tuple[str, str]]()  # path -> path of the owner, and name

    def note(self, changes: Mapping[str, Any]) -> None:
        """Count as changed what had changed in another process, whose `changes` are restored here."""
        values: Mapping[str, Any] = changes["values"]
        kept = {path: one for path, one in values.items() if path not in self._modules}
        self._seen_changed |= {path: (one["of"], one["name"]) for path, one in kept.items()}

    def changes(self, *, after_hooks: bool = False) -> AttributeChanges:
        """Return what is other than when the tracker was created, or was so at an earlier call.

        Args:
            after_hooks: Whether just the hooks were called that a resumed fit calls again before attributes are
                restored. What is no data now is expected there as well, where it stays as it is at the first such call.
        """
        walk = self._walk()
        found = ChangeCollector(_newly_truncated(walk, self._truncated), set(walk.stateful))
        self._compare_modules(walk, found)
        self._forget_exchanged(walk)
        # values that a fresh process has, or has restored before it comes to a later path
        known = {number: path for number, path in walk.paths.items() if path in self._owners}
        known |= {number: path for number, path in walk.registered.items() if path.rpartition(".")[0] in self._owners}
        places, taken = dict(walk.paths), {*walk.paths.values()}
        snapshots = dict(take_snapshots(walk, known))
        if after_hooks and self._made_by_hooks is None:
            self._made_by_hooks = {path: one for path, one in snapshots.items() if one.opaque_values}
        for path, snapshot in snapshots.items():
            budget = self._encode_budget(path, walk, known)
            budget.places, budget.taken = places, taken
            self._compare_attribute(path, walk.slots[path], snapshot, budget, found)
        initial = {path: snapshot.location for path, snapshot in self._snapshots.items()}
        for path, (owner, name) in {**self._seen_changed, **initial}.items():
            if path in walk.slots or owner not in walk.owners or name == STATE_KEY:
                continue
            replaced = _replaced_variable(walk.owners[owner], name)
            if replaced is MISSING:
                found.add(path, AttributeSlot(None, owner, name, None), {"kind": "deleted"})
            else:
                found.lost[path] = type_name(type(replaced))
        for path, stateful in walk.stateful.items():
            self._compare_state(path, stateful, found)
        return found.within_limit(MAX_BYTES)

    def _forget_exchanged(self, walk: ObjectWalk) -> None:
        """Forget the objects whose place others of another class have taken: all of these is saved."""
        for path, owner in walk.owners.items():
            if path in self._owners and path not in walk.modules and self._owners[path] != type_name(type(owner)):
                del self._owners[path]
                self._state_digests.pop(path, None)
                others = {other: one for other, one in self._snapshots.items() if one.location[0] != path}
                self._snapshots = others

    def _walk(self) -> ObjectWalk:
        roots = self._roots() if callable(self._roots) else self._roots
        return ObjectWalk.from_roots(roots, self._skipped, with_code=self._with_code)

    def _compare_attribute(
        self,
        path: str,
        slot: AttributeSlot,
        snapshot: AttributeSnapshot,
        budget: EncodeBudget,
        found: ChangeCollector,
    ) -> None:
        """Add an attribute to the changes if it changed, or was changed and changed back."""
        before = self._snapshots.get(path)
        kind = type(slot.value)
        if is_subclass(kind, *IGNORED_TYPES) or has_own_state_dict(kind):
            return
        if before is None or before.differs(snapshot, slot.value):
            self._seen_changed[path] = snapshot.location
        elif path not in self._seen_changed and not (self._with_generators and generator_state(slot.value)):
            return
        elif snapshot.is_opaque or slot.target == path:
            found.add(path, slot, {"kind": "initial"})  # an object that a fresh process has as well
            return
        rebound = before is None or not before.is_value(slot.value)
        alias = slot.target if slot.target != path else ""
        if not alias and rebound and not slot.target:
            alias = snapshot.shared
        if alias:
            found.add(path, slot, {"kind": "same", "path": alias})
        elif type(slot.value) is float and budget.is_clock("", slot.value):
            found.add(path, slot, {"kind": "clock", "value": slot.value})
        else:
            self._encode_change(path, slot, budget, snapshot, found)

    def _encode_change(
        self,
        path: str,
        slot: AttributeSlot,
        budget: EncodeBudget,
        snapshot: AttributeSnapshot,
        found: ChangeCollector,
    ) -> None:
        before, is_copied = self._snapshots.get(path), found.is_copied(slot.owner_path)
        made = (self._made_by_hooks or {}).get(path)
        try:
            encoded = encode(slot.value, budget)
        except TooLargeError:
            found.lost[path] = too_large_reason(f"over {MAX_BYTES >> 20} MiB")
            return
        # holes are filled with what a fresh process has in the same location: only a new one is a loss
        expected = is_copied or bool(slot.target) or (before and not before.is_complete)
        kept = before.opaque_values.items() & snapshot.opaque_values.items() if before else ()
        new = set() if expected else budget.opaque_values - {hole for hole, _ in kept}
        by_hooks = {hole for hole in new if made and made.opaque_values.get(hole) == snapshot.opaque_values.get(hole)}
        new = {hole for hole in new - by_hooks if ".".join((path, *hole[0])) not in found.stateful}
        new = {hole for hole in new if not can_be_rebuilt(budget.opaque_types.get(hole[1], object), slot.owner)}
        function = function_name(slot.value) if before is None else ""
        # a function or a stateful object is likely to be set again by a hook at the start of the fit
        if snapshot.is_opaque and (path in found.stateful or function or (made and made.digest == snapshot.digest)):
            hole = {"kind": "hole", "type": function or type_name(type(slot.value))}
            found.add(path, slot, hole, by_hooks=bool(by_hooks))
        elif snapshot.is_opaque and not is_copied:
            found.lost[path] = type_name(type(slot.value))
        elif new:
            locations, kinds = zip(*sorted(new), strict=True)
            found.lost[".".join((path, *locations[0]))] = list_names(kinds, 1)
        elif not snapshot.is_opaque:
            in_place = before is not None and before.is_value(slot.value)
            found.add(path, slot, encoded, MAX_BYTES - budget.bytes_left, in_place, bool(by_hooks))

    def _encode_budget(self, path: str, walk: ObjectWalk, known: Mapping[int, str]) -> EncodeBudget:
        name = path.rpartition(".")[2]
        return EncodeBudget(
            MAX_BYTES,
            walk.registered,
            known,
            path,
            is_clock=lambda entry, value: self._is_clock(f"{name}.{entry}", value),
        )

    def _is_clock(self, name: str, value: float) -> bool:
        spans = zip(self._clocks, _CLOCKS, strict=True)
        matching = {clock for start, clock in spans if start <= value <= clock()}
        # seconds since 1970 are hardly anything else; seconds since the machine started could be a sum of losses
        return not value.is_integer() and (time.time in matching or (bool(matching) and bool(CLOCK_NAME.search(name))))

    def _compare_state(self, path: str, stateful: Any, found: ChangeCollector) -> None:
        state, state_path = get_state(stateful), f"{path}.{STATE_KEY}"
        if state is MISSING:
            return
        if state != {} and state_digest(stateful) != self._state_digests.get(path):
            self._seen_changed[state_path] = path, STATE_KEY
        elif state_path not in self._seen_changed:
            return
        is_large = isinstance(stateful, UnsavedModuleState | InPlaceOptimizerState)  # as the model itself is
        budget = EncodeBudget(sys.maxsize if is_large else MAX_BYTES)
        try:
            encoded = encode(state, budget)
        except TooLargeError:
            found.lost[state_path] = too_large_reason(f"over {MAX_BYTES >> 20} MiB")
            return
        if budget.opaque_values:
            found.lost |= {".".join((path, STATE_KEY, *location)): kind for location, kind in budget.opaque_values}
        else:
            size = 0 if is_large else MAX_BYTES - budget.bytes_left
            found.add(state_path, AttributeSlot(stateful, path, STATE_KEY, state), encoded, size)

    def _compare_modules(self, walk: ObjectWalk, found: ChangeCollector) -> None:
        """Find modules that were added and removed; one without weights is restored as a copy of a sibling."""
        for path, (parent, name) in walk.modules.items():
            kind = type_name(type(walk.owners[path]))
            if parent not in self._owners or self._owners.get(path) == kind:
                continue
            like = self._sibling_like(walk, parent, walk.owners[path])
            if like and path not in self._owners:
                found.add(path, AttributeSlot(None, parent, name, None), {"kind": "module", "type": kind, "like": like})
                found.copied.append(path)
            else:
                found.lost[path] = f"{kind} that was {'exchanged' if path in self._owners else 'added'} in the fit"
        for path in self._modules - walk.modules.keys():
            parent = path.rpartition(".")[0]
            if parent in walk.owners and path not in walk.owners:
                found.lost[path] = f"{self._owners[path]} that was removed in the fit"

    def _sibling_like(self, walk: ObjectWalk, parent: str, module: Any) -> str:
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            return ""
        same_type = {
            name: walk.owners[path]
            for path, (owner, name) in walk.modules.items()
            if owner == parent and self._owners.get(path) == type_name(type(module))
        }
        return find_template(same_type)


def all_values(
    roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped, with_code: bool = True
) -> AttributeChanges:
    """Return the values of all attributes of objects, as `AttributeTracker.changes` does if all of them changed."""
    present: dict[str, Any] = {}
    tracker = AttributeTracker(lambda: present, skipped=skipped, with_code=with_code)
    present.update(roots)
    return tracker.changes()


def _replaced_variable(owner: Any, name: str) -> Any:
    """Return what a class, a module or a closure has under the name of a variable that is tracked no more."""
    if is_subclass(type(owner), type):
        return vars(owner).get(name, MISSING)
    is_variable = type(owner) in (types.ModuleType, types.CellType)
    return dict(attributes(owner)).get(name, MISSING) if is_variable else MISSING


def _newly_truncated(walk: ObjectWalk, before: Collection[str]) -> dict[str, str]:
    """Report objects beyond the bounds of the walk; those that were beyond them before may never change."""
    new = [path for path in walk.truncated if path not in before]
    more = f", and {len(new) - 1} more" if new[1:] else ""
    return {new[0]: f"an object beyond the limits on the number and depth of objects{more}"} if new else {}
