"""The weights of one stage on one rank: their versions, their gradient, their optimizer."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25_000_000  # of an all-reduce, as in torch's own data parallelism

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Weights:
    """Parameters that are trained, in versions; the newest belongs to the optimizer.

    Gradients of all versions are summed up in flat tensors, one for each type, so that an
    all-reduce needs no copies. Those of parameters that other stages have too (``tied``) are apart:
    they are summed up over all of these stages' devices. A parameter goes by its ``primary`` name,
    whatever the module calls it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        primary: Mapping[str, str],
        tied: Collection[str],
        make_optimizer: MakeOptimizer,
        versions: int,
    ) -> None:
        by_name = {
            primary[name]: one
            for module in modules
            for name, one in module.named_parameters(remove_duplicate=False)
            if one.requires_grad
        }
        self.names, parameters = list(by_name), list(by_name.values())
        self._places = _places(modules, parameters)
        self._flat: list[Tensor] = []
        self._flat_tied: list[Tensor] = []
        self._gradients: list[Tensor | None] = [*self._lay_out(parameters, tied)]
        self.held = dict.fromkeys(range(versions), parameters)
        self.newest = versions - 1
        self._stash: int | None = None
        self._reductions: list[dist.Work] = []
        self.optimizer = make_optimizer(parameters) if parameters else None
        self._adopt(parameters)

    def _lay_out(self, parameters: list[nn.Parameter], tied: Collection[str]) -> list[Tensor]:
        """A view of a flat tensor for every parameter's gradient."""
        views: dict[int, Tensor] = {}
        for alone in (True, False):
            chosen = [
                (i, one)
                for i, (name, one) in enumerate(zip(self.names, parameters, strict=True))
                if (name in tied) != alone
            ]
            for dtype in dict.fromkeys(one.dtype for _, one in chosen):
                same = [(i, one) for i, one in chosen if one.dtype == dtype]
                flat = same[0][1].new_zeros(sum(one.numel() for _, one in same))
                (self._flat if alone else self._flat_tied).append(flat)
                parts = flat.split([one.numel() for _, one in same])
                for (i, one), part in zip(same, parts, strict=True):
                    views[i] = part.view_as(one)
        return [views[i] for i in range(len(parameters))]

    def _adopt(self, parameters: list[nn.Parameter]) -> None:
        for one, gradient in zip(parameters, self._gradients, strict=True):
            one.grad = gradient

    def leave_out(self, trained: Collection[str]) -> None:
        """Give no gradient to what is not ``trained``: the optimizer passes it over."""
        self._gradients = [
            gradient if name in trained else None
            for name, gradient in zip(self.names, self._gradients, strict=True)
        ]
        self._adopt(self.held[self.newest])

    def use(self, version: int) -> None:
        """Compute on ``version`` from now on."""
        parameters = self.held[version]
        for module, key, i in self._places:
            module._parameters[key] = parameters[i]

    def stash(self, version: int) -> None:
        """Keep ``version``, the newest, beside the one that the next update makes."""
        self._stash = version

    def drop(self, version: int) -> None:
        """Forget ``version``."""
        del self.held[version]

    def reduce(self, group: dist.ProcessGroup, share: float = 1.0) -> None:
        """Begin to sum ``share`` of the gradients up over the stage's devices."""
        for flat in self._flat:
            flat.mul_(share)
            for bucket in flat.split(max(1, BUCKET_BYTES // flat.itemsize)):
                self._reductions.append(dist.all_reduce(bucket, group=group, async_op=True))

    def under_way(self) -> list[dist.Work]:
        """The all-reduces that were begun; whoever takes them waits for them."""
        taken, self._reductions = self._reductions, []
        return taken

    @property
    def gradient_bytes(self) -> int:
        """Bytes that an all-reduce sums up."""
        return sum(flat.nbytes for flat in self._flat)

    def update(self) -> None:
        """Step the optimizer once the gradients are there; the new version is the newest."""
        for work in self.under_way():
            work.wait()
        if self._stash is None:
            parameters = self.held.pop(self.newest)
            self._adopt(parameters)  # autograd gives zeros to some that are left out
        else:
            parameters = self._copied()
            self._stash = None
        self.newest += 1
        self.held[self.newest] = parameters
        if self.optimizer is not None:
            self.optimizer.step()
        for flat in (*self._flat, *self._flat_tied):
            flat.zero_()
        self.use(self.newest)

    def _copied(self) -> list[nn.Parameter]:
        """The newest version once more, for the optimizer; microbatches in flight keep the old.

        New objects and not new data: autograd saves a parameter itself, and would compute on
        whatever data that has by the time of the backward.
        """
        old = self.held[self.newest]
        new = [nn.Parameter(one.detach().clone()) for one in old]
        self._adopt(new)
        if self.optimizer is None:
            return new
        twin = dict(zip(map(id, old), new, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [twin[id(one)] for one in group["params"]]
        for one in old:
            if one in self.optimizer.state:
                self.optimizer.state[twin[id(one)]] = self.optimizer.state.pop(one)
        return new

    def begin(self) -> None:
        """Number the versions from 0 again, for the next iteration."""
        self.held = dict(enumerate(self.held[version] for version in sorted(self.held)))
        self.newest = len(self.held) - 1

    def load(self, tensors: Mapping[str, Tensor], *, buffered: bool) -> None:
        """Take over what the optimizer kept, and the weights before the last update."""
        newest = self.parameters(self.newest)
        for name, one in newest.items():
            prefix = f"optimizer.{name}."
            kept = {
                # A copy, as stages that share a parameter are given the same tensors; a number of
                # steps stays on the CPU, where the optimizer keeps it.
                key.removeprefix(prefix): value.to(one.device if value.dim() else "cpu", copy=True)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if self.optimizer is not None:
                self.optimizer.state.pop(one, None)
                if kept:
                    self.optimizer.state[one] = kept
        if buffered:
            self.held[0] = [
                nn.Parameter(tensors.get(f"previous.{name}", one.detach()).to(one, copy=True))
                for name, one in newest.items()
            ]
            self._adopt(self.held[0])

    def gradient(self, name: str) -> Tensor | None:
        """The summed-up gradient of a parameter: a view."""
        return self._gradients[self.names.index(name)]

    def parameters(self, version: int) -> dict[str, nn.Parameter]:
        """The parameters in a version, by name."""
        return dict(zip(self.names, self.held[version], strict=True))


def _places(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> list[tuple[nn.Module, str, int]]:
    """Every place in the modules where a parameter stands, and its position in ``parameters``."""
    position = {id(one): i for i, one in enumerate(parameters)}
    return [
        (module, key, position[id(one)])
        for module in {id(m): m for root in modules for m in root.modules()}.values()
        for key, one in module._parameters.items()
        if one is not None and id(one) in position
    ]
