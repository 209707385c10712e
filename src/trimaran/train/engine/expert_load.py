"""The load of experts: what a step counted over all ranks, and biases that are moved against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.protocol.job import TrainJob
from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.model.gpt import Stage
from trimaran.train.model.mixture.router import Balance


@dataclass(frozen=True)
class ExpertLoad:
    """What the routers of all ranks did in a step.

    `of_layers` (layers with experts, experts) are the tokens that each expert was sent, over the mean of its layer.
    `balance_loss` and `z_loss` are the means over layers and sequences, or tokens, by what `train` states of them not
    multiplied; None where it states none.
    """

    of_layers: tuple[tuple[float, ...], ...]
    balance_loss: float | None
    z_loss: float | None

    @property
    def busiest(self) -> float:
        """The largest load of an expert, over the mean of its layer."""
        return max(max(layer) for layer in self.of_layers)


class ExpertCounts:
    """Has the routers of a rank count, and makes of all ranks' counts an `ExpertLoad` and a step of the biases."""

    def __init__(self, job: TrainJob, stage: Stage, mesh: Mesh, device: torch.device) -> None:
        model, train = job.workload.model, job.train
        slicers = (mesh.tp,) if mesh.tp.slices_sequence else ()
        self._job = job
        sharers = (mesh.sequence.group, *slicers)
        self._balance = Balance(model, train.balance_loss, train.router_z_loss, sharers, device)
        for router in stage.routers():
            router.balance = self._balance

    def begin(self, token_scale: float) -> None:
        """A step begins, by whose `token_scale` the loss of each token is multiplied."""
        self._balance.begin(token_scale)

    def counted(self) -> Tensor:
        """What this rank has counted, to be summed over all ranks."""
        return torch.cat((self._balance.loads.view(-1), self._balance.losses))

    def load(self, summed: Tensor, batch: int) -> ExpertLoad:
        """What the sums over all ranks say of a step of `batch` sequences."""
        model, train, summed = self._job.workload.model, self._job.train, summed.cpu()
        loads = summed[:-2].view(model.layers, model.experts)[model.dense_layers :]
        balance, z = (summed[-2:] / (batch * len(loads))).tolist()
        relative = loads / loads.mean(1, keepdim=True)
        return ExpertLoad(
            of_layers=tuple(tuple(layer) for layer in relative.tolist()),
            balance_loss=balance if train.balance_loss else None,
            z_loss=z / self._job.workload.seq_len if train.router_z_loss else None,
        )

    def move_biases(self, flat: FlatWeights, load: ExpertLoad) -> None:
        """Raise the biases of experts below the mean load, and lower those above it, by the rate that `train` states.

        Loss-free balancing: Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
        """
        rate, first = self._job.train.router_bias_rate, self._job.workload.model.dense_layers
        for name, place in flat.places.items():
            if not name.endswith(".mlp.router.bias"):
                continue
            relative = torch.tensor(load.of_layers[int(name.split(".")[1]) - first], dtype=torch.float64)
            step = (rate * torch.sign(1.0 - relative)).to(place.weight.device)
            for owned, master in zip(flat.owned, flat.master, strict=True):
                part = place.span.within(owned)
                if len(part):
                    master[part.slice_in(owned)] += step[part.slice_in(place.span)].to(master.dtype)
