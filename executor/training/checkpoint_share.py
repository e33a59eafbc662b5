"""The share of a checkpoint that a rank writes and reads."""

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagewright.executor.training import checkpoint
from stagewright.executor.training.rank_executor import RankExecutor
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.partial_build import CannotBuild, outline_of
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.weights import Weights
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

_SAFETENSORS = ".safetensors"


def require_format(path: Path | None, folder: Path | None = None) -> None:
    """Refuse a safetensors file where the library is not installed, and a folder with files."""
    if path is not None and path.suffix == _SAFETENSORS and find_spec("safetensors") is None:
        raise InputError(
            f"{path} needs the package safetensors: pip install 'stagewright[safetensors]', or "
            "name a file that ends in .pt"
        )
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; name a new folder")


def write_parameters(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write a state dict, in which tied names have the same tensor."""
    if path.suffix == _SAFETENSORS:
        content = _safetensors(parameters)
    else:
        buffer = io.BytesIO()
        torch.save(parameters, buffer)
        content = buffer.getvalue()
    documents.write_file(path, content, "the parameters")


def _safetensors(parameters: Mapping[str, Tensor]) -> bytes:
    """The file that ``safetensors.torch.save_model`` writes, with the format as transformers reads.

    Of tied names the alphabetically first has the tensor; the metadata map the others to it.
    """
    from safetensors.torch import save

    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name in sorted(parameters):
        kept = first.setdefault(id(parameters[name]), name)
        if kept != name:
            metadata[name] = kept
    own = {name: parameters[name].contiguous() for name in sorted(first.values())}
    return bytes(save(own, metadata))


def write_model(folder: Path, make: Callable[[], Any], executor: RankExecutor) -> None:
    """Write a trained model to a folder that other frameworks load; all ranks call it.

    A model of ``transformers`` is saved by itself, ``config.json`` included, by the first rank; of
    another one every rank writes its share for ``torch.distributed.checkpoint``.
    """
    try:
        model = outline_of(make, 0).model
    except CannotBuild:
        model = make()
    if not hasattr(model, "save_pretrained"):
        checkpoint.save_model(folder, executor.parameters_of_rank())
        return
    state = executor.parameters_on_first_rank()

    def write(partial: Path) -> None:
        if state is not None:
            model.save_pretrained(partial, state_dict=state)

    checkpoint.whole(folder, write, os.rename)


def packed(value: Any) -> Tensor:
    """A value that can be pickled, as a tensor of bytes."""
    content = io.BytesIO()
    torch.save(value, content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def unpacked(tensor: Tensor) -> Any:
    """The value of `packed`; like the checkpoint itself, it is a pickle."""
    return torch.load(
        io.BytesIO(tensor.cpu().numpy().tobytes()), map_location="cpu", weights_only=False
    )


SCHEDULE, EXTRA, SCALE = "schedule.state", "extra.state", "scaler.state"
PACKED = "-packed"  # what the key of a state ends with that is no plain tensor, as one in 8 bits


class Stateful(Protocol):
    """A user's object that is saved in checkpoints."""

    def state_dict(self) -> Any:
        """The state to write, which may be anything that can be pickled."""

    def load_state_dict(self, state: Any, /) -> object:
        """Continue with the state that was written."""


class CheckpointShare:
    """The tensors of this rank's stages by the keys of a checkpoint.

    ``model.NAME`` are parameters and buffers under the model's own names, ``optimizer.NAME.KEY``
    what the optimizer keeps for a parameter, and ``previous.NAME`` the weights before the last
    update, where the plan computes on them; ``schedule.state`` is that of the learning rates,
    ``extra.state`` that of ``extra``, ``scaler.state`` that of the ``scale`` of losses.
    ``weights`` are by stage of this rank.
    """

    def __init__(
        self,
        rank: Rank,
        model: StagedModel,
        weights: Mapping[int, Weights],
        extra: Stateful | None = None,
        scale: Stateful | None = None,
    ) -> None:
        given = {EXTRA: extra, SCALE: scale}
        self._of_run = {key: one for key, one in given.items() if one is not None}
        self._rank, self._model, self._weights = rank, model, weights
        self._buffered = rank.plan.weight_rule.staleness > 0

    def state(self) -> dict[str, Tensor]:
        """The tensors that this rank writes; each key is written by one rank.

        The devices of a tensor group, and replicas, bring their shards together, so that all ranks
        call it.
        """
        found: dict[str, Tensor] = {}
        for s in self._weights:
            if self._rank.is_in_first_group(s) or self._rank.plan.stages[s].shards != "none":
                own = self._model_state(s) | self._optimizer_state(s)
                found |= own if self._rank.first(s) == self._rank.number else {}
        if self._rank.number == 0:
            found |= {key: packed(one.state_dict()) for key, one in self._of_run.items()}
        return found | self._schedule_state()

    def _schedule_state(self) -> dict[str, Tensor]:
        """The state of the learning rates, which all stages have: of the first that is trained."""
        if not self._model.trained:
            return {}
        s = min(self._model.stages_of[name][0] for name in self._model.trained)
        rates = self._weights[s].rates if s in self._weights else None
        if rates is None or self._rank.first(s) != self._rank.number:
            return {}
        return {SCHEDULE: packed(rates.state())}

    def _whole(self, s: int, name: str, one: Tensor) -> Tensor:
        """A tensor of the shape of parameter ``name``, or one that is whole anyway."""
        sharding = self._model.shardings.get(s)
        # What replicas brought together is on the host.
        return one if sharding is None else sharding.whole(name, one.to(self._rank.device))

    def _model_state(self, s: int) -> dict[str, Tensor]:
        weights = self._weights[s]
        tensors = self._model.tensors(s, weights)
        found = {name: one for name, one in tensors.items() if name not in weights.names}
        return {
            f"model.{name}": self._whole(s, name, one.detach())
            for name, one in (found | weights.values()).items()
            if self._model.stages_of[name][0] == s
        }

    def _optimizer_state(self, s: int) -> dict[str, Tensor]:
        weights, found = self._weights[s], dict[str, Tensor]()
        for name, kept in weights.states().items():
            if self._model.stages_of[name][0] != s:
                continue
            if self._buffered:
                found[f"previous.{name}"] = weights.parameters(0)[name].detach()
            for key, value in kept.items():
                if is_traceable_wrapper_subclass(value):  # of a parameter that is whole
                    found[f"optimizer.{name}.{key}{PACKED}"] = packed(value)
                else:
                    found[f"optimizer.{name}.{key}"] = self._whole(s, name, value)
        return found

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank's stages."""
        own = {name for s, one in self._weights.items() for name in self._model.tensors(s, one)}
        kinds = ["model", "optimizer"]
        kinds += ["previous"] if self._buffered else []
        rates = any(one.rates is not None for one in self._weights.values())
        others = {SCHEDULE} if rates else set()
        others |= self._of_run.keys()
        return [key for key in keys if _belongs(key, own, kinds) or key in others]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into the model and the optimizers.

        Raises InputError if a tensor of this rank is missing.
        """
        for s, weights in self._weights.items():
            own = self._own(s, tensors)
            for name, one in self._model.tensors(s, weights).items():
                if f"model.{name}" not in own:
                    raise InputError(f"the checkpoint has no {name!r} of stage {s}")
                with torch.no_grad():
                    weights.fill(name, one, own[f"model.{name}"])
            states = {
                key.removesuffix(PACKED): unpacked(one) if key.endswith(PACKED) else one
                for key, one in own.items()
            }
            weights.load(states, buffered=self._buffered)
            if weights.rates is not None:
                if SCHEDULE not in tensors:
                    raise InputError("the checkpoint has no learning rates of a schedule")
                weights.rates.load(unpacked(tensors[SCHEDULE]))
        for key, of_run in self._of_run.items():
            if key not in tensors:
                raise InputError(f"the checkpoint has no state for {key.removesuffix('.state')}")
            of_run.load_state_dict(unpacked(tensors[key]))

    def _own(self, s: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, or this rank's shards of those that a stage divides."""
        sharding = self._model.shardings.get(s)
        if sharding is None:
            return tensors
        return {key: sharding.own(_name_of(key), one) for key, one in tensors.items()}

    def whole_model(self, shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The model's state dict under all its names, from the shares of all ranks."""
        whole = {name: value for share in shares for name, value in share.items()}
        return {
            name: whole[names[0]]
            for names in self._model.names
            for name in names
            if names[0] in whole
        }


def _belongs(key: str, own: set[str], kinds: Sequence[str]) -> bool:
    return key.partition(".")[0] in kinds and _name_of(key) in own


def _name_of(key: str) -> str:
    """The parameter or buffer that an entry of a checkpoint belongs to."""
    kind, _, name = key.partition(".")
    return name.rpartition(".")[0] if kind == "optimizer" else name
