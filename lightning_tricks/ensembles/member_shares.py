"""Members that the ranks of a fit share out among themselves: `members="sharded"`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_tricks._lightning_compat.ddp import gradients_kept_apart, syncs_batchnorm
from lightning_tricks._lightning_compat.flavor import DDPStrategy, MisconfigurationException
from lightning_tricks._lightning_compat.trainer import active_scaler, callbacks_of, overfit_batches_of
from lightning_tricks._shared.modules import parts_with_extra_state
from lightning_tricks._shared.tensors import clone_tensors, gather_objects, parameters_of
from lightning_tricks.ensembles.core.members import Members, refuse_lazy
from lightning_tricks.ensembles.core.sampling import sampler_of, why_not_reorder
from lightning_tricks.ensembles.ensemble import Ensemble

_AVERAGES = "averages weights of members that other ranks train: leave it out"
# Callbacks by their names, as the newest Lightning alone has all of them
_MIX_MEMBERS = {
    "GradientClipping": "clips the members of a rank as one: Trainer(gradient_clip_val=...) clips each",
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "ExponentialMovingAverage": _AVERAGES,
}


def member_shares(n_members: int, n_ranks: int) -> list[range]:
    """Return the members of each rank, of which some may have one more than others.

    Examples:
        >>> member_shares(5, 2)
        [range(0, 2), range(2, 5)]
    """
    return [range(rank * n_members // n_ranks, (rank + 1) * n_members // n_ranks) for rank in range(n_ranks)]


class MemberShares(Ensemble):
    """The part of an ensemble of independent members that lets each rank of a fit train a share of them.

    Every rank holds the values of all members. It trains its own on all batches that they would see in one process, and
    gradients are not exchanged. Before values are read, by a validation, a checkpoint or after the fit, each rank gets
    those of the members that others train. Checkpoints are those of one process.

    Attributes:
        members: "replicated" or "sharded".
    """

    members = "replicated"
    _shares: list[range]
    _own: list[Members]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "own_members": None, "_own": [], "_member_logs": {}}

    def setup(self, stage: str) -> None:
        """Share out the members of a fit."""
        super().setup(stage)
        self._leave_share()
        if stage != "fit" or self.members == "replicated" or self.trainer.world_size == 1:
            return
        self._refuse_what_is_not_apart()
        self._shares = member_shares(self.n_estimators, self.trainer.world_size)
        self.own_members = self._shares[self.trainer.global_rank]
        everybody: Any = self.estimators_
        self._own = [everybody.only(self.own_members)]  # in a list, so that it is no child
        self._installed.callback(self._leave_share)
        apart = gradients_kept_apart(self.trainer, self._exchange, self._whole_state, self._own_state)
        self._installed.enter_context(apart)

    def _leave_share(self) -> None:
        self.own_members = None
        self._own = []
        self._member_logs: dict[str, tuple[Any, int]] = {}  # sums over rows, and rows

    def trained_members(self) -> Members:
        """Return the members that this rank trains."""
        return super().trained_members() if self.own_members is None else self._own[0]

    def make_optimizer(self) -> Optimizer:
        """Make the optimizer of all members; on each rank, those of the others have no gradients, and stay."""
        own, self.own_members = self.own_members, None
        try:
            made = super().make_optimizer()
        finally:
            self.own_members = own
        if own is not None and isinstance(made, LBFGS):
            self._refuse("LBFGS steps all members by one loss: choose another optimizer")
        return made

    def training_loader(self, loaders: Any) -> Any:
        """Return the loader to train with, from which every rank reads all samples.

        Raises:
            MisconfigurationException: If ranks would see other samples than one process.
        """
        if self.own_members is not None:
            reason = why_not_reorder(loaders)
            if overfit_batches_of(self.trainer):
                reason = "overfit_batches divides samples among ranks"
            elif not reason and hasattr(sampler := sampler_of(loaders), "num_replicas"):
                reason = f"a {type(sampler).__name__} divides samples among ranks"
            if reason:
                self._refuse(f"each rank has to read all samples, and {reason}")
        return super().training_loader(loaders)

    def run_members_as(self, how: Mapping[str, Any]) -> None:
        """Let members run as in a checkpoint.

        Raises:
            MisconfigurationException: If they ran at once there: the states of its optimizer are those of all members.
        """
        if self.own_members is not None and how.get("stacked"):
            self._refuse('the members of the checkpoint ran at once: resume with members="replicated"')
        super().run_members_as(how)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Train the members of this rank, of which all may be frozen where others are not."""
        results = super().training_step(batch, batch_idx)
        loss, is_apart = results["loss"], self.own_members is not None
        if is_apart and not loss.requires_grad and any(value.requires_grad for value in self.estimators_.parameters()):
            if active_scaler(self.trainer) is not None:
                self._refuse("fp16 scales gradients, and the members of a rank are all frozen: use bf16-mixed")
            loss.requires_grad_()
        return results

    def on_fit_start(self) -> None:
        """Begin with the values of rank zero."""
        super().on_fit_start()
        if self.own_members is not None:
            for tensor in (*self.parameters(), *self.buffers()):
                _broadcast_tensors([tensor], 0)

    def on_validation_model_eval(self) -> None:
        """Get the members of other ranks."""
        self._exchange()
        super().on_validation_model_eval()

    def on_train_epoch_end(self) -> None:
        """Log what the members of all ranks have logged, as means of the epoch, and the loss."""
        if self.own_members is not None and self._has_lightning_members:
            own = {name: (float(total), rows) for name, (total, rows) in self._member_logs.items()}
            self._member_logs, sums = {}, defaultdict[str, Any](lambda: torch.zeros(2, dtype=torch.float64))
            for name, sums_of_rank in (item for of_rank in gather_objects(own) for item in of_rank.items()):
                sums[name] += torch.tensor(sums_of_rank)  # another number of ranks may have begun the epoch
            means = {name: total / rows for name, (total, rows) in sums.items()}
            self.log_dict(means, sync_dist=True)  # which Lightning warns without
        super().on_train_epoch_end()

    def on_train_end(self) -> None:
        """Get the members of other ranks; on rank zero, also their states in optimizers, to be saved after the fit."""
        super().on_train_end()
        self._exchange()
        if self.own_members is not None:
            optimizer = self._optimizer()
            states = self._whole_state(optimizer.state_dict())["state"]
            for number, parameter in enumerate(parameters_of(optimizer)):
                if number in states and parameter not in optimizer.state:
                    optimizer.state[parameter] = states[number]  # on the CPU, as the device may not have the memory

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return what this epoch's means are made of, those of what members log as well."""
        return {**super().mid_epoch_state(), "member_logs": dict(self._member_logs)}

    def load_mid_epoch_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what `mid_epoch_state` returned."""
        super().load_mid_epoch_state(state)
        self._member_logs = dict(state["member_logs"])

    def log_of_member(self, index: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value of a member; where others log on other ranks, its mean over the epoch.

        Raises:
            TypeError: If such a value is no number.
        """
        if self.own_members is None:
            super().log_of_member(index, name, value, *args, **kwargs)
            return
        if not isinstance(value, Tensor | int | float) or torch.as_tensor(value).numel() != 1:
            raise TypeError(
                f'members="sharded": a member logs {name!r} as {type(value).__name__}, and values of other ranks have '
                "to be single numbers: log a number, or let MetricsMonitor compute the metric."
            )
        loader: Any = self.trainer.train_dataloader
        rows = kwargs.get("batch_size") or loader.indices_of(self.trainer.fit_loop.batch_idx).shape[1]
        key = f"member_{index}/{name}"
        total, before = self._member_logs.get(key, (0.0, 0))
        self._member_logs[key] = total + torch.as_tensor(value).detach() * rows, before + rows

    @torch.no_grad()
    def _exchange(self) -> None:
        """Let all ranks have the values of each member that its own rank has."""
        if self.own_members is not None:
            for rank, share in enumerate(self._shares):
                for index in share:
                    _broadcast_tensors([*self.estimators_.member_tensors(index).values()], rank)
            parts = parts_with_extra_state(self.estimators_)
            own = {name: part for name, part in parts.items() if int(name.partition(".")[0]) in self.own_members}
            states = {name: part.get_extra_state() for name, part in own.items()}
            for of_rank in gather_objects(states) if parts else ():
                for name, state in of_rank.items():
                    if name not in own:
                        parts[name].set_extra_state(state)

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of an optimizer with the states of all members; on rank zero."""
        own = clone_tensors(self._own_state(state)["state"], "cpu")
        of_ranks: list[Any] | None = [None] * self.trainer.world_size if self.trainer.is_global_zero else None
        torch.distributed.gather_object(own, of_ranks)
        states = sorted(item for one in of_ranks or [own] for item in one.items())
        return {**state, "state": dict(states)}

    def _own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of an optimizer with the states of this rank's members."""
        own, parameters = set(self.trained_members().parameters()), parameters_of(self._optimizer())
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if len(numbers) != len(parameters):
            return state  # of other members, which the optimizer says
        kept = {number for number, parameter in zip(numbers, parameters, strict=True) if parameter in own}
        return {**state, "state": {number: value for number, value in state["state"].items() if number in kept}}

    def _optimizer(self) -> Optimizer:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        return optimizer  # type: ignore[no-any-return]

    def _refuse_what_is_not_apart(self) -> None:
        """Refuse what would mix the members of ranks, or give other results than in one process."""
        trainer = self.trainer
        if not isinstance(trainer.strategy, DDPStrategy):
            self._refuse(f'{type(trainer.strategy).__name__} is not supported: use strategy="ddp"')
        if trainer.world_size > self.n_estimators:
            self._refuse(f"{trainer.world_size} ranks are more than {self.n_estimators} members: use fewer devices")
        if syncs_batchnorm(trainer):
            self._refuse("sync_batchnorm=True averages statistics over members of all ranks: leave it out")
        parameters = [parameter for member in self.estimators_ for parameter in member.parameters()]
        if len(set(parameters)) < len(parameters):
            self._refuse('members share a parameter, which multiple ranks would train: use members="replicated"')
        for kind in (kind for callback in callbacks_of(trainer) for kind in type(callback).__mro__):
            if kind.__name__ in _MIX_MEMBERS:
                self._refuse(f"{kind.__name__} {_MIX_MEMBERS[kind.__name__]}")
        refuse_lazy(list(self.estimators_))

    def _refuse(self, reason: str) -> NoReturn:
        raise MisconfigurationException(f'{type(self).__name__}(members="sharded"): {reason}.')


@torch.no_grad()
def _broadcast_tensors(tensors: Sequence[Tensor], source: int) -> None:
    """Give tensors the values that they have on one rank, in place; one exchange for each dtype. All ranks call it."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        torch.distributed.broadcast(flat, source)
        for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(values.view_as(tensor))
