"""ProbedModel: whole parts of a model, as a probe timed them on one rank."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import Rate

# A transformer layer; logits over the vocabulary with their loss.
PartName = Literal["layer", "head"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)


class PartTime(Noun):
    """One measured part: microseconds of one micro-batch forward and backward on one rank, which works alone.

    `tp` is the share that the rank has of the part's weights; the collectives of tensor parallelism are left out.
    The backward adds the weights' gradients to those before it. The head's gradient is made along with its loss.
    """

    part: PartName
    precision: Rate
    tp: int = Field(gt=0)
    mbs: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    forward_us: float = Field(gt=0)
    backward_us: float = Field(gt=0)


class ProbedModel(Noun):
    """A model whose layers and head were timed in the software `stack`."""

    stack: str = Field(min_length=1)
    model: Model
    times: tuple[PartTime, ...] = Field(min_length=1)

    def of(self, part: PartName, model: Model) -> tuple[PartTime, ...]:
        """The times of a part of `model`: none unless its part is the same as the probed model's.

        Layers of one shape are the same layers in a model of any depth and vocabulary.
        """
        same = self.model.layer_shape == model.layer_shape
        if part == "head":
            same = (self.model.hidden, self.model.vocab, self.model.head) == (model.hidden, model.vocab, model.head)
        return tuple(time for time in self.times if time.part == part) if same else ()
